"""The conductor as a process: state, ops and duties on the common service base.

`run(config)` is the process; `ConductorService(config)` can also be started inside another event loop.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

from mooncache.client.host import host_name
from mooncache.client.members import this_process
from mooncache.conductor.background.duties import conductor_duties
from mooncache.conductor.ops.table import conductor_table
from mooncache.conductor.shell.copies import Copies
from mooncache.conductor.shell.gauges import add_gauges
from mooncache.conductor.shell.give_up_calls import GiveUpCalls
from mooncache.conductor.shell.peers import Peers
from mooncache.conductor.shell.pool import PoolLookup
from mooncache.conductor.shell.pool_status import PoolStatus
from mooncache.conductor.shell.prefetch_calls import PrefetchCalls
from mooncache.conductor.shell.scaler_port import ScalerPort
from mooncache.conductor.state import ConductorState
from mooncache.config import Config
from mooncache.coordination import MasterRecord, make_conductor_coordinator
from mooncache.errors import MooncacheError
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime import tls
from mooncache.runtime.duties import Duty
from mooncache.runtime.rpc import RpcTable
from mooncache.runtime.service import Service, run_service

_CALL_COUNT_MAX = 8192
_DRAIN_TIMEOUT_S = 5.0  # control calls are short
_LAST_WORDS_S = 0.1  # in which standbys take what happened last


class ConductorService(Service):
    """The conductor as a service. Raises ConfigInvalid for settings that cannot work."""

    def __init__(self, config: Config) -> None:
        section = config.conductor
        super().__init__(
            "conductor",
            config,
            host=section.host,
            port=section.port,
            metrics_port=section.metrics_port,
            call_count_max=_CALL_COUNT_MAX,
            drain_timeout_s=_DRAIN_TIMEOUT_S,
            advertise_host=section.advertise_host,
        )
        self.state: ConductorState
        self._pool: PoolLookup | None = None
        self._copies: Copies | None = None
        self._pool_status: PoolStatus | None = None
        self._give_up_calls: GiveUpCalls | None = None
        self._prefetch_calls: PrefetchCalls | None = None
        self.scaler: ScalerPort | None = None
        self._peers: Peers | None = None
        self._coordinator = make_conductor_coordinator(config, self.clock)

    async def build(self) -> RpcTable:
        """Make the state; nothing is known yet."""
        self._pool = PoolLookup(self.config, self.tokens, self.clock)
        self._copies = Copies(self.config, self.tokens, self.clock)
        self._pool_status = PoolStatus(self.config, self.tokens, self.clock, random.Random())
        self.state = ConductorState(
            self.config,
            clock=self.clock,
            pool=self._pool,
            copies=self._copies,
            metrics=self.metrics,
            rng=random.Random(),
        )
        self._give_up_calls, self._prefetch_calls = self.state.give_up_calls, self.state.prefetch_calls
        if not self.state.leadership.alone:
            self._peers = Peers(self.state.leadership.targets, self.tokens, self.config)
        add_gauges(self.metrics, self.state)
        if self.config.conductor.scaler_enabled:
            self.scaler = ScalerPort(self.state)
        return conductor_table(self.state)

    async def listening(self) -> None:
        """Become a candidate, and open the port for KEDA, as configured. Raises ConfigInvalid when it cannot be had."""
        section = self.config.conductor
        if self._coordinator is not None:
            name = f"{host_name()}:{self.grpc_target}"
            await self._coordinator.start(MasterRecord(name, self.grpc_target, started_ms=self.started_ms))
        if self.scaler is not None:
            await self.scaler.start(
                section.host, section.scaler_port, tls.server_credentials(self.config.tls)
            )

    def duties(self) -> Sequence[Duty]:
        """What the conductor does on its own."""
        assert self._pool_status is not None, "build has not run"
        return conductor_duties(self.state, self._peers, self._pool_status, self._member, self._coordinator)

    def _member(self) -> pb.Member:
        book = self.state.leadership
        own = next((at for at, view in enumerate(book.views) if view.is_self), None)
        address = self.grpc_target if own is None else book.targets[own]
        return this_process(
            pb.MEMBER_KIND_CONDUCTOR,
            f"{host_name()}-{address.rpartition(':')[2]}",
            address,
            self.started_ms,
            self.config.client.host_id,
        )

    def serving(self) -> str:
        """Only a leader schedules."""
        return "" if self.state.leads else "a standby: another conductor leads"

    async def drain(self) -> None:
        """Lead no longer, so that a standby takes over before this process ends."""
        if self._peers is not None:
            await self._leave()
            self.state.leadership.retire()
            self.state.announce_leader()
            await self.clock.sleep(_LAST_WORDS_S)
        if self._coordinator is not None:
            await self._coordinator.resign()

    async def _leave(self) -> None:
        """Have the standbys know that this process ends on purpose."""
        request = pb.AnnounceMemberRequest(member=self._member(), leaving=True)
        book = self.state.leadership
        if book.leads:
            self.state.note(lambda: pb.JournalEntry(member=request))
        elif self._peers is not None and book.leader >= 0:
            request.known_term = book.newest
            with contextlib.suppress(MooncacheError):
                await self._peers.announce(book.leader, request)

    async def shutdown(self) -> None:
        """Let go of the pool, of the other conductors, and of the port for KEDA."""
        if self.scaler is not None:
            await self.scaler.stop()
        if self._peers is not None:
            await self._peers.close()
        if self._coordinator is not None:
            await self._coordinator.close()
        for calls in (self._give_up_calls, self._prefetch_calls):
            if calls is not None:
                await calls.close()
        for line in (self._copies, self._pool_status):
            if line is not None:
                await line.close()
        if self._pool is not None:
            await self._pool.close()


def run(config: Config) -> int:
    """Be the conductor process; returns the exit status."""
    return run_service("conductor", config, lambda: ConductorService(config))
