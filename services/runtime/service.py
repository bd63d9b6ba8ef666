"""The base of every process: configuration in, ports open, duties running, a graceful end on SIGTERM or
SIGINT.

A subclass says what it is: `build` (state and RPC table), `duties`, and when needed `listening`, `readiness`,
`serving`, `drain` and `shutdown`. Order of life: build -> listen -> listening() -> duties -> ready ... signal ->
drain() -> calls under way end -> duties end -> shutdown(). Every step of the end has a deadline; a second signal ends
the process at once.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from mooncache import auth
from mooncache.config import Config, load
from mooncache.errors import ConfigInvalid, MooncacheError
from mooncache.proto.v1 import process_pb2 as pb
from mooncache.runtime import logs, service_manager, tls, tracing
from mooncache.runtime.bind import check_bind, is_loopback
from mooncache.runtime.clock import Clock, SystemClock
from mooncache.runtime.duties import Duty, DutyRunner
from mooncache.runtime.entry import EXIT_CONFIG, EXIT_FAILED, EXIT_OK
from mooncache.runtime.grpc_server import GrpcServer, address
from mooncache.runtime.health import LIVENESS, READINESS
from mooncache.runtime.live_tokens import LOOK_S, LiveTokens
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.metrics import Metrics, RpcMetrics
from mooncache.runtime.ops import get_tokens
from mooncache.runtime.probe_http import ProbeServer
from mooncache.runtime.reload import take_over
from mooncache.runtime.rpc import RpcTable
from mooncache.runtime.run_op import OpRunner

SHUTDOWN_TIMEOUT_S = 10.0
CERTIFICATE_LOOK_S = 5.0
_YOUNG_COUNT_MAX: Final = 5_000  # Python's own 700 is about one collection for each request

log = get_logger(__name__)


class Service:
    """The base class of every service. One instance is one service; several may live in one loop (each has its own
    metrics).

    Args:
        name: "master", "store_node", "conductor", "gateway" or "worker"; names metrics and log lines.
        config: the whole configuration.
        host, port: where the control service listens; port 0 means any free port.
        metrics_port: port of the probe server; 0 means any free port.
        call_count_max: control calls that may be under way.
        drain_timeout_s: time for `drain` and for the calls under way at the end.
        advertise_host: host that others reach the service by; empty means `host`.
        metrics_name: whose metrics it has, where that is another service's.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        *,
        host: str,
        port: int,
        metrics_port: int,
        call_count_max: int,
        drain_timeout_s: float,
        advertise_host: str = "",
        metrics_name: str = "",
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self.clock: Clock = clock or SystemClock()
        self.started_ms = int(self.clock.wall_s() * 1e3)
        self.metrics = Metrics(metrics_name or name)
        _, created = auth.load_or_create_cluster_token(config.cluster.token_path)
        if created:
            log.info(Event.AUTH_TOKEN_CREATED, path=str(config.cluster.token_path))
        self.tokens = LiveTokens(config.cluster.token_path, self.clock.wall_s)
        self.authenticator = auth.Authenticator(self.tokens)
        self._token_gauge = self.metrics.gauge("tokens_valid", "Cluster tokens that this process accepts.")
        self._token_gauge.set(len(self.tokens.tokens))
        self._host, self._port, self._advertise_host = host, port, advertise_host or host
        self._metrics_port = metrics_port
        self._call_count_max = call_count_max
        self._drain_timeout_s = drain_timeout_s
        failures = self.metrics.counter("duty_failures", "Failures of background duties.", ("duty", "code"))
        self._duties = DutyRunner(self.clock, lambda duty, code: failures.labels(duty, code).inc())
        self._probe = ProbeServer(
            self.metrics,
            self._readiness,
            self._serving_now,
            lambda: [auth.metrics_key(token) for token in self.tokens.tokens],
        )
        self._grpc: GrpcServer | None = None
        self.runner: OpRunner | None = None
        self._stop_asked = asyncio.Event()
        self._reloading: asyncio.Future[None] | None = None
        self._http_contexts: list[ssl.SSLContext] = []
        self.listening_now = False
        self.draining = False

    # what a subclass says

    async def build(self) -> RpcTable | None:
        """Make the state and the table; ports are not open yet. None: a service without a control port."""
        raise NotImplementedError

    def binds(self) -> Sequence[tuple[str, str]]:
        """(setting, host) of every port that the process opens."""
        probe = [("metrics.host", self.config.metrics.host)] if self.config.metrics.enabled else []
        return [(f"{self.name}.host", self._host), *probe]

    async def listening(self) -> None:
        """Called once when the ports are open and `grpc_target` is known, before the duties begin."""

    def duties(self) -> Sequence[Duty]:
        """What the process does on its own."""
        return ()

    def readiness(self) -> str:
        """Empty when the service should get work, otherwise the reason why not."""
        return ""

    def serving(self) -> str:
        """Of a ready process: empty when its control service should get calls, otherwise the reason why not."""
        return ""

    async def drain(self) -> None:
        """Say goodbye: called while calls are still served, within the drain timeout."""

    def configured(self) -> None:
        """Called when `config` has changed while the process runs, by settings of `reload.LIVE` alone."""

    async def tokens_changed(self) -> None:
        """Called when other cluster tokens are valid, or another one signs: `tokens` has them."""

    def token_uses(self) -> list[pb.TokenUse]:
        """Who proves which of the valid tokens here, in the order of `tokens.tokens`."""
        return [
            pb.TokenUse(fingerprint=token.fingerprint, used_age_ms=self.tokens.used_age_ms(token))
            for token in self.tokens.tokens
        ]

    def engine_token(self) -> str:
        """Fingerprint of the token whose key this process' engine takes; "" without an engine."""
        return ""

    async def shutdown(self) -> None:
        """Let go of everything; called last, also when start-up failed half-way."""

    # what it does with it

    def keep_certificate(self, context: ssl.SSLContext | None) -> None:
        """Have an HTTP port show the certificate of the files as they are, also when they are replaced."""
        if context is not None:
            self._http_contexts.append(context)

    def _certificates(self) -> Callable[[], Awaitable[None]]:
        files = tls.CertificateFiles(self.config.tls)

        async def look() -> None:
            if files.changed():
                for context in self._http_contexts:
                    files.load_into(context)
                log.info(Event.TLS_RELOADED, cert_file=str(self.config.tls.cert_file))

        return look

    def health(self) -> Mapping[str, str]:
        """What gRPC's health service tells: why each name does not serve, "" for one that does."""
        ready = self._readiness()
        states = {"": ready, LIVENESS: "", READINESS: ready}
        if self.runner is not None:
            states[self.runner.table.service_name] = self._serving_now()
        return states

    @property
    def token(self) -> auth.Token:
        """The cluster token that this process proves now."""
        return self.tokens.signing

    async def _look_at_tokens(self) -> None:
        before, problem = self.tokens.set, self.tokens.problem
        changed = await asyncio.to_thread(self.tokens.look)
        if self.tokens.problem and self.tokens.problem != problem:
            log.error(Event.AUTH_TOKENS_REFUSED, reason=self.tokens.problem)
        if not changed:
            return
        now = self.tokens.set
        await self.tokens_changed()
        self._token_gauge.set(len(now.tokens))
        log.warning(
            Event.AUTH_TOKENS_CHANGED,
            signs=now.signing.fingerprint,
            accepted=[token.fingerprint for token in now.tokens],
            withdrawn=[token.fingerprint for token in before.tokens if token not in now.tokens],
        )

    @property
    def grpc_target(self) -> str:
        """Address of the control service as others reach it; known once it listens."""
        return address(self._advertise_host, self._grpc.port if self._grpc else self._port)

    @property
    def metrics_address(self) -> str:
        """host:port of the probe server; "" when it is off."""
        return address(self.config.metrics.host, self._probe.port) if self._probe.port else ""

    async def start(self) -> None:
        """Open everything. Raises MooncacheError; then `stop` has been called already."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        log.info(Event.SERVICE_STARTING, pid=os.getpid())
        for setting, host in self.binds():
            check_bind(self.config.tls, setting, host)
        credentials = tls.server_credentials(self.config.tls)
        table = await self.build()
        if table is not None:
            self.runner = OpRunner(table, self.clock, RpcMetrics(self.metrics))
            self._grpc = GrpcServer(
                self.runner,
                self.tokens,
                self.clock,
                call_count_max=self._call_count_max,
                health=self.health,
                settings=self.config.grpc,
                process=get_tokens.table(self),
            )
            await self._grpc.start(self._host, self._port, credentials)
        if credentials is not None:
            log.info(Event.TLS_ENABLED, client_certificates=self.config.tls.require_client_cert)
        if not is_loopback(self._host):
            log.warning(Event.BIND_PUBLIC, host=self._host, tls=credentials is not None)
        if self.config.metrics.enabled:
            context = tls.http_server_context(self.config.tls)
            self.keep_certificate(context)
            await self._probe.start(self.config.metrics.host, self._metrics_port, context)
        self.listening_now = True
        await self.listening()
        self._duties.start(self.duties())
        self._duties.start([Duty("reload_tokens", self._look_at_tokens, LOOK_S)])
        if credentials is not None:
            self._duties.start([Duty("reload_certificates", self._certificates(), CERTIFICATE_LOOK_S)])
        log.info(Event.SERVICE_READY, grpc_target=self.grpc_target, metrics=self.metrics_address)

    async def stop(self) -> None:
        """Drain and close; safe to call at any point and more than once."""
        if self.listening_now and not self.draining:
            log.info(Event.SERVICE_DRAINING, active_calls=self.runner.active_count if self.runner else 0)
            self.draining = True
            await self._bounded(self.drain(), self._drain_timeout_s, "drain")
        if self._grpc is not None:
            server, self._grpc = self._grpc, None
            await server.stop(self._drain_timeout_s)
        await self._bounded(self._duties.stop(), SHUTDOWN_TIMEOUT_S, "duties")
        await self._bounded(self.shutdown(), SHUTDOWN_TIMEOUT_S, "shutdown")
        await self._probe.stop()
        if self.listening_now:
            log.info(Event.SERVICE_STOPPED)
        self.listening_now = False

    async def reload(self) -> None:
        """Read the configuration again and take over what needs no restart; one that is wrong changes nothing."""
        try:
            wanted = await asyncio.to_thread(load)
        except ConfigInvalid as error:
            log.error(Event.CONFIG_REFUSED, reason=error.message)
            return
        self.config, changed, waiting = take_over(self.config, wanted)
        if "logging.level" in changed:
            logs.set_level(self.config.logging.level)
        self.configured()
        log.warning(Event.CONFIG_RELOADED, changed=list(changed), needs_restart=list(waiting))

    def ask_to_stop(self) -> None:
        """End `run`; may be called from the loop's thread only."""
        self._stop_asked.set()

    async def run(self) -> None:
        """Start, serve until a signal or `ask_to_stop`, then stop."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def on_signal() -> None:
            if self._stop_asked.is_set():
                task.cancel()  # the second signal does not wait
            self._stop_asked.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        try:
            await self.start()
            await _tell_service_manager(service_manager.READY)
            await self._stop_asked.wait()
            await _tell_service_manager(service_manager.STOPPING)
            await self.stop()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _on_hangup(self) -> None:
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.ensure_future(self.reload())

    def _readiness(self) -> str:
        if self.draining:
            return "draining"
        return self.readiness() if self.listening_now else "starting"

    def _serving_now(self) -> str:
        return self._readiness() or self.serving()

    async def _bounded(self, step: object, timeout_s: float, what: str) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await step  # type: ignore[misc]
        except Exception as error:
            log.error(Event.SERVICE_FAILED, step=what, error=repr(error), exc_info=error)


async def _tell_service_manager(word: str) -> None:
    try:
        await asyncio.to_thread(service_manager.tell, word)
    except OSError as error:
        log.warning(Event.SERVICE_MANAGER_ABSENT, reason=error.strerror or str(error))


def run_service(name: str, config: Config, make: Callable[[], Service]) -> int:
    """Be the process of a service: logging, event loop (uvloop where it is installed), exit status 0, 1 or 2."""
    logs.setup(
        name,
        level=config.logging.level,
        log_format=config.logging.format,
        info_lines_per_s=config.logging.info_lines_per_s,
    )
    tracing.setup(name, config)

    gc.freeze()  # modules stay: a collection that looks through them stops everything for tens of milliseconds
    gc.set_threshold(_YOUNG_COUNT_MAX)

    async def main() -> None:
        await make().run()

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(main())
    except ConfigInvalid as error:
        log.error(Event.SERVICE_FAILED, code=error.name, reason=error.message)
        return EXIT_CONFIG
    except MooncacheError as error:
        log.error(Event.SERVICE_FAILED, code=error.name, reason=error.message)
        return EXIT_FAILED
    except (asyncio.CancelledError, KeyboardInterrupt):
        return EXIT_FAILED
    finally:
        tracing.shutdown()
    return EXIT_OK


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop, or None (asyncio's own) where uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
