"""What is known of the instances of one model: columns that are kept up to date with every event.

Both the running conductor and the simulator keep their instances in this book, so a policy sees the same thing
in both. A row is an instance for as long as it is known; rows of instances that are gone are used again.
Invariant: every column is the sum of what was assigned and has not ended, at any time; no event loops over
instances or requests. Counting assignments at once is what keeps a burst from herding onto the instance that
looked best a moment ago. The decode load to come is in `DecodeAhead`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from mooncache.conductor.core.decode_ahead import LATER_S, Curve, DecodeAhead
from mooncache.conductor.core.fleet_shape import (
    BOOLS,
    FLOATS,
    INTS,
    SHAPE_COLUMNS,
    InstanceShape,
    SourceRates,
    believed,
    cost_cells,
    possible,
)
from mooncache.conductor.core.policy.fleet import NO_ROLE, Even, Fleet, FleetSummary
from mooncache.conductor.core.policy.types import (
    NO_ROW,
    Bools,
    Choice,
    DecodeCost,
    Floats,
    PrefillCost,
    Request,
    TransferCost,
)

__all__ = ["Assignment", "FleetBook", "InstanceShape"]

DecisionId = int | str
_OWN = ("now_s", "names", "queue_s", "generating_s", "predict", "cached_summary")
_SHARED = tuple(field.name for field in fields(Fleet) if field.name not in _OWN)
STAY_PRIOR_S = 10.0
_GROWTH = 16


@dataclass(frozen=True, slots=True)
class Assignment:
    """An admitted request."""

    decision_id: DecisionId
    choice: Choice
    request: Request
    survival: Callable[[Floats], Floats] | None = None
    """Share of answers longer than so many tokens (None: exponential)."""


@dataclass(slots=True)
class _Work:
    """What an assignment added to the columns."""

    assignment: Assignment
    prefillers: tuple[int, ...]
    generations: tuple[int, ...]
    decoder: int
    decoder_generation: int
    uncached_tokens: float
    kv_tokens: float
    mean_kv_tokens: float
    assigned_s: float
    computing: bool = True
    fetching: bool = False
    generating: bool = False
    curve: Curve = field(default_factory=Curve)


class FleetBook:
    """The state of one model's instances, as columns. Times are seconds of one monotonic clock."""

    def __init__(self, *, curves: bool = True) -> None:
        """curves: keep the decode load ahead (its cost is some microseconds for each request)."""
        self.names: list[str] = []
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._generation: list[int] = []
        self._pending: list[dict[DecisionId, float]] = []
        self._running: list[DecisionId | None] = []  # of each row's prompts, the one that is believed to run
        self._work: dict[DecisionId, _Work] = {}
        self.arrived_s = 0.0  # of computing, all prompts that prefill instances were given
        self.inline_s = 0.0  # and those that instances compute that generate
        self.generating_s = 0.0  # that all answers together add to steps
        self._columns: dict[str, np.ndarray] = {}
        self._cells: dict[str, Any] = {}  # memoryviews of the columns: for single values they are much faster
        self._floats: Floats = np.zeros((len(FLOATS), 0))  # the table that columns of floats are rows of
        self._sliced: dict[str, Any] = {}  # the columns without the room behind them
        self._fleet: Fleet  # shows those of them that policies see
        self._summary: FleetSummary | None = None
        self._stay_s: float | None = None  # None: not the same in all rows
        self._reports = False
        self._curves = curves
        self._ahead = DecodeAhead()
        self._room(_GROWTH)

    def __len__(self) -> int:
        return len(self.names)

    # --- instances

    def row(self, name: str) -> int:
        """The row of an instance, NO_ROW when it is not known."""
        return self._rows.get(name, NO_ROW)

    def add(self, name: str, shape: InstanceShape) -> int:
        """Take an instance in (or change a known one); return its row."""
        shape = believed(shape)
        row = self._rows.get(name)
        if row is None:
            row = self._free.pop() if self._free else len(self.names)
            if row == len(self.names):
                if row >= len(self._columns["role"]):
                    self._room(2 * row)
                self.names.append("")
                self._generation.append(0)
                self._pending.append({})
                self._running.append(None)
                self._slice()
            self.names[row] = name
            self._rows[name] = row
            self._columns["since_s"][row] = np.inf
            self._columns["stay_s"][row] = STAY_PRIOR_S
        for column in SHAPE_COLUMNS:
            if possible(value := getattr(shape, column)):
                self._columns[column][row] = value
        costs = shape.prefill, shape.decode, shape.transfer, shape.handover, shape.source_rates
        for column, part in cost_cells(*costs):
            self._columns[column][row] = part
        self._share(row)
        self._summary = self._stay_s = None
        return row

    def remove(self, name: str) -> None:
        """Forget an instance with all that was sent there; its requests may still end."""
        row = self._rows.pop(name)
        self.names[row] = ""
        self._generation[row] += 1
        self._pending[row].clear()
        self._running[row] = None
        for column in self._columns.values():
            column[row] = 0
        self._columns["role"][row] = NO_ROLE
        self._columns["since_s"][row] = np.inf
        self._summary = self._stay_s = None
        self._ahead.clear(row)
        self._free.append(row)

    def set(
        self,
        name: str,
        *,
        role: int | None = None,
        ready: bool | None = None,
        prefill: PrefillCost | None = None,
        decode: DecodeCost | None = None,
        transfer: TransferCost | None = None,
        handover: TransferCost | None = None,
        source_rates: SourceRates | None = None,
        stay_s: float | None = None,
    ) -> None:
        """Change what is given of an instance, see `InstanceShape`. Impossible values are ignored."""
        row = self._rows[name]
        self._summary = self._stay_s = None
        for column, value in (("role", role), ("ready", ready), ("stay_s", stay_s)):
            if value is not None and possible(value):
                self._columns[column][row] = value
        for column, part in cost_cells(prefill, decode, transfer, handover, source_rates):
            self._columns[column][row] = part
        if transfer is not None or source_rates is not None:
            self._share(row)

    def learnt(self, kind: int, prefill: PrefillCost) -> None:
        """All instances of a type compute as fast as this; impossible values are ignored."""
        self._summary = None
        mask = self._columns["kind"] == kind
        for column, part in cost_cells(prefill):
            self._columns[column][mask] = part

    def stays(self, stay_s: float) -> None:
        """A sequence stays in a batch for so long, on the mean; impossible values are ignored."""
        if not possible(stay_s):
            return
        self._columns["stay_s"][: len(self.names)] = stay_s
        self._stay_s = stay_s

    def takes(self, prompt_tokens: int) -> Bools:
        """The instances with room for a prompt of this length, as a mask."""
        limit = self._columns["max_model_tokens"][: len(self.names)]
        here = self._columns["role"][: len(self.names)] != NO_ROLE
        mask: Bools = here & ((limit == 0) | (prompt_tokens < limit))
        return mask

    def longest(self) -> int:
        """The largest limit of a prompt's length."""
        return int(self._columns["max_model_tokens"][: len(self.names)].max(initial=0))

    def mean_prompt_s(self, name: str) -> float:
        """The mean time of the prompts that were sent to an instance and wait or run, 0 when there are none."""
        row = self._rows[name]
        return float(self._columns["pending_s"][row]) / max(1, len(self._pending[row]))

    def assigned(self, name: str) -> int:
        """The number of requests with a leg on an instance."""
        row = self._rows.get(name, NO_ROW)
        if row == NO_ROW:
            return 0
        return max(len(self._pending[row]), int(self._columns["own_sequences"][row]))

    def report(
        self, name: str, *, foreign_sequences: float, foreign_queue_s: float, kv_tokens: float
    ) -> None:
        """Take in what an engine has beside what was sent there from here (conductor only)."""
        row = self._rows[name]
        self._reports = True
        self._columns["foreign_sequences"][row] = foreign_sequences if possible(foreign_sequences) else 0.0
        self._columns["foreign_s"][row] = foreign_queue_s if possible(foreign_queue_s) else 0.0
        self._columns["reported_kv_tokens"][row] = kv_tokens if possible(kv_tokens) else 0.0
        self._add_up(row)

    # --- requests

    def assign(self, assignment: Assignment, now_s: float) -> None:
        """Count a request from now on."""
        choice, request = assignment.choice, assignment.request
        prefillers = choice.members or (choice.prefiller_row,)
        work = _Work(
            assignment,
            prefillers,
            tuple(self._generation[row] for row in prefillers),
            choice.decode,
            self._generation[choice.decode],
            float(request.prompt_tokens - choice.prefix_tokens),
            request.kv_tokens,
            _mean_kv_tokens(request),
            now_s,
        )
        self._work[assignment.decision_id] = work
        cells = self._cells
        if choice.prefill != NO_ROW:
            self.arrived_s += choice.compute_s * len(prefillers)
        else:
            self.inline_s += choice.compute_s
        for row in prefillers:
            pending = self._pending[row]
            pending[assignment.decision_id] = choice.compute_s
            cells["pending_s"][row] += choice.compute_s
            cells["queue_tokens"][row] += work.uncached_tokens
            cells["queue_prompts"][row] += 1
            if len(pending) == 1:
                self._begin(row, assignment.decision_id, now_s)
        if choice.fetch_tokens > 0:
            work.fetching = True
            cells["fetching"][choice.prefiller_row] += 1
            self._share(choice.prefiller_row)
        row = choice.decode
        cells["own_sequences"][row] += request.sequences
        cells["own_kv_tokens"][row] += work.kv_tokens
        step_s = cells["decode_per_sequence_s"][row] * request.sequences
        step_s += cells["decode_per_token_s"][row] * work.mean_kv_tokens
        self.generating_s += step_s * request.output_tokens
        self._add_up(row)
        self._look_ahead(work, now_s, choice.ttft_s)

    def started(self, decision_id: DecisionId, now_s: float) -> None:
        """The prompt's computing begins now: its fetch is over, and it is the one that runs."""
        work = self._work.get(decision_id)
        if work is None or not work.computing:
            return
        self._fetched(work)
        for row, generation in zip(work.prefillers, work.generations, strict=True):
            if generation == self._generation[row]:
                self._begin(row, decision_id, now_s)

    def computed(self, decision_id: DecisionId, now_s: float) -> float | None:
        """The prompt is computed (or given up): its instances are free for the next.

        Returns since when its first instance has been computing without a pause for another prompt, as far as is
        known: when it could have begun with this one. None when it was known to be computed before.
        """
        work = self._work.get(decision_id)
        if work is None or not work.computing:
            return None
        work.computing = False
        self._fetched(work)
        began_s = work.assigned_s
        if work.generations[0] == self._generation[work.prefillers[0]]:
            began_s = max(began_s, self._cells["since_s"][work.prefillers[0]])
        for row, generation in zip(work.prefillers, work.generations, strict=True):
            if generation == self._generation[row]:
                self._take_off(row, decision_id, work.uncached_tokens, now_s)
        return began_s

    def first_token(self, decision_id: DecisionId, now_s: float) -> None:
        """The request generates from now on."""
        work = self._work.get(decision_id)
        if work is None or work.generating:
            return
        if work.computing:
            self.computed(decision_id, now_s)
        work.generating = True
        if work.decoder_generation != self._generation[work.decoder]:
            return
        self._cells["batch_sequences"][work.decoder] += work.assignment.request.sequences
        self._cells["batch_kv_tokens"][work.decoder] += work.mean_kv_tokens
        self._ahead.drop(work.curve)
        self._look_ahead(work, now_s, 0.0)

    def ended(self, decision_id: DecisionId, now_s: float) -> Assignment | None:
        """Forget a request (done, failed, given up); return it, None when it was not counted."""
        work = self._work.get(decision_id)
        if work is None:
            return None
        if work.computing:
            self.computed(decision_id, now_s)
        del self._work[decision_id]
        row, sequences = work.decoder, work.assignment.request.sequences
        if work.decoder_generation == self._generation[row]:
            if work.generating:
                self._leave("batch_sequences", "batch_kv_tokens", row, sequences, work.mean_kv_tokens)
            self._leave("own_sequences", "own_kv_tokens", row, sequences, work.kv_tokens)
            self._add_up(row)
            self._ahead.drop(work.curve)
        return work.assignment

    # --- what policies see

    def view(self, now_s: float, fetch_tokens_per_s: Floats | None = None) -> Fleet:
        """The columns as they are now. They and the fleet are the book's own: look, and do not keep them.

        fetch_tokens_per_s: what one more fetch into each row would get, when that is known better than by the count
        of the fetches.
        """
        self._ahead.roll(now_s)
        column = self._sliced
        queue_s = now_s - column["since_s"]
        np.maximum(queue_s, 0.0, out=queue_s)
        np.minimum(queue_s, column["running_s"], out=queue_s)  # what the running prompts have computed
        np.subtract(column["pending_s"], queue_s, out=queue_s)
        np.maximum(queue_s, 0.0, out=queue_s)
        if self._reports:
            queue_s += column["foreign_s"]
        fleet = self._fleet
        fleet.now_s, fleet.queue_s, fleet.generating_s = now_s, queue_s, self.generating_s
        here = column["fetch_tokens_per_s"]
        fleet.fetch_tokens_per_s = here if fetch_tokens_per_s is None else fetch_tokens_per_s
        if self._summary is None:
            fleet.cached_summary = None
            self._summary = fleet.summary
        return fleet

    def _slice(self) -> None:
        """Cut the columns to the rows that there are."""
        count = len(self.names)
        self._sliced = {name: values[:count] for name, values in self._columns.items()}
        self._sliced["batch"] = self._pair("batch_sequences", "batch_kv_tokens")[:, :count]
        self._sliced["foreign"] = self._pair("foreign_sequences", "foreign_kv_tokens")[:, :count]
        shared = {name: self._sliced[name] for name in _SHARED}
        self._fleet = Fleet(0.0, self.names, queue_s=np.zeros(count), predict=self._predict, **shared)
        self._summary = self._stay_s = None

    def _predict(self, moments_s: Sequence[float]) -> Floats:
        now_s, column = self._fleet.now_s, self._sliced
        if not self._curves:
            return np.array([(column["sequences"], column["kv_tokens"])] * len(moments_s))
        foreign = column["foreign"] if self._reports else None
        return self._ahead.at(now_s, moments_s, column["batch"], foreign, self._stays())

    def _stays(self) -> Even:
        """The mean stay of each row, one number when all have the same."""
        if self._stay_s is None:
            column = self._sliced["stay_s"]
            if not (column == column[0]).all():
                even: Even = column
                return even
            self._stay_s = float(column[0])
        return self._stay_s

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        count = len(self.names)
        expected = {name: np.zeros(count) for name in ("own_sequences", "own_kv_tokens", "pending_s")}
        for decision_id, work in self._work.items():
            request = work.assignment.request
            if work.decoder_generation == self._generation[work.decoder]:
                expected["own_sequences"][work.decoder] += request.sequences
                expected["own_kv_tokens"][work.decoder] += request.kv_tokens
            for row, generation in zip(work.prefillers, work.generations, strict=True):
                if work.computing and generation == self._generation[row]:
                    assert decision_id in self._pending[row], f"{decision_id} is not queued on row {row}"
                    expected["pending_s"][row] += work.assignment.choice.compute_s
        for name, values in expected.items():
            there = self._columns[name][:count]
            assert np.allclose(there, values, rtol=1e-6, atol=1e-6), f"{name} is {there}, not {values}"

    # --- inside

    def _room(self, rows: int) -> None:
        """Make the columns so long."""
        for names, kind in ((FLOATS, np.float64), (INTS, np.int64), (BOOLS, np.bool_)):
            table: np.ndarray = np.zeros((len(names), rows), dtype=kind)
            if names is FLOATS:
                self._floats = table
            for name, longer in zip(names, table, strict=True):
                known = self._columns.get(name)
                if known is not None:
                    longer[: len(known)] = known
                self._columns[name] = longer
                self._cells[name] = longer.data
        self._ahead.room(rows)
        self._slice()

    def _pair(self, first: str, second: str) -> Floats:
        """Two columns that are looked at together as one table."""
        at = FLOATS.index(first)
        assert FLOATS[at + 1] == second, "columns that are looked at together are neighbours"
        pair: Floats = self._floats[at : at + 2]
        return pair

    def _add_up(self, row: int) -> None:
        cells = self._cells
        cells["sequences"][row] = cells["own_sequences"][row] + cells["foreign_sequences"][row]
        own, reported = cells["own_kv_tokens"][row], cells["reported_kv_tokens"][row]
        cells["kv_tokens"][row] = own if own > reported else reported
        cells["foreign_kv_tokens"][row] = reported - own if reported > own else 0.0

    def _leave(self, counts: str, sizes: str, row: int, sequences: int, kv_tokens: float) -> None:
        """Take a request's decoding off; an empty row holds exactly nothing, whatever was rounded."""
        count, size = self._cells[counts], self._cells[sizes]
        count[row] -= sequences
        size[row] = size[row] - kv_tokens if count[row] > 0 else 0.0

    def _begin(self, row: int, decision_id: DecisionId, now_s: float) -> None:
        self._running[row] = decision_id
        self._cells["running_s"][row] = self._pending[row][decision_id]
        self._cells["since_s"][row] = now_s

    def _take_off(self, row: int, decision_id: DecisionId, uncached_tokens: float, now_s: float) -> None:
        pending, cells = self._pending[row], self._cells
        cells["pending_s"][row] -= pending.pop(decision_id)
        cells["queue_tokens"][row] -= uncached_tokens
        cells["queue_prompts"][row] -= 1
        if not pending:
            cells["pending_s"][row] = cells["running_s"][row] = cells["queue_tokens"][row] = 0.0
            cells["since_s"][row] = np.inf
            self._running[row] = None
        elif self._running[row] == decision_id:
            self._begin(row, next(iter(pending)), now_s)

    def _share(self, row: int) -> None:
        cells = self._cells
        readers = 1 + cells["fetching"][row]
        cells["fetch_tokens_per_s"][row] = cells["link_tokens_per_s"][row] / readers
        cells["host_tokens_per_s"][row] = cells["host_link_tokens_per_s"][row] / readers

    def _fetched(self, work: _Work) -> None:
        if not work.fetching:
            return
        work.fetching = False
        if work.generations[0] == self._generation[work.prefillers[0]]:
            self._cells["fetching"][work.prefillers[0]] -= 1
            self._share(work.prefillers[0])

    def _look_ahead(self, work: _Work, now_s: float, join_s: float) -> None:
        """Add the request to the decode load that is expected, joining in `join_s` seconds."""
        if not self._curves:
            return
        work.curve.row = work.decoder
        if not len(work.curve.whole):
            work.curve.whole = _generating(work.assignment, work.mean_kv_tokens)
        self._ahead.add(work.curve, now_s, join_s)


def _generating(assignment: Assignment, mean_kv_tokens: float) -> Floats:
    """(sequences, kv tokens) of a request that will still be generated each bucket of time after it began."""
    request, tokens = assignment.request, LATER_S / max(assignment.choice.tbt_s, 1e-4)
    if assignment.survival is not None:
        share = assignment.survival(tokens)
    else:
        share = np.exp(-tokens / max(1.0, request.output_tokens))
    found = np.empty((len(share), 2))
    np.multiply(share, float(request.sequences), out=found[:, 0])
    np.multiply(share, mean_kv_tokens, out=found[:, 1])
    return found


def _mean_kv_tokens(request: Request) -> float:
    """KV of a request while it generates: half of its answer is there, on the mean."""
    return request.prompt_tokens + 0.5 * request.sequences * request.output_tokens
