"""The parts of one request on one line of time: waiting, loading, computing and generating of each leg.

Gateways say when legs were sent and ended, engines how long a leg waited and loaded. A leg waits first, then it loads,
then it computes; a load that began while the leg still waited (`hidden_ms` of the cache report) reaches back into the
wait by so much. What an engine did not say is shown as unknown, not as computing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mooncache.conductor.core.progress import Phase
from mooncache.conductor.core.record_fields import EventFields, LegFields, ObservedFields
from mooncache.kvcache.leg_hint import LegRole
from mooncache.kvcache.span_part import SpanPart


class LegSpan(NamedTuple):
    """Milliseconds since the gateway took the request."""

    leg: str  # a role, or "gateway"
    instance: str
    part: SpanPart
    from_ms: float
    to_ms: float

    def to_json(self) -> dict[str, object]:
        """As the record of a decision shows it."""
        return {
            "leg": self.leg,
            "instance": self.instance,
            "part": str(self.part),
            "from_ms": round(self.from_ms, 3),
            "to_ms": round(self.to_ms, 3),
        }


def spans(events: Sequence[EventFields], observed: ObservedFields) -> list[LegSpan]:
    """The spans of a request in the order of its legs, from what was reported of it so far."""
    legs = _legs(events)
    if not legs:
        return []
    seen_ms = max(float(event["elapsed_ms"]) for event in events)
    first_ms = next(
        (
            float(event["elapsed_ms"])
            for event in events
            if event["phase"] == Phase.FIRST_TOKEN and not event.get("answer_is_whole")
        ),
        None,
    )
    answering = max((leg["sent_ms"] for leg in legs if leg["leg"] == LegRole.DECODE), default=None)
    found = [LegSpan("gateway", "", SpanPart.PLAN, 0.0, min(leg["sent_ms"] for leg in legs))]
    for leg in legs:
        end_ms = leg["ended_ms"] or max(seen_ms, leg["sent_ms"])
        if leg["leg"] == LegRole.PREFILL:
            found += _computing(leg, end_ms, queue_ms=float(observed.get("queue_ms", 0.0)))
        elif leg["sent_ms"] == answering and first_ms is not None:
            found += _computing(leg, min(first_ms, end_ms))
            found.append(LegSpan(leg["leg"], leg["instance"], SpanPart.GENERATE, first_ms, end_ms))
        else:
            found += _computing(leg, end_ms)
    return [span for span in found if span.to_ms > span.from_ms]


def _legs(events: Iterable[EventFields]) -> list[LegFields]:
    """What was reported last of each leg, in the order in which they were sent."""
    last: dict[tuple[str, str, float], LegFields] = {}
    for event in events:
        for leg in event["legs"]:
            name = leg["leg"], leg["instance"], leg["sent_ms"]
            # A later report has all that an earlier one had, but a cache report may be in either.
            last[name] = {**last.get(name, {}), **leg}
    return sorted(last.values(), key=lambda leg: (leg["sent_ms"], leg["leg"] != LegRole.PREFILL))


def _computing(leg: LegFields, end_ms: float, queue_ms: float = 0.0) -> list[LegSpan]:
    """A leg from when it was sent until its prompt is computed."""
    begin_ms, cache = leg["sent_ms"], leg.get("cache")

    def span(part: SpanPart, from_ms: float, to_ms: float) -> LegSpan:
        return LegSpan(leg["leg"], leg["instance"], part, min(from_ms, end_ms), min(to_ms, end_ms))

    if cache is None:
        part = SpanPart.COMPUTE if leg["leg"] == LegRole.PREFILL else SpanPart.UNKNOWN
        return [span(part, begin_ms, end_ms)]
    there_ms = begin_ms + cache["waited_ms"]
    load_ms = there_ms - min(cache.get("hidden_ms", 0.0), cache["waited_ms"], cache["load_ms"])
    loaded_ms = load_ms + cache["load_ms"]
    turn_ms = max(there_ms, loaded_ms, begin_ms + queue_ms)
    return [
        span(SpanPart.WAIT, begin_ms, there_ms),
        span(SpanPart.LOAD, load_ms, loaded_ms),
        span(SpanPart.QUEUE, max(there_ms, loaded_ms), turn_ms),
        span(SpanPart.COMPUTE, turn_ms, end_ms),
    ]
