"""What one gateway has of a limit, what it reports of it, and what it is answered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mooncache.gateway.core.rate_limit import RateLimit

LimitKey = tuple[str, RateLimit]  # holder, and what is counted
UNKNOWN_RUN: Final = 0


@dataclass(slots=True)
class Share:
    """What a gateway has of one limit."""

    limit: float
    slice: float = 0.0  # the most that may be under way, or what may still be spent
    until_s: float = -math.inf  # of the lease
    used: float = 0.0  # of a limit per minute: spent since the share began
    used_before: float = 0.0  # at the last report that was answered
    waiting: float = 0.0
    refused: float = 0.0  # since the last report
    left: float | None = None  # of the whole limit, as the conductor said
    left_s: float = 0.0
    left_used: float = 0.0  # what was used here then
    run: int = UNKNOWN_RUN  # of the book that said so
    asked_s: float = -math.inf
    filled_s: float | None = None  # of a fair share per minute
    is_resting: bool = False  # given back


@dataclass(slots=True)
class HeldAmount:
    """What requests under way take of one limit."""

    limit: float = 0.0
    amount: float = 0.0
    requests: int = 0


@dataclass(frozen=True, slots=True)
class ShareUse:
    """What is reported of one limit; the fields are those of the message `LimitUse`. `tenant` is the holder."""

    tenant: str
    kind: RateLimit
    limit: float
    slice: float
    used: float
    used_before: float
    wanted: float
    left: float | None
    month: int = 0  # of money, like the following
    ledger: str = ""
    spent: float = 0.0
    spent_all: float = 0.0


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """What the conductor answered. `leases`: slice and what is left, in the order of the uses."""

    leases: Sequence[tuple[float, float]]
    lease_s: float
    run: int
