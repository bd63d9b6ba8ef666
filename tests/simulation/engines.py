"""Engines (modelled) and their workers (the real reports to the conductor)."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncache import errors
from mooncache.client.conductor_link import ConductorLink
from mooncache.errors import MooncacheError
from mooncache.kvcache.instance_load import InstanceLoad
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.kvcache.leg_hint import CacheOutcome, CacheReport, LegHint, LegRole
from mooncache.kvcache.leg_reports import EndedLeg
from mooncache.runtime.duties import Duty, DutyRunner
from mooncache.runtime.supervision import RestartPolicy, RunState, Supervision
from mooncache.worker.background import report_instance
from mooncache.worker.core.facts import EngineFacts
from mooncache.worker.core.own_cache import OwnCache
from mooncache.worker.state import WorkerState
from tests.simulation.conductors import world_name
from tests.simulation.network import CLUSTER

if TYPE_CHECKING:
    from mooncache.kvcache.passport import Passport
    from tests.simulation.world import World

BLOCK_TOKENS = 16
MODEL = "m"
_TOKEN_S = 0.01
_PROMPT_TOKEN_S = 0.0005
_CALL_S = 0.5


def expected_text(prompt: str, token: int) -> str:
    """Token number `token` of the answer to a prompt."""
    return f"{prompt}/{token}"


class SimEngine:
    """One life of an engine's process: it computes prompts, hands blocks over through the pool, and generates."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.process = world.begin(name)
        self.rng = random.Random(world.rng.random())
        self.clock = world.clock_of(self.process)
        self.run = self.rng.getrandbits(62) | 1
        self.open: dict[int, EngineCall] = {}
        self.own: dict[bytes, None] = {}
        self.ended_legs: list[EndedLeg] = []
        self._numbers = itertools.count(1)
        world.network.listen(name, self.process, None)

    def submit(self, body: bytes) -> EngineCall:
        """Begin a request."""
        call = EngineCall(self, next(self._numbers), json.loads(body))
        self.open[call.number] = call
        call.task = self.process.spawn(call.work())
        return call

    def load(self) -> tuple[int, InstanceLoad, list[bytes], list[EndedLeg]]:
        """What the worker reads: the run, the load, the keys of the own cache, and legs that have ended."""
        legs, self.ended_legs = self.ended_legs, []
        return self.run, InstanceLoad(running=len(self.open)), list(self.own), legs


