"""The best candidates of a decision, kept as what the policy saw of them and priced again on demand.

Pricing sixteen candidates in words takes longer than choosing among a thousand in columns, and few records are ever
read: so the record holds a snapshot of the best rows only. For another policy's opinion the whole fleet is needed;
those snapshots are larger, so only the last ones are kept, up to a number of bytes (`Snapshots`).
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from typing import NamedTuple

import msgspec
import numpy as np

from mooncache.conductor.core.policy import branches, placement
from mooncache.conductor.core.policy.common import QUIET, handovers_s
from mooncache.conductor.core.policy.fleet import PREFILL, ROLE_NAMES, Fleet
from mooncache.conductor.core.policy.types import NO_ROW, Choice, Floats, Ints, Request, Rules
from mooncache.conductor.core.snapshot import Snapshot, take

KEPT_MAX = 16
_NOTHING = {"candidate_count": 0, "prefill_candidates": [], "inline_candidates": [], "decode_candidates": []}


class Candidates(msgspec.Struct, frozen=True):
    """Places in the snapshot of those who could compute the prompt, do both, generate; the best first."""

    count: int  # how many were priced for the prompt
    prefills: list[int]
    inlines: list[int]
    decodes: list[int]
    at_s: float
    whole: bool  # the snapshot holds all that could be chosen
    snapshot: Snapshot

    @classmethod
    def of(cls, fleet: Fleet, request: Request, choice: Choice) -> Candidates | None:
        """The best candidates of a choice; the chosen ones are always among them. None without any."""
        if choice.decode == NO_ROW or choice.scores is None:
            return None
        givers = np.where(fleet.role == PREFILL, choice.scores, np.inf)
        inline = choice.prefill == NO_ROW
        prefills = _best(givers, NO_ROW if inline else choice.prefill)
        inlines = _best(choice.inline_scores, choice.decode if inline else NO_ROW)
        decodes = _best(choice.decode_scores, choice.decode)
        sources = [source.row for source in request.sources if source.row != NO_ROW]
        chosen = {*prefills, *inlines, *decodes, *choice.members, *sources}
        count = int(np.count_nonzero(givers < np.inf))
        if choice.inline_scores is not None:
            count += int(np.count_nonzero(choice.inline_scores < np.inf))
        ready = np.flatnonzero(fleet.ready)
        whole = len(ready) <= 2 * KEPT_MAX
        rows: Ints = np.union1d(ready, np.array(sorted(chosen))) if whole else np.array(sorted(chosen))
        place = {int(row): at for at, row in enumerate(rows)}
        snapshot = take(fleet, request, choice.total_s, rows)
        return cls(
            count,
            [place[row] for row in prefills],
            [place[row] for row in inlines],
            [place[row] for row in decodes],
            choice.total_s,
            whole and not request.exclude,
            snapshot,
        )

    def packed(self) -> bytes:
        """The candidates as bytes, which are smaller and invisible to the garbage collector."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def unpacked(packed: bytes) -> Candidates | None:
        """The candidates that `packed` made into bytes; None for None."""
        return msgspec.msgpack.decode(packed, type=Candidates) if packed else None

    @staticmethod
    @QUIET
    def fields_of(packed: bytes, rules: Rules) -> dict[str, object]:
        """Packed candidates as JSON fields, priced by the rules."""
        found = Candidates.unpacked(packed)
        if found is None:
            return dict(_NOTHING)
        fleet, request = found.snapshot.fleet(), found.snapshot.policy_request()
        # Without a prefill instance nothing is handed over.
        handover_s = handovers_s(request, fleet) if found.prefills else np.zeros(len(fleet))
        placed = placement.price(request, fleet, found.at_s, handover_s)
        sequences, kv_tokens = fleet.decode_at(found.at_s)
        return {
            "candidate_count": found.count,
            "prefill_candidates": [_prefill(request, fleet, rules, row) for row in found.prefills],
            "inline_candidates": [_prefill(request, fleet, rules, row) for row in found.inlines],
            "decode_candidates": [
                {
                    "instance_id": fleet.names[row],
                    "role": ROLE_NAMES.get(int(fleet.role[row]), ""),
                    "local_tokens": int(request.local[row]),
                    "sequences": round(float(fleet.sequences[row]), 2),
                    "expected_sequences": round(float(sequences[row]), 2),
                    "kv_used_tokens": int(fleet.kv_tokens[row]),
                    "expected_kv_tokens": int(kv_tokens[row]),
                    "kv_capacity_tokens": int(fleet.kv_capacity_tokens[row]),
                    "tbt_ms": _ms(float(placed.tbt_s[row])),
                    "wait_ms": _ms(float(placed.wait_s[row])),
                    "handover_ms": _ms(float(handover_s[row])),
                    "score_ms": _ms(float(placed.score_s[row])),
                }
                for row in found.decodes
            ],
        }


