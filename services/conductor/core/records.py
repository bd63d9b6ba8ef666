"""Records of decisions, for `mooncache why`: what was chosen, what else there was, what came of it.

A record is a JSON object (docs/reference-decision.md). Its candidates are packed at once, so that ten
thousand records take tens of megabytes; the oldest are dropped.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mooncache.conductor.core.policy.facts import Branch, Choice, DecodeOption, PrefillOption
from mooncache.conductor.core.seen import MissRange

CANDIDATES_MAX = 16
EARLIER_MAX = 16
EVENTS_MAX = 32
EVENT_BYTES_MAX = 32_768
DETAIL_CHARS_MAX = 16_384
DETAIL_DEPTH_MAX = 16
RUNNING, REFUSED = "running", "refused"
_Kept = tuple[int, list[PrefillOption], list[PrefillOption], list[DecodeOption]]
pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder().decode
_decode_kept = msgspec.msgpack.Decoder(_Kept).decode


@dataclass(slots=True)
class Record:
    """One decision. `head` holds what is known when it is made, `candidates` the alternatives, both packed.

    Thousands of records live long: packed bytes are smaller, and the garbage collector need not look into them.
    planned_prefix: leading tokens that were expected to be there.
    """

    decision_id: str
    request_id: str
    head: bytes
    candidates: bytes
    made_s: float
    message: str = ""
    state: str = RUNNING
    planned_prefix: int = 0
    cacheable_tokens: int = 0
    pool_tokens: int = 0
    block_tokens: int = 0
    misses: list[MissRange] = field(default_factory=list)
    events: list[bytes] = field(default_factory=list)
    observed: dict[str, Any] = field(default_factory=dict)

    def note(self, event: dict[str, Any]) -> None:
        """Add an event; beyond a number they are dropped, beyond a size their details."""
        if len(self.events) >= EVENTS_MAX:
            return
        packed = pack(event)
        if sum(map(len, self.events)) + len(packed) > EVENT_BYTES_MAX:
            packed = pack({**event, "detail": {"dropped": "the record is full"}})
        self.events.append(packed)

    def to_json(self) -> str:
        """Return the record as a JSON object."""
        document = {
            **unpack(self.head),
            "message": self.message,
            "state": self.state,
            **candidates_fields(self.candidates),
            "misses": [
                {"from_token": miss.begin, "to_token": miss.end, "reason": miss.reason}
                for miss in self.misses
            ],
            "observed": self.observed,
            "events": [unpack(event) for event in self.events],
        }
        return json.dumps(document)


class Records:
    """The newest `count_max` records, by decision id and by request id."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._records: OrderedDict[str, Record] = OrderedDict()
        # A client may give all its requests one id: thousands of decisions under a name must cost no more than one.
        self._of_request: dict[str, deque[str]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> None:
        """Keep a record; drop the oldest when there are too many."""
        self._records[record.decision_id] = record
        self._of_request.setdefault(record.request_id, deque()).append(record.decision_id)
        while len(self._records) > self._count_max:
            _, oldest = self._records.popitem(last=False)
            left = self._of_request[oldest.request_id]
            left.popleft()  # of one request the oldest goes first
            if not left:
                del self._of_request[oldest.request_id]

    def find(self, name: str) -> Record | None:
        """Return the record of a decision id, or the newest one of a request id."""
        if name in self._records:
            return self._records[name]
        ids = self._of_request.get(name)
        return self._records[ids[-1]] if ids else None

    def earlier(self, request_id: str) -> list[str]:
        """Return the last decision ids of a request, oldest first."""
        known = self._of_request.get(request_id, deque())
        return [known[at] for at in range(max(0, len(known) - EARLIER_MAX), len(known))]

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        listed = [name for ids in self._of_request.values() for name in ids]
        assert sorted(listed) == sorted(self._records), "records and request ids disagree"
        assert len(self._records) <= self._count_max, "too many records"


def milliseconds(seconds: float) -> float:
    """Return milliseconds, rounded for people."""
    return round(seconds * 1e3, 3)


def encode_candidates(choice: Choice) -> bytes:
    """Return the cheapest candidates of each kind, packed; the chosen ones are always among them."""
    prefills = _first(choice.prefill_options, choice.prefill)
    inlines = _first(choice.inline_options, choice.inline)
    decodes = sorted(choice.decode_options, key=_score)[:CANDIDATES_MAX]
    if choice.decode is not None and not any(option is choice.decode for option in decodes):
        decodes.append(choice.decode)
    return pack((len(choice.prefill_options) + len(choice.inline_options), prefills, inlines, decodes))


def candidates_fields(packed: bytes) -> dict[str, Any]:
    """Return packed candidates as JSON fields."""
    count, prefills, inlines, decodes = _decode_kept(packed)
    return {
        "candidate_count": count,
        "prefill_candidates": [_prefill(option) for option in prefills],
        "inline_candidates": [_prefill(option) for option in inlines],
        "decode_candidates": [_decode(option) for option in decodes],
    }


def _total(option: PrefillOption) -> float:
    return option.best.score_s


def _score(option: DecodeOption) -> float:
    return option.score_s


def _first(options: tuple[PrefillOption, ...], chosen: PrefillOption | None) -> list[PrefillOption]:
    found = sorted(options, key=_total)[:CANDIDATES_MAX]
    if chosen is not None and not any(option is chosen for option in found):
        found.append(chosen)
    return found


def _prefill(option: PrefillOption) -> dict[str, Any]:
    facts = option.facts
    return {
        "instance_id": facts.instance_id,
        "role": facts.role,
        "local_tokens": facts.local_tokens,
        "queue_ms": milliseconds(facts.queue_s),
        "best": option.best.kind,
        "total_ms": milliseconds(option.best.total_s),
        "branches": [branch_fields(branch) for branch in option.branches],
    }


def branch_fields(branch: Branch) -> dict[str, Any]:
    """Return a branch as JSON fields."""
    fields: dict[str, Any] = {
        "kind": branch.kind,
        "prefix_tokens": branch.prefix_tokens,
        "fetch_tokens": branch.fetch_tokens,
        "ready_ms": milliseconds(branch.ready_s),
        "compute_ms": milliseconds(branch.compute_s),
        "total_ms": milliseconds(branch.total_s),
        "score_ms": milliseconds(branch.score_s),
    }
    if branch.awaited is not None:
        fields["awaited_instance_id"] = branch.awaited.instance_id
        fields["awaited_decision_id"] = branch.awaited.decision_id
    return fields


def _decode(option: DecodeOption) -> dict[str, Any]:
    facts = option.facts
    return {
        "instance_id": facts.instance_id,
        "role": facts.role,
        "local_tokens": facts.local_tokens,
        "sequences": round(facts.sequences, 2),
        "kv_used_tokens": int(facts.kv_used_tokens),
        "kv_capacity_tokens": facts.kv_capacity_tokens,
        "tbt_ms": milliseconds(option.tbt_s),
        "wait_ms": milliseconds(option.wait_s),
        "handover_ms": milliseconds(option.handover_s),
        "score_ms": milliseconds(option.score_s),
    }
