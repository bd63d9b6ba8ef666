"""Duty: keep one engine running. Start it, ask for its health, kill it when it hangs, start it again, or give
it up.

What to do is decided in core/supervision.py. An engine that is run elsewhere (worker.attach_url) is only asked.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from pathlib import Path

from mooncache.config import Config
from mooncache.errors import ConfigInvalid, EngineFailed, EngineUnavailable, InvalidArgument, MooncacheError
from mooncache.kvcache import identity
from mooncache.kvcache.instance_load import InstanceLoad
from mooncache.runtime.bind import is_loopback
from mooncache.runtime.log_files import trim
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.ports import hold_port, host_in_url
from mooncache.runtime.supervision import RunState, exit_words
from mooncache.worker.adapters.base import Launch
from mooncache.worker.core.facts import (
    FILE_BYTES_MAX,
    EngineFacts,
    facts_from_file,
    merged,
    model_of,
)
from mooncache.worker.core.own_cache import OwnCache
from mooncache.worker.engine_http import NOTHING_LISTENS
from mooncache.worker.process import EngineProcess
from mooncache.worker.state import WorkerState

_TICK_S = 0.1
HEALTH_INTERVAL_S = 1.0
_ASK_TIMEOUT_S = 5.0
# A stalled engine costs the requests that are sent to it: others have to hear of it soon.
_HEALTH_TIMEOUT_S = 1.0
_PASSPORT_WAIT_S = 20.0
_MODEL_TIMEOUT_S = 600.0
# Cache events that may wait to be reported; more cause a full report.
_PENDING_EVENTS_MAX = 100_000
_BLOCKS_MIN, _BLOCKS_UNKNOWN = 10_000, 1_000_000

log = get_logger(__name__)


async def run(state: WorkerState) -> None:
    """Until cancelled, or until the engine is given up (`state.failure` says why)."""
    if not state.attached and not state.model:
        await prepare(state)
    while state.supervision.state != RunState.GIVEN_UP:
        await step(state)
        await _pause(state)


async def step(state: WorkerState) -> None:
    """One look at the engine, and what follows from it."""
    now_s = state.clock.now_s()
    if state.supervision.state == RunState.DOWN:
        if state.supervision.due(now_s):
            begin(state)
        return
    if state.process is not None and (code := state.process.exited) is not None:
        await _over(state, exit_words(code))
        return
    if state.process is not None:
        trim(state.process.log_path)
    # A machine that is loading an engine may be slow to answer, and no request waits for it yet.
    longest_s = _HEALTH_TIMEOUT_S if state.supervision.state == RunState.READY else _ASK_TIMEOUT_S
    timeout_s = min(longest_s, state.config.worker.hang_timeout_s)
    problem = await state.http.healthy(state.url, timeout_s)
    now_s = state.clock.now_s()
    if problem:
        was = state.supervision.reason
        why = state.supervision.silent(now_s)
        if state.attached and problem == NOTHING_LISTENS and state.supervision.state == RunState.READY:
            why = problem  # it ended; whatever comes back there begins with an empty cache
        if why:
            await _over(state, why)
        elif bool(was) != bool(state.supervision.reason):
            state.wake_report.set()
        return
    stalled = state.supervision.stalled(now_s)
    if stalled and not state.attached:
        await _over(state, stalled)
        return
    suspected = bool(state.supervision.reason)
    if state.supervision.heard(now_s):
        state.facts_wait_s = now_s + _PASSPORT_WAIT_S
        log.info(
            Event.WORKER_ENGINE_READY,
            instance_id=state.instance_id,
            url=state.url,
            seconds=round(now_s - state.supervision.started_s, 1),
        )
    elif suspected:
        state.wake_report.set()
    if state.facts is None:
        await learn(state)
    else:
        learn_again(state)


async def _pause(state: WorkerState) -> None:
    """One health interval; shorter while the engine is down, loads or has just ended."""
    left_s = HEALTH_INTERVAL_S
    while left_s > 0:
        await state.clock.sleep(min(_TICK_S, left_s))
        left_s -= _TICK_S
        if state.supervision.state == RunState.DOWN and state.supervision.due(state.clock.now_s()):
            return
        if (
            state.process is not None
            and state.supervision.state != RunState.DOWN
            and state.process.exited is not None
        ):
            return
        if not state.ready and state.supervision.state != RunState.DOWN:
            left_s = min(left_s, _TICK_S)


async def prepare(state: WorkerState) -> None:
    """Make the small model with random weights, in a process of its own: it needs torch, the worker does not.

    Raises:
        EngineFailed: it could not be made.
    """
    from mooncache.tiny_model import default_folder

    folder = default_folder(state.state_dir)
    state.preparing = "making a small model with random weights"
    log_path = log_file(state)
    maker = EngineProcess([sys.executable, "-m", "mooncache.tiny_model", str(folder)], os.environ, log_path)
    try:
        code = await maker.wait(_MODEL_TIMEOUT_S)
    finally:
        await maker.kill()
    if code != 0:
        what = "did not end in time" if code is None else f"ended with {exit_words(code)}"
        state.preparing = f"the small model was not made: {what}"
        raise EngineFailed(
            f"Making the small model {what}. Last lines: {' | '.join(maker.log_tail(3))} (see {log_path})"
        )
    state.preparing = ""
    set_model(state, str(folder))


def set_model(state: WorkerState, model: str) -> None:
    """Which model the engine shall load, and what clients and gateways get to know about it."""
    folder = Path(model).expanduser()
    state.model = str(folder.absolute()) if folder.is_dir() else model
    state.model_name = state.config.worker.model_name or (folder.name if folder.is_dir() else model)
    state.tokenizer_path = tokenizer_folder(state.model)


def tokenizer_folder(model: str) -> str:
    """Folder with the tokenizer's files: the model's own, or the hub's copy of it on this machine."""
    with contextlib.suppress(ConfigInvalid):
        return str(identity.resolve_model(model))
    return model


