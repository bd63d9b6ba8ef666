"""What came out of a run: a column for each property of the requests, series over time, and the sums that matter.

Definitions. A request is *effective* when it was done within both promises (FAST'25, section 5); *goodput* is
effective requests per second of the trace. TBT is the mean of a request's longest tenth of gaps. Hit ratio is in
tokens: prompt tokens that were not computed over all prompt tokens of admitted requests.
Prefill load is expected queueing over the TTFT promise, decode load the step time over the TBT promise (arXiv
2407.00079, section 7).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mooncache.simulate.sim_request import SimOutcome

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Instances:
    """One element per instance, in the order of the cluster; instances that joined later are at the end."""

    names: list[str]
    role: list[str]
    busy_s: Floats
    requests: NDArray[np.int64]
    computed_tokens: NDArray[np.int64]
    sequences_mean: Floats


@dataclass(slots=True)
class Series:
    """Samples every `sample_s`: one row per sample; columns are instances or watched blocks."""

    at_s: Floats
    prefill_load: NDArray[np.float32]
    decode_load: NDArray[np.float32]
    queue_requests: NDArray[np.int32]
    running: NDArray[np.int32]
    role: NDArray[np.int8]
    used_blocks: NDArray[np.int32]
    replicas: NDArray[np.int32]
    arrived: NDArray[np.int64]  # requests so far
    rejected: NDArray[np.int64]  # requests so far
    done: NDArray[np.int64]  # requests so far
    hit_tokens: NDArray[np.int64]  # so far, of admitted requests
    prompt_tokens: NDArray[np.int64]  # so far, of admitted requests
    watched: list[int] = field(default_factory=list)
    watched_rank: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Totals:
    """Sums of the run. *_s are seconds of instances."""

    requests: int = 0
    span_s: float = 0.0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    unlimited_tokens: int = 0  # hits if every block that was computed before were still there
    computed_tokens: int = 0
    output_tokens: int = 0
    bytes_fetched: float = 0.0
    bytes_handed_over: float = 0.0
    bytes_ssd: float = 0.0
    bytes_replicated: float = 0.0
    prefill_s: float = 0.0  # of prompts, also of those that were computed inside decode batches
    wasted_prefill_s: float = 0.0  # of prompts that the decode instance refused afterwards
    decode_s: float = 0.0  # of batches, with the prompts that were computed inside them
    retries: int = 0
    decisions: int = 0
    events: int = 0
    role_switches: int = 0
    copies: int = 0
    wall_s: float = 0.0  # what the run took here (not deterministic)

    @property
    def hit_ratio(self) -> float:
        """Share of the prompt tokens of admitted requests that were not computed."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def hits_of_unlimited(self) -> float:
        """Hits over those of a pool without limit; 1 when there is nothing to hit."""
        return self.hit_tokens / self.unlimited_tokens if self.unlimited_tokens else 1.0


@dataclass(slots=True)
class Result:
    """The outcome of a simulation. Row i is request i of the trace; times of requests that never got there are NaN.

    All times are of the last attempt, except `ttft_s`. Rows of instances are -1 for none.
    """

    policy: str
    cluster: str
    seed: int
    ttft_slo_s: float
    tbt_slo_s: float
    arrival_s: Floats
    input_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    outcome: NDArray[np.int8]  # a SimOutcome
    reason: NDArray[np.int16]  # number of `reasons`
    reasons: list[str]
    branch: NDArray[np.int8]  # a SimBranch
    ttft_s: Floats  # counts from the arrival
    tbt_s: Floats
    tbt_mean_s: Floats
    queue_s: Floats  # from the decision until the prompt was being computed, so fetching is part of it
    prefill_s: Floats  # computing the prompt, however many instances do so together
    fetch_s: Floats  # from the decision until the prefix was there
    end_s: Floats
    cached_tokens: NDArray[np.int32]
    fetched_tokens: NDArray[np.int32]
    prefill_row: NDArray[np.int32]
    decode_row: NDArray[np.int32]
    attempts: NDArray[np.int16]
    predicted_ttft_s: Floats
    predicted_tbt_s: Floats
    instances: Instances
    series: Series
    totals: Totals

    def __len__(self) -> int:
        return len(self.arrival_s)

    def count(self, outcome: SimOutcome) -> int:
        """The number of requests with this outcome."""
        return int(np.count_nonzero(self.outcome == outcome))

    @property
    def done(self) -> NDArray[np.bool_]:
        """Which requests were served to their end."""
        kept: NDArray[np.bool_] = self.outcome == SimOutcome.DONE
        return kept

    @property
    def rejected(self) -> int:
        """Requests that were refused, at arrival or after their prefill."""
        return self.count(SimOutcome.REJECTED) + self.count(SimOutcome.REJECTED_AFTER_PREFILL)

    @property
    def failed(self) -> int:
        """Requests that broke off or found no instance."""
        return self.count(SimOutcome.FAILED)

    def effective(self, ttft_slo_s: float | None = None, tbt_slo_s: float | None = None) -> NDArray[np.bool_]:
        """The requests served within both SLOs, as a mask (None: the SLOs of the run)."""
        ttft = self.ttft_slo_s if ttft_slo_s is None else ttft_slo_s
        tbt = self.tbt_slo_s if tbt_slo_s is None else tbt_slo_s
        with np.errstate(invalid="ignore"):
            kept: NDArray[np.bool_] = self.done & (self.ttft_s <= ttft) & (self.tbt_s <= tbt)
        return kept

    def attainment(self, ttft_slo_s: float | None = None, tbt_slo_s: float | None = None) -> float:
        """The share of all requests that were effective (the effective request capacity)."""
        return float(self.effective(ttft_slo_s, tbt_slo_s).mean()) if len(self) else 0.0

    def goodput_per_s(self, ttft_slo_s: float | None = None, tbt_slo_s: float | None = None) -> float:
        """Effective requests per second of the trace."""
        count = int(self.effective(ttft_slo_s, tbt_slo_s).sum())
        return count / self.totals.span_s if self.totals.span_s > 0 else float(count)

    def mean_ttft_s(self) -> float:
        """The mean time to the first token of the requests that got one; NaN when none did."""
        got = self.ttft_s[~np.isnan(self.ttft_s)]
        return float(got.mean()) if len(got) else float("nan")

    def quantile(self, column: str, share: float) -> float:
        """A quantile (0..1) of a float column over the requests that have it; NaN when none has."""
        values = getattr(self, column)
        got = values[~np.isnan(values)]
        return float(np.quantile(got, share)) if len(got) else float("nan")

    def prefill_gpu_s(self) -> float:
        """The seconds of instances for a prompt that was computed (FAST'25, Fig. 8): all members of a
        pipeline count, and so does what was computed again. NaN when none was.
        """
        prompts = int(np.count_nonzero(~np.isnan(self.prefill_s)))
        return self.totals.prefill_s / prompts if prompts else float("nan")
