"""Where a request goes: its legs, what was tried for it, and for how long the decode leg waits for the prefill leg.

Waits for blocks that the prefill leg did not store are ended by its engine; the blocks that it stored arrive
soon. A decode leg without an answer after that time may be busy, or may wait for blocks of which all word was lost:
only the pool knows which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from mooncache.gateway.core.answer import TokenUsage, cached_of_leg
from mooncache.kvcache.leg_hint import CacheReport, LegRole

DECODE_ATTEMPTS: Final = 3
DECISION_HEADER: Final = "x-mooncache-decision"
PLAN_HEADER: Final = "x-mooncache-plan"


@dataclass(frozen=True, slots=True)
class LegPlan:
    """One leg: where it goes and what it waits for."""

    instance_id: str
    url: str
    wait_tokens: int = 0
    wait_ms: int = 0
    handover_ms: int = 0  # of a decode leg: how long after the end of its prefill leg blocks may still come
    expected_ms: int = 0  # how long its wait is expected to last; 0: not said
    orders_by_priority: bool = False  # the engine's queue takes the field `priority`


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Where a request goes."""

    decode: LegPlan
    prefill: LegPlan | None = None  # None: decode computes the prompt
    decision_id: str = ""  # "": no conductor made it
    summary: str = ""
    hit_tokens: int = 0  # leading prompt tokens that a cache held when the plan was made
    store_node: str = ""  # id of the pool's node through which the legs hand blocks over; "": any
    shard_blocks: int = 0  # leading blocks whose keys of the other shards the conductor wants


@dataclass(slots=True)
class LegRecord:
    """What happened on one leg, for `why`. Times are milliseconds since the gateway took the request."""

    role: LegRole
    instance: str = ""
    sent_ms: float = 0.0
    ended_ms: float = 0.0
    code: str = ""  # how it ended, an error of the catalogue or an `EndCode`; "" while it is under way
    usage: TokenUsage | None = None
    cache: CacheReport | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the leg found in a cache."""
        return cached_of_leg(self.usage, self.cache)


@dataclass(slots=True)
class Attempts:
    """What has been tried for one request."""

    number: int = 1
    prefill_failures: int = 0
    decode_failures: int = 0
    deaths: int = 0
    exclude: list[str] = field(default_factory=list)

    def failed(self, instance_id: str, *, prefill: bool) -> None:
        """Count a failed leg; its instance is not asked again."""
        self.number += 1
        if prefill:
            self.prefill_failures += 1
        else:
            self.decode_failures += 1
        if instance_id not in self.exclude:
            self.exclude.append(instance_id)


def complete_tokens(lengths: Sequence[int], block_tokens: int) -> int:
    """Tokens of complete blocks of the longest prompt: what a decode leg may wait for."""
    if block_tokens < 1:
        return 0
    return max((length // block_tokens * block_tokens for length in lengths), default=0)


def headers(made: RequestPlan, *, is_admin: bool) -> dict[str, str]:
    """What the answer's headers tell of the plan: tenants get a name that means something to `mooncache why` only.

    The summary names instances and tells of their load; it is for callers with the cluster token.
    """
    found = {DECISION_HEADER: _header_text(made.decision_id) or "unscheduled"}
    if is_admin:
        found[PLAN_HEADER] = _header_text(made.summary)
    return found


def _header_text(text: str) -> str:
    """A text as a header's value: one line of printable ASCII."""
    return "".join(c if " " <= c <= "~" else "?" for c in text[:1024])


class Handover:
    """The blocks that one request's decode leg still waits for. Times are seconds of one monotonic clock.

    awaited_tokens: leading prompt tokens for which the present decode leg waits.
    """

    def __init__(self) -> None:
        self.awaited_tokens = 0
        self._by_s: float | None = None

    def sent(self, awaited_tokens: int) -> None:
        """A decode leg was sent."""
        self.awaited_tokens, self._by_s = awaited_tokens, None

    def prefilled(self, leg: LegPlan, now_s: float) -> None:
        """The prefill leg has ended well; `leg` is the decode leg as planned."""
        if self.awaited_tokens and leg.handover_ms:
            self._by_s = now_s + leg.handover_ms / 1e3

    def left_s(self, now_s: float) -> float | None:
        """Time until the pool should be asked; None: never."""
        return max(0.0, self._by_s - now_s) if self._by_s is not None else None

    def is_due(self, now_s: float) -> bool:
        """Whether to ask the pool now; True once."""
        if self._by_s is None or now_s < self._by_s:
            return False
        self._by_s = None
        return True