def begin(state: WorkerState) -> None:
    """Start the engine, or begin to look at the attached one. Raises ConfigInvalid."""
    now_s = state.clock.now_s()
    if state.attached:
        _fresh(state, now_s)
        state.meter.reset()
        state.supervision.reason = f"looking for the engine at {state.url}"
        state.changed()
        return
    launch = _launch(state)
    command = state.adapter.command(launch)
    env = {key: value for key, value in {**os.environ, **command.env}.items() if value is not None}
    _fresh(state, now_s)
    state.events = (launch.events_endpoint, launch.replay_endpoint)
    try:
        state.process = EngineProcess(command.arguments, env, log_file(state))
    except EngineUnavailable as error:
        _ended(state, error.message, [])
        return
    log.info(
        Event.WORKER_ENGINE_STARTED,
        instance_id=state.instance_id,
        engine=state.adapter.name,
        model=state.model,
        url=state.url,
        start=state.supervision.starts,
        log_file=str(state.process.log_path),
    )
    if state.adapter.why_no_events:
        log.warning(
            Event.WORKER_EVENTS_OFF, instance_id=state.instance_id, reason=state.adapter.why_no_events
        )
    state.changed()


def _launch(state: WorkerState) -> Launch:
    """What the next start needs, and a run folder without what the last one left there."""
    worker = state.config.worker
    tls = state.config.tls if speaks_tls(state.config) else None
    for path in state.run_dir.glob("*.ipc"):
        path.unlink(missing_ok=True)
    passport_path(state).unlink(missing_ok=True)
    if state.next_engine_key:
        state.engine_key, state.next_engine_key = state.next_engine_key, ""
        state.engine_token = state.next_engine_token
        state.http.use_key(state.engine_key)
    number = state.supervision.starts + 1
    events = state.adapter.publishes_events and state.adapter.makes_passport
    return Launch(
        instance_id=state.instance_id,
        model=state.model,
        model_name=state.model_name,
        host=worker.engine_host,
        port=state.engine_port,
        engine_key=state.engine_key,
        passport_path=passport_path(state),
        state_dir=state.state_dir,
        events_endpoint=f"ipc://{state.run_dir}/events-{number}.ipc" if events else "",
        replay_endpoint=f"ipc://{state.run_dir}/replay-{number}.ipc" if events else "",
        tls_cert=tls.cert_file if tls else None,
        tls_key=tls.key_file if tls else None,
    )