class EngineCall:
    """A request at an engine, and the answer on its way."""

    def __init__(self, engine: SimEngine, number: int, body: dict[str, Any]) -> None:
        self.engine, self.number, self.body = engine, number, body
        self.hint = LegHint.from_params(body.get("kv_transfer_params"))
        self.out: list[bytes] = []
        self.news = asyncio.Event()
        self.ended = False
        self.task: asyncio.Task[Any] | None = None

    async def work(self) -> None:
        engine, world, hint = self.engine, self.engine.world, self.hint
        outcome = CacheOutcome.MISS
        try:
            prompt = self._prompt()
            keys = world.prompt_keys(prompt)
            waited = hint.wait_tokens // BLOCK_TOKENS
            if waited:
                there = await self._await_blocks(keys[:waited], hint.wait_s)
                outcome = CacheOutcome.HIT if there else CacheOutcome.TIMEOUT
            have = sum(1 for _ in itertools.takewhile(lambda key: key in engine.own, keys))
            if waited and outcome is CacheOutcome.HIT:
                have = await self._load(keys[:waited])
            await engine.clock.sleep(
                (len(keys) - have) * BLOCK_TOKENS * _PROMPT_TOKEN_S * (1 + len(engine.open) / 4)
            )
            engine.own.update(dict.fromkeys(keys))
            if hint.is_awaited:
                await self._save(keys)
            cache = CacheReport(
                asked_tokens=len(keys) * BLOCK_TOKENS, hit_tokens=have * BLOCK_TOKENS, outcome=outcome
            )
            await self._answer(prompt, len(keys) * BLOCK_TOKENS, cache)
            if hint.role is LegRole.DECODE and hint.decision_id:
                engine.ended_legs.append(EndedLeg(hint.decision_id, cache))
        finally:
            self.ended = True
            engine.open.pop(self.number, None)
            self.news.set()

    def _prompt(self) -> str:
        asked = self.body["prompt"]
        return asked if isinstance(asked, str) else self.engine.world.prompts[asked[0]]

    async def _await_blocks(self, keys: list[bytes], wait_s: float) -> bool:
        """Wait until the pool has the blocks, they are given up, or the time is over."""
        world, clock = self.engine.world, self.engine.clock
        given_up = asyncio.Event()
        for key in keys:
            world.waits.setdefault(key, []).append(given_up)
        until_s = clock.now_s() + wait_s
        try:
            while clock.now_s() < until_s and not given_up.is_set():
                if all(world.holders(world_name(key)) for key in keys):
                    return True
                await clock.sleep(0.05)
            return False
        finally:
            for key in keys:
                world.waits[key].remove(given_up)

    async def _load(self, keys: list[bytes]) -> int:
        """Load leading blocks from the pool; how many came."""
        world, name = self.engine.world, self.engine.name
        for done, key in enumerate(keys):
            holders = world.holders(world_name(key))
            try:
                if not holders:
                    return done
                await world.read_block(name, holders[0], world_name(key), _CALL_S, 0)
            except MooncacheError:
                return done
        return len(keys)

    async def _save(self, keys: list[bytes]) -> None:
        """Hand the blocks to the pool, through the node that the plan names."""
        world, engine = self.engine.world, self.engine
        node_id = self.hint.store_node or engine.rng.choice(sorted(world.nodes))
        node = world.nodes.get(node_id)
        if node is None:
            return
        core, line = node.core, f"{engine.name}#{next(world.lines)}"
        call = world.network.data_call
        try:
            for key in keys:
                name = world_name(key)
                if await call(engine.name, node_id, lambda name=name: core.reserve(line, name), _CALL_S):
                    await call(engine.name, node_id, lambda name=name: core.write(line, name, name), _CALL_S)
                    await call(engine.name, node_id, lambda name=name: core.commit(line, name), _CALL_S)
        except MooncacheError:
            return
        finally:
            core.close_line(line)

    async def _answer(self, prompt: str, tokens: int, cache: CacheReport) -> None:
        count = int(self.body.get("max_tokens", 1))
        usage = {"prompt_tokens": tokens, "completion_tokens": count}
        last = {"choices": [], "usage": usage, "kv_transfer_params": cache.to_params()}
        if not self.body.get("stream"):
            await self.engine.clock.sleep(count * _TOKEN_S)
            text = " ".join(expected_text(prompt, n) for n in range(count))
            self._send(json.dumps({**last, "choices": [{"text": text}]}).encode())
            return
        for n in range(count):
            await self.engine.clock.sleep(_TOKEN_S)
            self._send(_event({"choices": [{"text": expected_text(prompt, n)}]}))
        self._send(_event(last))
        self._send(b"data: [DONE]\n\n")

    def _send(self, data: bytes) -> None:
        self.out.append(data)
        self.news.set()

    def abort(self) -> None:
        """The gateway closed the connection."""
        if self.task is not None and not self.ended:
            self.task.cancel()


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


class EngineLine:
    """A gateway's calls to engines, with the methods of `Engines`."""

    def __init__(self, world: World, gateway: str) -> None:
        self._world, self._gateway = world, gateway

    async def post(self, url: str, path: str, body: bytes, request_id: str) -> Answer:
        """As `Engines.post`."""
        world, target = self._world, url.removeprefix("http://")
        engine = world.engines.get(target)
        if engine is None or engine.process.dead:
            await world.clock.sleep(world.network.delay_s())
            raise errors.EngineUnavailable("The engine cannot be reached.")
        sent: list[EngineCall] = []

        def submit() -> EngineCall:
            sent.append(engine.submit(body))
            return sent[0]

        try:
            call = await world.network.data_call(self._gateway, target, submit, 60.0)
        except errors.ConnectionLost:
            raise errors.EngineDied("The engine closed the connection.") from None
        except asyncio.CancelledError:
            for each in sent:
                each.abort()
            raise
        return Answer(world, self._gateway, call)


