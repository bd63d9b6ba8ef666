"""The fields of a decision's record that come from reports, as JSON (docs/reference-decision.md)."""

from __future__ import annotations

from typing import TypedDict


class LegFields(TypedDict, total=False):
    """One leg, as a report described it. Times are since the gateway took the request."""

    leg: str
    instance: str
    sent_ms: float
    ended_ms: float  # 0 while it runs
    code: str
    usage: dict[str, int]
    cache: dict[str, float]  # a CacheReport; those of its fields that are not numbers are not read


class EventFields(TypedDict, total=False):
    """One report."""

    phase: str
    elapsed_ms: float
    since_decision_ms: float
    output_tokens: int
    legs: list[LegFields]
    answer_is_whole: bool
    prefill_may_follow: bool
    code: str
    cached_tokens: int
    dropped: str  # why legs are missing


class ObservedFields(TypedDict, total=False):
    """What came of the request."""

    streamed: bool
    ttft_ms: float
    tbt_ms: float
    queue_ms: float
    ready_ms: float
    prefill_ms: float
    handover_ms: float
    decode_ms: float
    total_ms: float
    output_tokens: int
    computed_tokens: int
    local_tokens: int
    loaded_tokens: int
    handover: str
    differences: list[dict[str, object]]
    given_up: list[dict[str, object]]