class PolicyView(NamedTuple):
    """What the policy saw, and what it chose: enough to make `Candidates` of it later, after the answer."""

    fleet: Fleet
    request: Request
    choice: Choice


class Snapshots:
    """Whole snapshots of the last decisions, packed, at most so many bytes of them."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @staticmethod
    def packed(snapshot: Snapshot) -> bytes:
        """The stored form of a snapshot."""
        return zlib.compress(msgspec.msgpack.encode(snapshot), 1)

    def keep(self, decision_id: str, packed: bytes) -> None:
        """Keep one; the oldest go when there are too many bytes."""
        self.size_bytes -= len(self._kept.pop(decision_id, b""))
        self._kept[decision_id] = packed
        self.size_bytes += len(packed)
        while self.size_bytes > self._bytes_max:
            _, oldest = self._kept.popitem(last=False)
            self.size_bytes -= len(oldest)

    def find(self, decision_id: str) -> Snapshot | None:
        """The snapshot of a decision, None when it is gone."""
        packed = self._kept.get(decision_id)
        return msgspec.msgpack.decode(zlib.decompress(packed), type=Snapshot) if packed is not None else None


def _best(scores: Floats | None, chosen: int) -> list[int]:
    """The rows of the least scores, in order, the chosen one among them."""
    if scores is None:
        return [chosen] if chosen != NO_ROW else []
    rows: Ints = np.flatnonzero(scores < np.inf)
    if len(rows) > KEPT_MAX:
        rows = rows[np.argpartition(scores[rows], KEPT_MAX)[:KEPT_MAX]]
    found: list[int] = rows[np.argsort(scores[rows], kind="stable")].tolist()
    if chosen != NO_ROW and chosen not in found:
        found.append(chosen)
    return found


def _prefill(request: Request, fleet: Fleet, rules: Rules, row: int) -> dict[str, object]:
    found = branches.options(request, fleet, rules, row)
    best = branches.cheapest(found)
    return {
        "instance_id": fleet.names[row],
        "role": ROLE_NAMES.get(int(fleet.role[row]), ""),
        "local_tokens": int(request.local[row]),
        "queue_ms": _ms(float(fleet.queue_s[row])),
        "best": best.branch,
        "total_ms": _ms(best.total_s),
        "branches": [_option_fields(option, fleet) for option in found],
    }


def _option_fields(option: branches.PrefillOption, fleet: Fleet) -> dict[str, object]:
    fields: dict[str, object] = {
        "kind": option.branch,
        "prefix_tokens": option.prefix_tokens,
        "fetch_tokens": option.fetch_tokens,
        "ready_ms": _ms(option.ready_s),
        "compute_ms": _ms(option.compute_s),
        "total_ms": _ms(option.total_s),
        "score_ms": _ms(option.score_s),
    }
    if option.awaited is not None:
        fields["awaited_instance_id"] = (
            fleet.names[option.awaited.row] if option.awaited.row != NO_ROW else ""
        )
        fields["awaited_decision_id"] = option.awaited.decision_id
    return fields


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
