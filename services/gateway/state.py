"""Everything that endpoints and duties of one gateway share. Lives in one event loop; no locks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from mooncache.auth import Token
from mooncache.config import Config
from mooncache.gateway.core.bodies import Budget
from mooncache.gateway.core.fleet import FleetView
from mooncache.gateway.core.offenders import Offenders
from mooncache.gateway.core.pace import Paces
from mooncache.gateway.core.rate_limit import RateLimiter
from mooncache.gateway.metrics import GatewayMetrics
from mooncache.gateway.shell.alarms import Alarms
from mooncache.gateway.shell.capture import Capture
from mooncache.gateway.shell.conductor import Conductor
from mooncache.gateway.shell.engines import Engines
from mooncache.gateway.shell.keyring import Keyring
from mooncache.gateway.shell.preparing import Preparing
from mooncache.gateway.shell.tokenizers import Tokenizers
from mooncache.runtime.clock import Clock
from mooncache.runtime.metrics import Metrics


@dataclass(slots=True)
class GatewayState:
    """The state of one gateway, shared by its endpoints and duties."""

    config: Config
    clock: Clock
    token: Token
    metrics: Metrics
    stats: GatewayMetrics
    keyring: Keyring
    fleet: FleetView
    conductor: Conductor
    engines: Engines
    tokenizers: Tokenizers
    preparing: Preparing
    bodies: Budget
    capture: Capture | None = None  # None while no trace is captured
    limiter: RateLimiter = field(default_factory=RateLimiter)
    offenders: Offenders = field(default_factory=Offenders)
    paces: Paces = field(default_factory=Paces)
    alarms: Alarms = field(default_factory=Alarms)
    gateway_id: str = ""  # reported to the conductor
    url: str = ""  # reported to the conductor
    draining: bool = False
    active_count: int = 0  # requests under way
    tenant_counts: dict[str, int] = field(default_factory=dict)  # those of each tenant
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while none are under way