class Answer:
    """An open answer, with the methods of `EngineAnswer`."""

    status = 200

    def __init__(self, world: World, gateway: str, call: EngineCall) -> None:
        self._world, self._gateway, self._call = world, gateway, call
        self._read = 0

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The engine hears of it, and stops."""
        self._world.loop.call_later(0.001, self._call.abort)

    async def read_some(self) -> bytes:
        call, engine, network = self._call, self._call.engine, self._world.network
        while True:
            cut = (engine.name, self._gateway) in network._blocked
            if self._read < len(call.out) and not cut:
                data = b"".join(call.out[self._read :])
                self._read = len(call.out)
                await self._world.clock.sleep(network.delay_to_s(self._gateway))
                return data
            if engine.process.dead and not cut:
                raise errors.EngineDied("The engine closed the connection.")
            if call.ended and not cut:
                return b""
            call.news.clear()
            try:
                async with asyncio.timeout(0.25):
                    await call.news.wait()
            except TimeoutError:
                pass

    async def read_all(self, limit: int = 0) -> bytes:
        parts = []
        while part := await self.read_some():
            parts.append(part)
        if not parts:
            raise errors.EngineFailed("The engine ended its answer before it began.")
        return b"".join(parts)


class _Adapter:
    """The kind of engine, as far as registrations name it."""

    name, max_sequences, orders_by_priority = "test", 64, True


class SimWorker:
    """One life of a worker's process, for one engine. Engine and worker are started and die apart."""

    def __init__(self, world: World, name: str, engine: str, passport: Passport) -> None:
        self.world, self.name, self.engine_name = world, name, engine
        self.process = world.begin(name)
        self.rng = random.Random(world.rng.random())
        self.clock = world.clock_of(self.process)
        self._passport = passport
        self.process.run(self._build)
        self.process.spawn(self._run())

    def _build(self) -> None:
        config = self.world.config
        facts = EngineFacts(
            passport=self._passport,
            kv_bytes_per_token=1024,
            kv_capacity_tokens=1_000_000,
            block_tokens=BLOCK_TOKENS,
            max_model_tokens=100_000,
            max_sequences=64,
            pool=True,
        )
        unused: Any = None
        adapter: Any = _Adapter()
        self.state = WorkerState(
            config=config,
            clock=self.clock,
            rng=self.rng,
            adapter=adapter,
            link=ConductorLink(config.cluster.conductor_target, CLUSTER.text, config),
            http=unused,
            supervision=Supervision(RestartPolicy(), RunState.STARTING),
            meter=unused,
            run_dir=Path("/nowhere"),
            state_dir=Path("/nowhere"),
            instance_id=self.engine_name,
            file_name=self.engine_name,
            role=self.world.roles[self.engine_name],
            host_id=f"host-{self.engine_name}",
            engine_key="",
            engine_token="",
            model_name=MODEL,
            url=f"http://{self.engine_name}",
            worker_run=self.rng.getrandbits(62) | 1,
            incarnation=self.rng.getrandbits(62) | 1,
            facts=facts,
            cache=OwnCache(self._passport, first_sequence=self.rng.getrandbits(32)),
        )

    async def _run(self) -> None:
        DutyRunner(self.clock, self.world.duty_failed(self.name)).start(
            [
                Duty("watch_engine", self._watch_engine, 0.25),
                Duty("report_instance", lambda: report_instance.run(self.state)),
            ]
        )

    async def _watch_engine(self) -> None:
        """In the place of run_engine, scrape_load, follow_events and take_leg_reports: what they find out."""
        state, engine = self.state, self.world.engines[self.engine_name]
        try:
            # Worker and engine are on one host: no network lies between them.
            if engine.process.dead or engine.process.stopped:
                raise errors.EngineUnavailable("It does not answer.")
            run, load, keys, legs = engine.load()
        except MooncacheError as error:
            if not state.supervision.reason:
                state.supervision.reason = error.message
                state.changed()
            return
        was_ready = state.supervision.state == RunState.READY and not state.supervision.reason
        if run != state.incarnation:
            state.incarnation = run
            assert state.cache is not None
            state.cache.clear()
            was_ready = False
        state.supervision.state, state.supervision.reason = RunState.READY, ""
        state.load, state.load_s = load, state.clock.now_s()
        state.ended_legs.extend(legs)
        assert state.cache is not None
        for key in keys:
            state.cache._hold(key, key, "")
        if not was_ready:
            state.changed()


def drawn_role(rng: random.Random) -> InstanceRole:
    """A role for an engine."""
    return rng.choice([InstanceRole.PREFILL, InstanceRole.DECODE, InstanceRole.BOTH])
