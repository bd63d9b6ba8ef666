"""What a gateway reports of a request: how far it is, and how its legs went."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

from mooncache.conductor.core.record_fields import EventFields, LegFields
from mooncache.kvcache.leg_hint import CacheReport, LegRole


class Phase(StrEnum):
    """What happened."""

    PREFILLED = "prefilled"
    PREFILL_FAILED = "prefill_failed"
    FIRST_TOKEN = "first_token"  # noqa: S105  (a token of text)
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class LegReport:
    """How one leg went. Times are since the gateway took the request."""

    role: LegRole
    instance_id: str
    sent_ms: float = 0.0
    ended_ms: float = 0.0  # 0 while it runs
    code: str = ""  # OK, or what went wrong
    usage: dict[str, int] | None = None  # tokens by name, as the engine counted them
    cache: CacheReport | None = None  # None when the engine said nothing about its cache

    def to_json(self) -> LegFields:
        """As the record of a decision shows it."""
        found: LegFields = {
            "leg": str(self.role),
            "instance": self.instance_id,
            "sent_ms": round(self.sent_ms, 3),
            "ended_ms": round(self.ended_ms, 3),
            "code": self.code,
        }
        if self.usage is not None:
            found["usage"] = self.usage
        if self.cache is not None:
            found["cache"] = asdict(self.cache)
        return found


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """One report; see ReportProgressRequest in the proto. `elapsed_s`: 0 when it was not said."""

    phase: Phase
    elapsed_s: float = 0.0
    output_tokens: int = 0
    legs: tuple[LegReport, ...] = ()
    answer_is_whole: bool = False
    code: str = ""
    cached_tokens: int | None = None
    prefill_may_follow: bool = False  # of PREFILL_FAILED: another plan is asked for
    sequence: int = 0  # grows with the reports of a gateway; a repeat has the same; 0: not said

    @property
    def prefill(self) -> LegReport | None:
        """The last prefill leg of which it tells."""
        return next((leg for leg in reversed(self.legs) if leg.role is LegRole.PREFILL), None)

    @property
    def decode_cache(self) -> CacheReport | None:
        """What the engine of the last decode leg that answered said about its cache."""
        said = (leg.cache for leg in reversed(self.legs) if leg.role is LegRole.DECODE)
        return next((cache for cache in said if cache is not None), None)

    def to_json(self) -> EventFields:
        """As the record of a decision shows it."""
        found: EventFields = {
            "phase": str(self.phase),
            "elapsed_ms": round(self.elapsed_s * 1e3, 3),
            "output_tokens": self.output_tokens,
            "legs": [leg.to_json() for leg in self.legs],
        }
        if self.phase is Phase.FIRST_TOKEN:
            found["answer_is_whole"] = self.answer_is_whole
        if self.prefill_may_follow:
            found["prefill_may_follow"] = True
        if self.code:
            found["code"] = self.code
        if self.cached_tokens is not None:
            found["cached_tokens"] = self.cached_tokens
        return found
