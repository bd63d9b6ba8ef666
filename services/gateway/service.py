"""The gateway as a process: uvicorn in the service's own loop, the watch over instances, a graceful end.

Its port speaks HTTP, not gRPC, so `build` returns no table. At the end it stops taking requests, lets streams finish
within `gateway.drain_timeout_s`, and ends those that are left with an error event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import socket
from collections.abc import Iterator, Sequence
from functools import partial

import uvicorn

from mooncache.accounts.database import AccountsPlace
from mooncache.accounts.place import accounts_at, close_accounts
from mooncache.auth import engine_key
from mooncache.client.conductor_link import ConductorLink
from mooncache.client.members import Announcer, this_process
from mooncache.config import Config
from mooncache.errors import ConfigInvalid, MooncacheError
from mooncache.gateway.app import build_app
from mooncache.gateway.background import (
    close_lost_plans,
    delete_old_files,
    flush_spending,
    flush_usage,
    lease_limits,
    reload_keys,
    run_batches,
    watch_instances,
)
from mooncache.gateway.console.console import Console
from mooncache.gateway.core.bodies import Budget
from mooncache.gateway.core.fleet import FleetView
from mooncache.gateway.core.rate_limit import default_limits
from mooncache.gateway.metrics import GatewayMetrics
from mooncache.gateway.shell.batch_store import BatchStore
from mooncache.gateway.shell.capture import Capture
from mooncache.gateway.shell.conductor import Conductor
from mooncache.gateway.shell.engines import Engines
from mooncache.gateway.shell.http_protocol import GuardedProtocol
from mooncache.gateway.shell.keyring import Keyring
from mooncache.gateway.shell.meter import UsageMeter
from mooncache.gateway.shell.preparing import Preparing
from mooncache.gateway.shell.report_lanes import LANES
from mooncache.gateway.shell.spending_keeper import SpendingKeeper
from mooncache.gateway.shell.tokenizers import Tokenizers
from mooncache.gateway.shell.usage_export import open_usage_export
from mooncache.gateway.shell.usage_reader import UsageReader
from mooncache.gateway.state import GatewayState
from mooncache.prices.core.price_book import PriceBook
from mooncache.prices.loading import read_prices
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.duties import Duty
from mooncache.runtime.grpc_server import address
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.ports import passed_listener
from mooncache.runtime.rpc import RpcTable
from mooncache.runtime.service import Service, run_service
from mooncache.runtime.tls import http_client_context

_KEEP_ALIVE_S = 75
_EVERYWHERE = ("0.0.0.0", "::", "[::]", "")  # noqa: S104  (compared with, not bound to)
_BACKLOG = 2048
_RELOAD_S = 0.5
_OLD_FILES_S = 60.0
_FLUSH_S = 1.0
_USAGE_S = 5.0
_SPENDING_S = 1.0
_LAST_USAGE_S = 6.0  # longer than SQLite waits for another writer
_WRITER_BYTES = 16
_ABORT_S = 2
_LOOK_S = 0.05
_FIRST_LIST_S = 10.0
_QUIET_LOOKS = 5  # a client that was connected in the last moment has sent its request by then
_CONNECT_TIMEOUT_S = 2.0  # to an engine
_BODY_PROCESSES = 1  # they read large bodies; a second one would take the engines' cores
_BODY_TIMEOUT_S = 20.0
_TOKENIZER_THREADS = 1
_TOKENIZER_CACHE_BYTES = 256 << 20

log = get_logger(__name__)


class _Server(uvicorn.Server):
    """uvicorn without hands on the process' signals: the service has its own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayService(Service):
    """The gateway as a service. `serves_http`: it has paths beside those of inference."""

    serves_http = True

    def __init__(
        self,
        config: Config,
        *,
        name: str = "gateway",
        host: str | None = None,
        port: int | None = None,
        metrics_port: int | None = None,
    ) -> None:
        """name, host, port, metrics_port: of a gateway that is reached otherwise than by HTTP."""
        gateway = config.gateway
        super().__init__(
            name,
            config,
            host=gateway.host if host is None else host,
            port=gateway.port if port is None else port,
            metrics_port=gateway.metrics_port if metrics_port is None else metrics_port,
            call_count_max=gateway.request_count_max,
            metrics_name="gateway",
            # The connections' own end comes after the drain.
            drain_timeout_s=gateway.drain_timeout_s + _ABORT_S + 1,
        )
        self._state: GatewayState | None = None
        self._announcer: Announcer | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._passed = False  # the port is the parent's
        self._accounts: AccountsPlace | None = None
        self.http_port = 0

    @property
    def state(self) -> GatewayState:
        assert self._state is not None, "build has not run"
        return self._state

    @property
    def url(self) -> str:
        """Base URL of the gateway; known once it listens."""
        scheme = "https" if self.config.tls.enabled else "http"
        return f"{scheme}://{address(self.config.gateway.host, self.http_port)}"

    async def build(self) -> RpcTable | None:
        config, gateway = self.config, self.config.gateway
        accounts = self._accounts = await asyncio.to_thread(accounts_at, config.cluster.accounts_place)
        keyring = Keyring(
            self.authenticator,
            gateway.keys_file,
            default_limits(gateway),
            accounts,
            self.clock.wall_s,
            stale_max_s=gateway.accounts_stale_max_s,
        )
        await asyncio.to_thread(keyring.load)
        batches = None
        if gateway.batch_dir is not None and self.serves_http:
            batches = await asyncio.to_thread(BatchStore, gateway.batch_dir)
        book = None
        if gateway.price_file is not None:
            book = await asyncio.to_thread(read_prices, gateway.price_file)
        stats, fleet = GatewayMetrics(self.metrics), FleetView()
        link = ConductorLink(config.cluster.conductor_target, self.tokens, config)
        self._announcer = Announcer(link, self.clock, self._member)
        engines = Engines(
            self._engine_keys,
            _CONNECT_TIMEOUT_S,
            http_client_context(config.tls),
            config.tls.server_name,
        )
        engines.open()
        self._state = GatewayState(
            config=config,
            clock=self.clock,
            tokens=self.tokens,
            metrics=self.metrics,
            stats=stats,
            keyring=keyring,
            conductor=Conductor(link, self.clock, stats, fleet, random.Random()),
            fleet=fleet,
            engines=engines,
            preparing=Preparing(
                processes=_BODY_PROCESSES,
                timeout_s=_BODY_TIMEOUT_S,
                cache_bytes=_TOKENIZER_CACHE_BYTES // 2 // _BODY_PROCESSES,
            ),
            batches=batches,
            usage=UsageReader(accounts, book),
            bodies=Budget(gateway.open_body_bytes_max, gateway.tenant_body_bytes_max),
            tokenizers=Tokenizers(
                lambda: self.tokens.salts,
                self.clock,
                stats,
                # Half of it is for the processes that read large bodies.
                cache_bytes=_TOKENIZER_CACHE_BYTES // 2,
                threads=_TOKENIZER_THREADS,
                public_prefix=gateway.public_prefix_enabled,
                folders=gateway.model_folders,
            ),
        )
        state = self._state
        await self._open_accounts(state, accounts, book)
        if gateway.console and self.serves_http:
            state.console = Console(config, self.tokens, self.clock, keyring, accounts, book)
            stats.console_viewers.set_function(lambda: len(state.console.viewers) if state.console else 0)
        if gateway.capture_file is not None:
            state.capture = Capture(gateway, stats)
        state.idle.set()
        stats.requests_open.set_function(lambda: state.active_count)
        stats.body_bytes_open.set_function(lambda: state.bodies.bytes)
        stats.accounts_unconfirmed.set_function(lambda: keyring.unconfirmed_s)
        await self._listen(state)
        return None

    async def _open_accounts(
        self, state: GatewayState, accounts: AccountsPlace, book: PriceBook | None
    ) -> None:
        """What is kept of tenants. Raises ConfigInvalid, AccountsUnavailable."""
        writer = secrets.token_hex(_WRITER_BYTES)
        if self.config.gateway.usage_enabled:
            endpoint = self.config.gateway.usage_otlp_endpoint
            export = await asyncio.to_thread(open_usage_export, endpoint, writer, book)
            state.meter = UsageMeter(accounts, writer, self.clock, state.stats, export)
        if book is not None:
            state.spending = SpendingKeeper(accounts, writer, self.clock, book, state.limiter)
            await state.spending.load()

    def _engine_keys(self) -> Sequence[str]:
        return [engine_key(token) for token in self.tokens.tokens]

    async def _listen(self, state: GatewayState) -> None:
        """Open the port. Raises ConfigInvalid when it cannot be had."""
        gateway, tls, state.process = self.config.gateway, self.config.tls, self
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what matters is in our own log
        options = uvicorn.Config(
            build_app(state),
            http=GuardedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_ABORT_S,
            ssl_certfile=str(tls.cert_file) if tls.enabled and tls.cert_file else None,
            ssl_keyfile=str(tls.key_file) if tls.enabled and tls.key_file else None,
        )
        passed = passed_listener()
        self._passed = passed is not None
        bound = passed or _bind(gateway.host, gateway.port)
        bound.setblocking(False)
        self.http_port = bound.getsockname()[1]
        host = self.advertised_host(gateway.host, gateway.advertise_host)
        scheme = "https" if tls.enabled else "http"
        state.gateway_id = f"{socket.gethostname()[:100]}-{self.http_port}"
        state.conductor.gateway_id = state.gateway_id
        if state.console is not None:
            state.console.collector.gateway_id = state.gateway_id
        if self._passed:  # who waited at the port while the process started again waits for the list as well
            state.waits_until_s = self.clock.now_s() + _FIRST_LIST_S
        state.url = f"{scheme}://{address(host, self.http_port)}"
        self._server = _Server(options)
        self._serving = asyncio.create_task(self._server.serve([bound]), name="http")
        up = asyncio.create_task(self._server.up.wait())
        await asyncio.wait({up, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._serving.done():
            self._serving.result()
        self.keep_certificate(options.ssl)

    def configured(self) -> None:
        gateway, state = self.config.gateway, self.state
        state.config = self.config
        state.keyring.limit(default_limits(gateway))
        state.bodies.limit(gateway.open_body_bytes_max, gateway.tenant_body_bytes_max)

    @staticmethod
    def advertised_host(host: str, advertised: str) -> str:
        """Host that others reach a port by; `host` is what it is bound to."""
        return advertised or (socket.gethostname()[:100] if host in _EVERYWHERE else host)

    async def listening(self) -> None:
        log.info(Event.GATEWAY_LISTENING, url=self.url)

    def duties(self) -> Sequence[Duty]:
        state = self.state
        lanes = [
            Duty(f"send_reports_{lane}", partial(state.conductor.send_reports, lane)) for lane in range(LANES)
        ]
        return (
            Duty("watch_instances", lambda: watch_instances.run(state)),
            Duty("lease_limits", lambda: lease_limits.run(state)),
            Duty("follow_leader", lambda: state.conductor.follow_leader(state.gateway)),
            Duty("close_lost_plans", lambda: close_lost_plans.run(state)),
            *([] if self._announcer is None else [Duty("announce", self._announcer.run)]),
            Duty("reload_keys", lambda: reload_keys.run(state), interval_s=_RELOAD_S),
            Duty("flush_usage", lambda: flush_usage.run(state), interval_s=_USAGE_S),
            Duty("flush_spending", lambda: flush_spending.run(state), interval_s=_SPENDING_S),
            *self._batch_duties(state),
            *([Duty("collect_console", state.console.collector.run)] if state.console is not None else []),
            *lanes,
        )

    @staticmethod
    def _batch_duties(state: GatewayState) -> Sequence[Duty]:
        if state.batches is None:
            return ()
        return (
            Duty("run_batches", lambda: run_batches.run(state)),
            Duty("delete_old_files", lambda: delete_old_files.run(state), interval_s=_OLD_FILES_S),
        )

    member_kind = pb.MEMBER_KIND_GATEWAY

    def _member(self) -> pb.Member:
        """This process, as the list of the cluster's processes has it."""
        state = self.state
        member = this_process(
            self.member_kind, state.gateway_id, state.url, self.started_ms, self.config.client.host_id
        )
        member.reason = self._readiness()
        member.state = "draining" if state.draining else "starting" if member.reason else "ready"
        return member

    def readiness(self) -> str:
        """Ready once the list of instances is known; an empty list is the operator's business."""
        return "" if self.state.fleet.known else "the conductor has not been reached yet"

    async def drain(self) -> None:
        """Refuse new requests, let those under way finish, then tell the conductor what is still queued."""
        state = self.state
        if self._passed and self._server is not None:
            await self._leave_queue(state, self._server)
        state.draining = True
        if state.console is not None:
            state.console.viewers.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.gateway.drain_timeout_s):
                await state.idle.wait()
        await self._stop_listening()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                await state.conductor.flush()

    async def _leave_queue(self, state: GatewayState, server: _Server) -> None:
        """Take no new connections: they wait at the port for the next process. Whoever was taken is served."""
        state.leaving = True
        for listening in server.servers:
            listening.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.gateway.drain_timeout_s):
                quiet = 0
                while quiet < _QUIET_LOOKS:
                    await state.idle.wait()
                    await asyncio.sleep(_LOOK_S)
                    quiet = quiet + 1 if state.idle.is_set() else 0

    async def _stop_listening(self) -> None:
        """Close the port; requests that are left are cancelled and answered so."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            serving, self._serving = self._serving, None
            await serving

    async def shutdown(self) -> None:
        await self._stop_listening()
        if self._state is not None:
            if self._announcer is not None and self._state.url:
                await self._announcer.leave()
            await self._state.engines.close()
            await self._state.conductor.close()
            await self._state.preparing.close()
            self._state.tokenizers.close()
            for counted in (self._state.meter, self._state.spending):
                if counted is not None:
                    await self._flush(counted)
            if self._state.meter is not None and self._state.meter.export is not None:
                await asyncio.to_thread(self._state.meter.export.close)
            if self._state.batches is not None:
                self._state.batches.close()
            if self._state.console is not None:
                await self._state.console.close()
            if self._state.capture is not None:
                await asyncio.to_thread(self._state.capture.close)
        if self._accounts is not None:
            await asyncio.to_thread(close_accounts, self._accounts)

    @staticmethod
    async def _flush(counted: UsageMeter | SpendingKeeper) -> None:
        try:
            async with asyncio.timeout(_LAST_USAGE_S):
                await counted.flush()
        except (MooncacheError, TimeoutError) as error:
            log.error(Event.USAGE_LOST, error=str(error))


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(target)
            bound.listen(_BACKLOG)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise ConfigInvalid(
            f"gateway.host and gateway.port {host}:{port} cannot be opened: {error.strerror}. Choose another port."
        ) from None
    return bound


def run(config: Config) -> int:
    """Be a gateway until a signal; the process' exit status."""
    return run_service("gateway", config, lambda: GatewayService(config))
