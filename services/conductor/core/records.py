"""Records of decisions, for `mooncache why`: what was chosen, what else there was, what came of it.

A record is a JSON object (docs/reference-decision.md). Its candidates are packed at once, so that ten
thousand records take tens of megabytes; the oldest are dropped.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum

import msgspec

from mooncache.conductor.core.candidates import Candidates, PolicyView
from mooncache.conductor.core.policy.types import Rules
from mooncache.conductor.core.record_fields import EventFields, ObservedFields
from mooncache.conductor.core.seen import MissRange
from mooncache.conductor.core.spans import spans
from mooncache.kvcache.leg_hint import CacheReport, LegRole

EARLIER_MAX = 16
EVENTS_MAX = 32
EVENT_BYTES_MAX = 32_768
pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder().decode


class DecisionState(StrEnum):
    """How far the request of a decision is, or how it ended."""

    RUNNING = "running"
    REFUSED = "refused"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"  # scheduled again
    EXPIRED = "expired"  # nothing was reported until the time limit
    LOST = "lost"  # its engine was idle or started again, and the end was not reported


@dataclass(slots=True)
class DecisionRecord:
    """One decision.

    Thousands of records live long: packed bytes are smaller, and the garbage collector need not look into them.
    """

    decision_id: str
    request_id: str
    head: bytes  # what is known when it is made, packed
    made_s: float
    candidates: bytes = b""  # what the policy saw of the best, packed
    policy_view: PolicyView | None = None  # what the policy saw, until `candidates` have been made of it
    message: str = ""
    state: DecisionState = DecisionState.RUNNING
    planned_prefix: int = 0  # leading tokens that were expected to be there
    cacheable_tokens: int = 0
    pool_tokens: int = 0
    block_tokens: int = 0
    misses: list[MissRange] = field(default_factory=list)
    events: list[bytes] = field(default_factory=list)
    observed: ObservedFields = field(default_factory=ObservedFields)
    report_sequence: int = 0  # of the newest report that was taken in; what is not newer is a repeat
    decode_cache: tuple[str, CacheReport] | None = None
    """What the worker of the decode instance (by name) passed on of the leg that answered."""

    def note(self, event: EventFields) -> None:
        """Add an event; beyond a number they are dropped, beyond a size their legs."""
        if len(self.events) >= EVENTS_MAX:
            return
        packed = pack(event)
        if sum(map(len, self.events)) + len(packed) > EVENT_BYTES_MAX:
            packed = pack({**event, "legs": [], "dropped": "the record is full"})
        self.events.append(packed)

    def reported(self) -> list[EventFields]:
        """The events, as JSON fields, with what the engine said of the decode leg by whichever way it came."""
        events: list[EventFields] = [unpack(event) for event in self.events]
        if self.decode_cache is not None:
            instance, cache = self.decode_cache
            for event in events:
                legs = [leg for leg in event["legs"] if leg["leg"] == LegRole.DECODE]
                if legs and legs[-1]["instance"] == instance:
                    legs[-1].setdefault("cache", asdict(cache))
        return events

    def to_json(self, rules: Rules, more: dict[str, object] | None = None) -> str:
        """The record as a JSON object; the candidates are priced again by the rules. more: other fields."""
        document = {
            **self._fields(),
            **Candidates.fields_of(self.candidates, rules),
            **(more or {}),
            "misses": [
                {"from_token": miss.begin, "to_token": miss.end, "reason": miss.reason}
                for miss in self.misses
            ],
        }
        return json.dumps(document)

    def to_brief_json(self) -> str:
        """The record as a JSON object without candidates and misses, which take longest to make."""
        return json.dumps(self._fields())

    def _fields(self) -> dict[str, object]:
        events = self.reported()
        return {
            **unpack(self.head),
            "message": self.message,
            "state": self.state,
            "observed": self.observed,
            "events": events,
            "spans": [span.to_json() for span in spans(events, self.observed)],
        }


class Records:
    """The newest `count_max` records, by decision id and by request id."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()
        # A client may give all its requests one id: thousands of decisions under a name must cost no more than one.
        self._of_request: dict[str, deque[str]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: DecisionRecord) -> None:
        """Keep a record; drop the oldest when there are too many."""
        self._records[record.decision_id] = record
        self._of_request.setdefault(record.request_id, deque()).append(record.decision_id)
        while len(self._records) > self._count_max:
            _, oldest = self._records.popitem(last=False)
            left = self._of_request[oldest.request_id]
            left.popleft()  # of one request the oldest goes first
            if not left:
                del self._of_request[oldest.request_id]

    def find(self, name: str) -> DecisionRecord | None:
        """The record of a decision id, or the newest one of a request id."""
        if name in self._records:
            return self._records[name]
        ids = self._of_request.get(name)
        return self._records[ids[-1]] if ids else None

    def newest(self) -> DecisionRecord | None:
        """The record of the last decision."""
        return next(reversed(self._records.values()), None)

    def older(self, before: str = "") -> Iterator[DecisionRecord]:
        """The records made before that decision, the newest first; none when it is not kept. "": all of them."""
        found = reversed(self._records.values())
        if before and before not in self._records:
            return
        if before:
            for record in found:
                if record.decision_id == before:
                    break
        yield from found

    def earlier(self, request_id: str) -> list[str]:
        """The last decision ids of a request, oldest first."""
        known = self._of_request.get(request_id, deque())
        return [known[at] for at in range(max(0, len(known) - EARLIER_MAX), len(known))]

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        listed = [name for ids in self._of_request.values() for name in ids]
        assert sorted(listed) == sorted(self._records), "records and request ids disagree"
        assert len(self._records) <= self._count_max, "too many records"


def milliseconds(seconds: float) -> float:
    """Milliseconds, rounded for people."""
    return round(seconds * 1e3, 3)