def _fresh(state: WorkerState, now_s: float) -> None:
    """A new run begins: what was known of the last one no longer holds."""
    state.incarnation = secrets.randbits(63) | 1
    state.facts, state.cache, state.load = None, None, InstanceLoad()
    state.meter.reset(now_s)
    state.stream.restart()
    state.supervision.started(now_s)


async def _over(state: WorkerState, why: str) -> None:
    """The run is over, by itself or because it hangs: nothing of it may be left. Decide what comes."""
    now_s = state.clock.now_s()
    process, state.process = state.process, None
    state.facts, state.cache, state.load = None, None, InstanceLoad()
    if process is None:
        log.warning(Event.WORKER_ENGINE_LOST, instance_id=state.instance_id, url=state.url, reason=why)
        state.supervision.lost(now_s, why)
        state.changed()
        return
    await process.kill()
    _ended(state, why, process.log_tail())


def _ended(state: WorkerState, why: str, log_tail: list[str]) -> None:
    """Count the end, say what comes, and give the engine up when it was one too many."""
    again = state.supervision.ended(state.clock.now_s(), why, state.rng.random())
    path = str(log_file(state))
    log.warning(
        Event.WORKER_ENGINE_ENDED,
        instance_id=state.instance_id,
        reason=state.supervision.reason,
        log_tail=log_tail,
        log_file=path,
    )
    if not again:
        log.error(Event.WORKER_GAVE_UP, instance_id=state.instance_id, reason=state.supervision.reason)
        state.failure = f"{state.instance_id}: {state.supervision.reason} (see {path})"
    state.changed()


async def learn(state: WorkerState) -> None:
    """Find out what the healthy engine is; its passport may come a little later than its health."""
    said: EngineFacts | None = None
    problem = ""
    path = said_in(state)
    if path is not None:
        try:
            state.passport_mark = _mark(path)
            said = facts_from_file(read_capped(path))
        except (OSError, InvalidArgument) as error:
            problem = str(error)
            if state.clock.now_s() < state.facts_wait_s:
                return
    models = await state.http.json(state.url, "/v1/models", _ASK_TIMEOUT_S)
    info = await state.http.json(state.url, state.adapter.info_path, _ASK_TIMEOUT_S)
    page = await state.http.metrics(state.url, _ASK_TIMEOUT_S) or ""
    if state.attached:
        name, root = model_of(models)
        if not name:
            return  # it answers /health and cannot say what it serves: ask again
        set_model(state, state.config.worker.model or root or name)
        state.model_name = state.config.worker.model_name or name
        state.events = await event_sources(state)
    state.facts = merged(said or EngineFacts(), state.adapter.facts(models, info, page))
    passport = state.facts.passport
    if passport is None:
        log.warning(
            Event.WORKER_PASSPORT_MISSING,
            instance_id=state.instance_id,
            reason=problem or "the pool is switched off, or no passport file is named",
        )
    elif any(state.events):
        blocks = state.facts.kv_capacity_tokens // passport.block_tokens
        state.cache = OwnCache(
            passport,
            # What was removed in a batch that is lost would stay forever: no engine holds twice its own memory.
            block_count_max=max(_BLOCKS_MIN, 2 * blocks) if blocks else _BLOCKS_UNKNOWN,
            pending_max=_PENDING_EVENTS_MAX,
        )
    state.tokenizer_path = tokenizer_folder(state.model)
    state.changed()
    state.wake_events.set()


