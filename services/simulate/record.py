"""Writes the columns and the series of a result while the simulation runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mooncache.conductor.core.policy.fleet import ROLE_NAMES
from mooncache.conductor.core.policy.types import Branch
from mooncache.simulate.result import Instances, Result, Series, Totals
from mooncache.simulate.sim_request import SimBranch, SimOutcome, SimRequest

if TYPE_CHECKING:
    from mooncache.simulate.index import BlockHolders
    from mooncache.simulate.node import SimNode
    from mooncache.simulate.options import SimOptions
    from mooncache.traces import Trace

WATCHED_RANKS = (1, 10, 100, 1_000, 10_000)
_BRANCH = {Branch.LOCAL: SimBranch.LOCAL, Branch.FETCH: SimBranch.FETCH, Branch.WAIT: SimBranch.WAIT}
_SERIES_KINDS = {
    "prefill_load": np.float32,
    "decode_load": np.float32,
    "queue_requests": np.int32,
    "running": np.int32,
    "role": np.int8,
    "used_blocks": np.int32,
}


def watched_blocks(trace: Trace, chosen: tuple[int, ...] | None) -> tuple[list[int], list[int]]:
    """(block ids, their ranks by use) whose copies are counted; ranks that do not exist are left out."""
    if not len(trace.hash_ids):
        return [], []
    ids, counts = np.unique(trace.hash_ids, return_counts=True)
    order = np.lexsort((ids, -counts))
    if chosen is None:
        ranks = [rank for rank in WATCHED_RANKS if rank <= len(ids)]
        return [int(ids[order[rank - 1]]) for rank in ranks], ranks
    rank_of = {int(ids[at]): rank for rank, at in enumerate(order, start=1)}
    return list(chosen), [rank_of.get(block, 0) for block in chosen]


class SimRecord:
    """Columns of the requests and the samples taken so far."""

    def __init__(
        self, trace: Trace, nodes: list[SimNode], options: SimOptions, ttft_slo_s: float, tbt_slo_s: float
    ) -> None:
        count = len(trace)
        self._trace, self._nodes, self._options = trace, nodes, options
        self._block_tokens = trace.block_tokens
        self._ever: set[int] = set()  # blocks of prompts that were computed
        self._ttft_slo_s, self._tbt_slo_s = ttft_slo_s, tbt_slo_s
        self.outcome = np.full(count, SimOutcome.UNDECIDED, dtype=np.int8)
        self.reason = np.zeros(count, dtype=np.int16)
        self._reasons: dict[str, int] = {"": 0}
        self.branch = np.full(count, -1, dtype=np.int8)
        self.attempts = np.zeros(count, dtype=np.int16)
        self._float: dict[str, NDArray[Any]] = {
            name: np.full(count, np.nan)
            for name in (
                "ttft_s",
                "tbt_s",
                "tbt_mean_s",
                "queue_s",
                "prefill_s",
                "fetch_s",
                "end_s",
                "predicted_ttft_s",
                "predicted_tbt_s",
            )
        }
        self._int: dict[str, NDArray[Any]] = {
            name: np.zeros(count, dtype=np.int32) for name in ("cached_tokens", "fetched_tokens")
        }
        self._row: dict[str, NDArray[Any]] = {
            name: np.full(count, -1, dtype=np.int32) for name in ("prefill_row", "decode_row")
        }
        named = {name: getattr(self, name) for name in ("outcome", "reason", "branch", "attempts")}
        # The same memory: one value is read and written much faster so.
        self._cells = {
            name: column.data for name, column in (named | self._float | self._int | self._row).items()
        }
        self.totals = Totals(requests=count, span_s=trace.span_s)
        self.arrived = self.rejected = self.done = 0
        self._at_s: list[float] = []
        self._samples: dict[str, list[NDArray[Any]]] = {name: [] for name in _SERIES_KINDS}
        self._replicas: list[list[int]] = []
        self._counts: list[tuple[int, int, int, int, int]] = []
        self._watched, self._ranks = watched_blocks(trace, options.watched)

    def decided(self, request: SimRequest) -> None:
        """The request was given to instances."""
        choice = request.choice
        assert choice is not None, "a decision has a choice"
        at = request.index
        self._cells["branch"][at] = SimBranch.INLINE if choice.prefill < 0 else _BRANCH[choice.branch]
        self._cells["prefill_row"][at] = request.prefill
        self._cells["decode_row"][at] = request.decode
        self._cells["predicted_ttft_s"][at] = choice.ttft_s
        self._cells["predicted_tbt_s"][at] = choice.tbt_s

    def computed(self, request: SimRequest) -> None:
        """The prompt is computed."""
        at = request.index
        self._cells["queue_s"][at] = request.queue_s
        self._cells["prefill_s"][at] = request.compute_s
        self._cells["fetch_s"][at] = request.fetch_s
        self._cells["cached_tokens"][at] = request.cached_tokens
        self._cells["fetched_tokens"][at] = request.fetched_tokens
        self.totals.prompt_tokens += request.input_tokens
        self.totals.hit_tokens += request.cached_tokens
        self.totals.unlimited_tokens += max(request.cached_tokens, self._unlimited_tokens(request))
        self._ever.update(request.blocks)
        self.totals.computed_tokens += request.input_tokens - request.cached_tokens
        self.totals.prefill_s += request.compute_s * max(1, len(request.members))

    def _unlimited_tokens(self, request: SimRequest) -> int:
        """Leading tokens of the prompt that were computed before."""
        ever, known = self._ever, 0
        for block in request.blocks:
            if block not in ever:
                break
            known += 1
        return min(known * self._block_tokens, request.input_tokens)

    def first_token(self, request: SimRequest) -> None:
        """The first token is there."""
        self._cells["ttft_s"][request.index] = request.ttft_s

    def over(
        self,
        request: SimRequest,
        outcome: SimOutcome,
        now_s: float,
        reason: str = "",
        tbt_s: float = np.nan,
        mean_s: float = np.nan,
    ) -> None:
        """The request ended; each does so exactly once."""
        at = request.index
        assert self._cells["outcome"][at] == SimOutcome.UNDECIDED, f"request {at} ended twice"
        self._cells["outcome"][at] = outcome
        self._cells["reason"][at] = self._reasons.setdefault(reason, len(self._reasons))
        self._cells["attempts"][at] = request.attempt + 1
        self._cells["end_s"][at] = now_s
        self._cells["tbt_s"][at] = tbt_s
        self._cells["tbt_mean_s"][at] = mean_s
        if outcome in (SimOutcome.REJECTED, SimOutcome.REJECTED_AFTER_PREFILL):
            self.rejected += 1
        elif outcome != SimOutcome.FAILED:
            self.done += 1
        if outcome == SimOutcome.REJECTED_AFTER_PREFILL:
            self.totals.wasted_prefill_s += request.compute_s * max(1, len(request.members))

    def sample(self, now_s: float, index: BlockHolders) -> None:
        """Take a sample of every series."""
        rows: dict[str, list[float]] = {name: [] for name in _SERIES_KINDS}
        for node in self._nodes:
            batch = node.batch
            rows["prefill_load"].append(node.queued_s / self._ttft_slo_s)
            rows["decode_load"].append(batch.tbt_now() / self._tbt_slo_s)
            rows["queue_requests"].append(len(node.queue) + len(batch.waiting))
            rows["running"].append(len(batch.running) + (node.computing is not None))
            rows["role"].append(node.role if node.alive else -1)
            rows["used_blocks"].append(len(node.dram) + (len(node.ssd) if node.ssd is not None else 0))
        for name, row in rows.items():
            self._samples[name].append(np.array(row, dtype=_SERIES_KINDS[name]))
        self._at_s.append(now_s)
        self._replicas.append([index.holders(block).bit_count() for block in self._watched])
        totals = self.totals
        self._counts.append((self.arrived, self.rejected, self.done, totals.hit_tokens, totals.prompt_tokens))

    def result(self, cluster: str) -> Result:
        """The whole record."""
        nodes, trace, options = self._nodes, self._trace, self._options
        instances = Instances(
            names=[node.name for node in nodes],
            role=[ROLE_NAMES[node.role] for node in nodes],
            busy_s=np.array([node.busy_s + node.batch.busy_s for node in nodes]),
            requests=np.array([node.prompts + node.answers for node in nodes], dtype=np.int64),
            computed_tokens=np.array([node.computed_tokens for node in nodes], dtype=np.int64),
            sequences_mean=np.array([_mean_sequences(node) for node in nodes]),
        )
        counts = np.array(self._counts, dtype=np.int64).reshape(-1, 5)
        series = Series(
            at_s=np.array(self._at_s),
            **{name: _square(self._samples[name], len(nodes), kind) for name, kind in _SERIES_KINDS.items()},
            replicas=np.array(self._replicas, dtype=np.int32).reshape(len(self._at_s), len(self._watched)),
            arrived=counts[:, 0],
            rejected=counts[:, 1],
            done=counts[:, 2],
            hit_tokens=counts[:, 3],
            prompt_tokens=counts[:, 4],
            watched=self._watched,
            watched_rank=self._ranks,
        )
        return Result(
            policy=options.policy,
            cluster=cluster,
            seed=options.seed,
            ttft_slo_s=self._ttft_slo_s,
            tbt_slo_s=self._tbt_slo_s,
            arrival_s=trace.arrival_s,
            input_tokens=trace.input_tokens,
            output_tokens=trace.output_tokens,
            outcome=self.outcome,
            reason=self.reason,
            reasons=list(self._reasons),
            branch=self.branch,
            attempts=self.attempts,
            **self._float,
            **self._int,
            **self._row,
            instances=instances,
            series=series,
            totals=self.totals,
        )


def _mean_sequences(node: SimNode) -> float:
    """Sequences in the batch, averaged over its steps."""
    return node.batch.tokens / node.batch.step if node.batch.step else 0.0


def _square(rows: list[NDArray[Any]], columns: int, kind: type) -> NDArray[Any]:
    """Samples as an array; instances that joined later were not there before."""
    array: NDArray[Any] = np.zeros((len(rows), columns), dtype=kind)
    for at, row in enumerate(rows):
        array[at, : len(row)] = row
    return array
