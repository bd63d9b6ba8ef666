"""Everything that endpoints and duties of one gateway share. Lives in one event loop; no locks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from mooncache._version import __version__
from mooncache.auth import ValidTokens
from mooncache.config import Config
from mooncache.errors import Unsupported
from mooncache.gateway.console.console import Console
from mooncache.gateway.core import faults
from mooncache.gateway.core.bodies import Budget
from mooncache.gateway.core.fleet import FleetView
from mooncache.gateway.core.offenders import Offenders
from mooncache.gateway.core.pace import Paces
from mooncache.gateway.core.recent_requests import RecentRequests
from mooncache.gateway.core.tenant_slices import TenantSlices
from mooncache.gateway.metrics import GatewayMetrics
from mooncache.gateway.shell.alarms import Alarms
from mooncache.gateway.shell.batch_store import BatchStore
from mooncache.gateway.shell.capture import Capture
from mooncache.gateway.shell.conductor import Conductor
from mooncache.gateway.shell.engines import Engines
from mooncache.gateway.shell.keyed_requests import KeyedRequests
from mooncache.gateway.shell.keyring import Keyring
from mooncache.gateway.shell.limit_turns import LimitTurns
from mooncache.gateway.shell.meter import UsageMeter
from mooncache.gateway.shell.preparing import Preparing
from mooncache.gateway.shell.spending_keeper import SpendingKeeper
from mooncache.gateway.shell.tokenizers import Tokenizers
from mooncache.gateway.shell.usage_reader import UsageReader
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.clock import Clock
from mooncache.runtime.metrics import Metrics
from mooncache.runtime.ops.get_tokens import TokenHolder


@dataclass(slots=True)
class GatewayState:
    """The state of one gateway, shared by its endpoints and duties."""

    config: Config
    clock: Clock
    tokens: ValidTokens
    metrics: Metrics
    stats: GatewayMetrics
    keyring: Keyring
    fleet: FleetView
    conductor: Conductor
    engines: Engines
    tokenizers: Tokenizers
    preparing: Preparing
    bodies: Budget
    usage: UsageReader
    capture: Capture | None = None  # None while no trace is captured
    batches: BatchStore | None = None  # None without gateway.batch_dir
    console: Console | None = None  # None without gateway.console
    meter: UsageMeter | None = None  # None without gateway.usage_enabled
    spending: SpendingKeeper | None = None  # None without gateway.price_file
    key_look: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while keys are read again
    accounts_lost: bool = False  # that the database of accounts is away was noted
    unpriced_noted: bool = False  # that budgets limit nothing without it
    recent: RecentRequests = field(default_factory=RecentRequests)
    limiter: TenantSlices = field(default_factory=TenantSlices)
    limit_turns: LimitTurns = field(default_factory=LimitTurns)
    offenders: Offenders = field(default_factory=Offenders)
    paces: Paces = field(default_factory=Paces)
    alarms: Alarms = field(default_factory=Alarms)
    keyed: KeyedRequests = field(default_factory=KeyedRequests)
    process: TokenHolder | None = None  # None in a simulation
    gateway_id: str = ""  # reported to the conductor
    url: str = ""  # reported to the conductor
    draining: bool = False
    waits_until_s: float = 0.0  # until then requests wait for the first list of instances
    leaving: bool = False  # the next process takes the connections; those that are open end with their answer
    active_count: int = 0  # requests under way
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while none are under way

    @property
    def tenant_counts(self) -> dict[str, int]:
        """Requests of each tenant under way."""
        return self.limiter.running

    def require_batches(self) -> BatchStore:
        """Files and batches. Raises Refusal where none are kept."""
        if self.batches is None:
            error = Unsupported("This gateway keeps no files; its operator has to set gateway.batch_dir.")
            raise faults.refuse(error, status=404, code="batches_not_served")
        return self.batches

    def require_console(self) -> Console:
        """The console; its paths exist only where there is one."""
        if self.console is None:
            raise RuntimeError("this gateway has no console")
        return self.console

    def gateway(self) -> pb.Gateway:
        """This gateway, as it describes itself to the conductor."""
        return pb.Gateway(
            gateway_id=self.gateway_id,
            url=self.url,
            software_version=__version__,
            draining=self.draining,
        )
