"""The engine as a process: model, passport, pool, HTTP; ends on SIGTERM after a few seconds for what runs.

It needs no cluster: without a pool it serves alone and goes on looking for one in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

import mooncache
from mooncache.client.figures import ClientCollector
from mooncache.config import Config
from mooncache.errors import ConfigInvalid, MooncacheError
from mooncache.hf_engine import own_passport
from mooncache.hf_engine.engine import Engine
from mooncache.hf_engine.metrics import HfMetrics
from mooncache.hf_engine.model_runner import ModelRunner
from mooncache.hf_engine.requests import RequestLimits
from mooncache.hf_engine.server import ServerState, deliver_to, make_app
from mooncache.hf_engine.tokens import ChatTokenizer
from mooncache.kvcache import identity
from mooncache.kvcache.core.break_even import BreakEven
from mooncache.kvcache.core.shadow import ShadowSampler
from mooncache.kvcache.core.streaming import Streaming, StreamMode
from mooncache.kvcache.distance import Comparison
from mooncache.kvcache.engine_pool import EnginePool, Shadow
from mooncache.kvcache.passport import Passport
from mooncache.kvcache.pool_link import instance_name
from mooncache.runtime import logs, tracing
from mooncache.runtime.bind import is_loopback
from mooncache.runtime.logs import Event, get_logger

EXIT_OK, EXIT_FAILED, EXIT_CONFIG = 0, 1, 2
_ANSWER_S = 2  # for the answers of requests that did not finish while the engine drained
_SAVES_S = 2.0
_BACKLOG = 2048

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HfOptions:
    """What the command line says. An empty name means the folder's; port 0 means any free port."""

    model: str
    served_model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    passport_path: Path | None = None
    api_key: str = ""
    tls_cert: Path | None = None
    tls_key: Path | None = None


@dataclass(slots=True)
class Parts:
    """A built engine; `stop` ends all of it. Tests use it without HTTP."""

    engine: Engine
    pool: EnginePool | None
    runner: ModelRunner
    passport: Passport
    limits: RequestLimits
    folder: Path

    def start(self) -> None:
        """Start the engine's thread."""
        self.engine.start(self.pool)

    def stop(self) -> None:
        """Let saves finish for a moment, then end the threads."""
        if self.pool is not None:
            self.pool.mover.wait_saved(_SAVES_S)
        self.engine.stop()
        if self.pool is not None:
            self.pool.close()


def build(config: Config, options: HfOptions, connect: Callable[[], mooncache.Client] | None = None) -> Parts:
    """Load the model and make everything; nothing computes yet. `connect` makes the SDK's client; None: as configured.

    Raises:
        ConfigInvalid, Unsupported: the model or the settings cannot be used.
    """
    started_s = time.monotonic()
    section = config.hf
    folder = identity.resolve_model(options.model)
    runner = ModelRunner(
        folder,
        dtype=section.dtype,
        device=section.device,
        block_tokens=section.block_tokens,
        kv_cache_bytes=section.kv_cache_bytes,
    )
    runner.warm_up()
    capacity = runner.memory.blocks * section.block_tokens
    tokens_max = min(runner.max_positions, capacity)
    passport = own_passport.passport_of(folder, runner, config.cluster.state_dir)
    limits = RequestLimits(options.served_model_name or folder.name, tokens_max, runner.vocab, runner.eos_ids)
    metrics = HfMetrics()
    block_bytes = runner.memory.movable.block_bytes
    engine = Engine(
        runner,
        metrics,
        batch_max=section.batch_max,
        chunk_tokens=section.prefill_chunk_tokens,
        queue_max=section.queue_max,
        save_decode_blocks=config.connector.save_decode_blocks,
        break_even=BreakEven(block_tokens=section.block_tokens, block_bytes=block_bytes)
        if config.connector.break_even
        else None,
        streaming=Streaming(StreamMode(config.connector.stream), block_bytes=block_bytes),
        shadow=ShadowSampler.of(config.connector),
    )

    if options.passport_path is not None:
        own_passport.hand_over(
            options.passport_path, passport, runner, tokens_max=tokens_max, pool=config.connector.enabled
        )
    pool = None
    if config.connector.enabled:
        pool = EnginePool(
            config.connector,
            connect
            or (
                lambda: mooncache.connect(
                    client_name=instance_name(f"hf-engine {limits.model}"),
                    build=f"hf {mooncache.__version__}",
                )
            ),
            runner.memory.movable,
            changed=engine.changed,
            on_failure=lambda call, code: metrics.pool_errors.labels(call, code).inc(),
            shadow=_shadow(config, runner, metrics),
        )
        client_figures = ClientCollector("mooncache_hf_", lambda: pool.link)
        metrics.registry.registry.register(client_figures)
    log.info(
        Event.HF_MODEL_LOADED,
        model=limits.model,
        seconds=round(time.monotonic() - started_s, 3),
        kv_blocks=runner.memory.blocks,
        tokens_max=tokens_max,
        device=str(runner.device),
    )
    return Parts(engine, pool, runner, passport, limits, folder)


