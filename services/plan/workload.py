"""The workload of a plan: a trace's busiest stretch, or a trace made from a rate and lengths.

Made traces are fitted: the generator's knobs are turned until mean prompt and share of reused tokens are those asked
for, with the same seed each time, so that the same question always gets the same trace.
"""

from __future__ import annotations

import random
from typing import Final

import numpy as np

from mooncache.errors import PlanInvalid
from mooncache.plan.core import reuse
from mooncache.plan.core.estimate import Demand
from mooncache.plan.core.spec import Workload
from mooncache.traces import BLOCK_TOKENS, GenerateOptions, Trace, generate
from mooncache.traces.generator import SystemPrompt
from mooncache.traces.lengths import Lengths

SEED: Final = 20250225
_ROUNDS: Final = 8
_SPREAD: Final = 1.0  # of the logarithm of lengths: what public traces have
_TICK_S: Final = 3.0
_MADE_MAX: Final = 40_000  # requests; a high rate gets a shorter stretch of time


def busiest(trace: Trace, requests_max: int) -> Trace:
    """The stretch of at most `requests_max` requests that arrive in the shortest time; times count from its begin."""
    if len(trace) < 2:
        raise PlanInvalid(
            f"The trace has {len(trace)} requests; a plan needs at least 2, an hour of them is usual."
        )
    if len(trace) <= requests_max:
        return trace
    took_s = trace.arrival_s[requests_max - 1 :] - trace.arrival_s[: len(trace) - requests_max + 1]
    begin = int(np.argmin(took_s))
    begin_s = float(trace.arrival_s[begin])
    end_s = float(trace.arrival_s[begin + requests_max - 1])
    return trace.window(begin_s, float(np.nextafter(end_s, np.inf)))


def demand_of(trace: Trace) -> Demand:
    """A trace as the statistical model takes it; requests of one clock tick are spread over it."""
    spread = trace.spread(_TICK_S)
    measured = reuse.measure(
        trace.hash_ids.astype(np.int64),
        trace.offsets,
        trace.input_tokens.astype(np.int64),
        trace.block_tokens,
    )
    return Demand(
        arrival_s=spread.arrival_s.astype(np.float64),
        input_tokens=np.maximum(trace.input_tokens.astype(np.float64), 1.0),
        output_tokens=np.maximum(trace.output_tokens.astype(np.float64), 1.0),
        reuse=measured,
    )


def reusable(trace: Trace) -> float:
    """Share of prompt tokens that an unlimited cache would have."""
    measured = demand_of(trace).reuse
    cached = measured.cached_tokens(measured.blocks_max)
    return float(cached.sum() / max(int(trace.input_tokens.sum()), 1))


def made(workload: Workload) -> Trace:
    """A trace of this rate, these mean lengths and this share of reuse, as near as the generator comes."""
    mean, returning = workload.input_tokens_mean, min(1.5, 2.5 * workload.reuse)
    first_mean = mean
    best: tuple[float, Trace] | None = None
    for _ in range(_ROUNDS):
        trace = _generated(workload, first_mean, returning)
        got_mean, got_reuse = float(trace.input_tokens.mean()), reusable(trace)
        distance = abs(got_mean / mean - 1) + abs(got_reuse - workload.reuse)
        if best is None or distance < best[0]:
            best = (distance, trace)
        first_mean = float(np.clip(first_mean * mean / got_mean, 2, 1e6))
        returning = float(np.clip(returning + 1.2 * (workload.reuse - got_reuse), 0.0, 1.5))
    assert best is not None
    trace = best[1]
    span_s = trace.span_s * len(trace) / (len(trace) - 1)
    return trace.speed(workload.rate_per_s * span_s / len(trace))


def _generated(workload: Workload, first_mean: float, returning: float) -> Trace:
    shared = BLOCK_TOKENS if workload.reuse * workload.input_tokens_mean > 2 * BLOCK_TOKENS else 0
    options = GenerateOptions(
        system_prompts=(SystemPrompt(shared),) if shared else (),
        requests=None,
        duration_s=min(workload.duration_s, _MADE_MAX / workload.rate_per_s),
        rate_per_s=workload.rate_per_s,
        tick_s=0.0,
        first_tokens=Lengths.lognormal(first_mean, _SPREAD),
        output_tokens=Lengths.lognormal(workload.output_tokens_mean, _SPREAD),
        returning=returning,
    )
    trace = generate(options, random.Random(SEED))
    if len(trace) < 2:
        raise PlanInvalid(
            f"workload: {workload.rate_per_s:g} requests/s for {workload.duration_s:g} s are {len(trace)} requests; "
            "a plan needs at least 2: make duration_s longer."
        )
    return trace