def learn_again(state: WorkerState) -> None:
    """An engine whose weights were changed, or whose cache was reset, writes its passport anew: report it."""
    path = said_in(state)
    if path is None or state.facts is None:
        return
    try:
        mark = _mark(path)
        if mark == state.passport_mark:
            return
        said = facts_from_file(read_capped(path))
    except (OSError, InvalidArgument):
        return  # it is written whole or not at all: what is known stays true
    state.passport_mark = mark
    if said.passport is None or said.passport == state.facts.passport:
        return
    state.facts = merged(said, state.facts)
    if state.cache is not None and state.cache.passport.block_tokens == said.passport.block_tokens:
        state.cache.renew(said.passport)
    log.info(
        Event.WORKER_PASSPORT_CHANGED, instance_id=state.instance_id, passport=said.passport.root().hex()
    )
    state.changed()


def said_in(state: WorkerState) -> Path | None:
    """The file in which the engine says what its blocks are, where there is one."""
    if state.attached:
        return state.config.worker.attach_passport
    return passport_path(state) if state.adapter.makes_passport else None


def _mark(path: Path) -> tuple[int, int, int]:
    """A value that differs for each version of a file, which is replaced as a whole."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


async def event_sources(state: WorkerState) -> tuple[str, str]:
    """Where an attached vLLM publishes its cache events; empty when it does not, or from more than one place."""
    found = await state.http.json(state.url, "/kv_event_sources", _ASK_TIMEOUT_S)
    sources = list(found.values()) if isinstance(found, dict) else []
    if len(sources) > 1:
        reason = f"the engine publishes cache events in {len(sources)} places, and one can be followed"
        log.warning(Event.WORKER_EVENTS_OFF, instance_id=state.instance_id, reason=reason)
    if len(sources) != 1 or not isinstance(sources[0], dict):
        return "", ""
    events, replay = sources[0].get("endpoint"), sources[0].get("replay_endpoint")
    return (events if isinstance(events, str) else "", replay if isinstance(replay, str) else "")


def passport_path(state: WorkerState) -> Path:
    """File by which the engine's side of the pool says what its blocks are."""
    return state.run_dir / "passport.json"


def log_file(state: WorkerState) -> Path:
    """Where the engine's output goes."""
    return state.state_dir / "logs" / f"{state.file_name}.engine.log"


def read_capped(path: Path) -> str:
    """A small file. Raises OSError, or InvalidArgument when it is not small or no text."""
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise InvalidArgument(f"{path} is larger than {FILE_BYTES_MAX} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path} is not text") from None


def hold_engine_port(config: Config) -> socket.socket | None:
    """A free port, kept for the engine over all its starts; None when the configuration names one.

    Raises:
        ConfigInvalid: no port can be had.
    """
    worker = config.worker
    if worker.engine_port:
        return None
    try:
        return hold_port(worker.engine_host.strip("[]"))
    except OSError:
        raise ConfigInvalid(f"No port can be opened on worker.engine_host {worker.engine_host!r}.") from None


def speaks_tls(config: Config) -> bool:
    """Whether the engine's port is HTTPS: beyond loopback, when TLS is on."""
    return config.tls.enabled and not is_loopback(config.worker.engine_host)


def engine_url(config: Config, port: int) -> str:
    """Where gateways and the worker reach the engine."""
    scheme = "https" if speaks_tls(config) else "http"
    return f"{scheme}://{host_in_url(config.worker.advertise_host or config.worker.engine_host)}:{port}"


async def stop(state: WorkerState, grace_s: float) -> None:
    """End the engine: ask, wait, kill."""
    process, state.process = state.process, None
    if process is not None:
        with contextlib.suppress(MooncacheError):
            await process.stop(grace_s)