def _shadow(config: Config, runner: ModelRunner, metrics: HfMetrics) -> Shadow | None:
    """How hits are verified; None: none is."""
    connector = config.connector
    comparison = Comparison.of(config.hf.dtype, 2 * runner.memory.layers, connector.shadow_tolerance)
    return (comparison, metrics.verified) if comparison and connector.shadow_share else None


class _HfServer(uvicorn.Server):
    """uvicorn without its own handling of signals, which would end the process by the signal, not with status 0; it
    says in the log when it listens.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            log.info(Event.SERVICE_READY, http=f"{self.config.host}:{self.config.port}")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(config: Config, options: HfOptions) -> int:
    if not options.api_key and not is_loopback(options.host):
        raise ConfigInvalid(
            f"Without a key the engine would serve anyone who reaches {options.host}: set MOONCACHE_ENGINE_API_KEY."
        )
    _quiet_transformers()
    parts = build(config, options)
    loop = asyncio.get_running_loop()
    parts.engine.deliver = deliver_to(loop)
    state = ServerState(
        parts.engine,
        ChatTokenizer(parts.folder),
        parts.limits,
        parts.passport,
        options.api_key,
        int(time.time()),
    )
    server = _HfServer(
        uvicorn.Config(
            make_app(state),
            host=options.host,
            port=options.port,
            log_config=None,
            access_log=False,
            lifespan="off",
            backlog=_BACKLOG,
            timeout_graceful_shutdown=math.ceil(config.hf.drain_timeout_s) + _ANSWER_S,
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
        )
    )

    def stop() -> None:
        if not server.should_exit:
            log.info(Event.SERVICE_DRAINING, active_calls=parts.engine.unfinished)
            loop.call_later(config.hf.drain_timeout_s, parts.engine.abort_all)
        server.force_exit = server.should_exit
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    parts.start()
    try:
        await server.serve()
    finally:
        await asyncio.to_thread(parts.stop)
    log.info(Event.SERVICE_STOPPED)
    return EXIT_OK if server.started else EXIT_FAILED


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def run(config: Config, options: HfOptions) -> int:
    """Be the engine's process; returns the exit status."""
    logs.setup(
        "hf_engine",
        level=config.logging.level,
        log_format=config.logging.format,
        info_lines_per_s=config.logging.info_lines_per_s,
    )
    tracing.setup("engine", config)
    try:
        return asyncio.run(_serve(config, options))
    except ConfigInvalid as error:
        log.error(Event.SERVICE_FAILED, code=error.name, reason=error.message)
        return EXIT_CONFIG
    except (MooncacheError, OSError) as error:
        log.error(Event.SERVICE_FAILED, code=getattr(error, "name", "OS"), reason=str(error))
        return EXIT_FAILED
    except SystemExit:  # uvicorn's way to say that the port is taken
        log.error(Event.SERVICE_FAILED, code="OS", reason=f"cannot listen on {options.host}:{options.port}")
        return EXIT_FAILED
    finally:
        tracing.shutdown()
