"""Between what is said of a leg and the messages about it: gateways and workers write, the conductor reads."""

from __future__ import annotations

from typing import Final

import msgspec

from mooncache.kvcache.leg_hint import CacheOutcome, CacheReport, LegRole
from mooncache.proto.v1 import conductor_pb2 as pb

LEG_ROLES: Final = {pb.LEG_ROLE_PREFILL: LegRole.PREFILL, pb.LEG_ROLE_DECODE: LegRole.DECODE}
LEG_ROLE_NUMBERS: Final = {role: number for number, role in LEG_ROLES.items()}
CACHE_OUTCOMES: Final = {
    pb.CACHE_OUTCOME_UNSPECIFIED: CacheOutcome.UNKNOWN,
    pb.CACHE_OUTCOME_HIT: CacheOutcome.HIT,
    pb.CACHE_OUTCOME_PARTIAL: CacheOutcome.PARTIAL,
    pb.CACHE_OUTCOME_MISS: CacheOutcome.MISS,
    pb.CACHE_OUTCOME_TIMEOUT: CacheOutcome.TIMEOUT,
    pb.CACHE_OUTCOME_FAILED: CacheOutcome.FAILED,
    pb.CACHE_OUTCOME_POOL_ABSENT: CacheOutcome.POOL_ABSENT,
    pb.CACHE_OUTCOME_OFF: CacheOutcome.OFF,
    pb.CACHE_OUTCOME_COMPUTED_FASTER: CacheOutcome.COMPUTED_FASTER,
    pb.CACHE_OUTCOME_LOAD_CUT: CacheOutcome.LOAD_CUT,
}
CACHE_OUTCOME_NUMBERS: Final = {outcome: number for number, outcome in CACHE_OUTCOMES.items()}


def cache_message(cache: CacheReport) -> pb.CacheReport:
    """A cache report as a message."""
    said = {**msgspec.to_builtins(cache), "outcome": CACHE_OUTCOME_NUMBERS[cache.outcome]}
    said["loaded_from"] = [pb.LoadedFrom(**place._asdict()) for place in cache.loaded_from]
    if cache.held_tokens < 0:
        del said["held_tokens"]
    return pb.CacheReport(**said)
