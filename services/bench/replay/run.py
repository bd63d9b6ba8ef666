"""One replay: a workload of the trace, calibration before and after it, what was measured, what was predicted."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mooncache.bench.replay.calibrate import Calibration, Points, fit, measure
from mooncache.bench.replay.client import Planned, ReplayTarget, ReplayTiming, replay
from mooncache.bench.replay.predict import Serving, predict, speed_for
from mooncache.bench.replay.workload import Prompts, ReplayShape, sample_conversations, shrink
from mooncache.errors import EngineFailed, InvalidArgument
from mooncache.reporting.rows import Report, Row, bar_row, describe_machine, describe_versions
from mooncache.simulate.decode import worst_gaps_mean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncache.simulate import Result
    from mooncache.traces import Trace

Progress = Callable[[str], None]
ERROR_MAX_PERCENT = 15.0
_LENGTH_SHARES = (5, 35, 65, 85, 97)
_LATE_S = 0.05
_DISTRIBUTIONS = ("mooncache", "torch", "transformers", "aiohttp", "numpy")


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """`speed` 0 plays the trace as fast as gives `load`, the share of the time that the engines are busy."""

    requests: int = 150
    shape: ReplayShape = field(default_factory=ReplayShape)
    speed: float = 0.0
    load: float = 0.3
    serving: Serving = field(default_factory=Serving)
    seed: int = 1

    def __post_init__(self) -> None:
        if self.requests < 10 or not 0 < self.load < 1 or not 0 <= self.speed < math.inf:
            raise InvalidArgument(
                f"a replay has at least 10 requests (here {self.requests}), a load between 0 and 1 (here {self.load}) "
                f"and no negative speed (here {self.speed})"
            )


def workload(trace: Trace, options: ReplayOptions) -> Trace:
    """The requests that are sent: whole conversations, evenly over the ticks of the trace's clock, made small."""
    rng = random.Random(options.seed)
    return shrink(sample_conversations(trace.spread(rng=rng), options.requests, rng), options.shape)


async def run(small: Trace, endpoint: ReplayTarget, options: ReplayOptions, progress: Progress) -> Report:
    """Replay the workload and report. Raises EngineFailed when requests fail, PROFILE_INVALID for odd points."""
    draws = np.random.default_rng(random.Random(f"calibration/{options.seed}").getrandbits(64))
    lengths = sorted({int(each) for each in np.percentile(small.input_tokens, _LENGTH_SHARES)})
    points = Points()
    await measure(endpoint, options.shape, lengths, points, draws, progress)
    speed = options.speed or speed_for(small, options.serving, fit(points, endpoint.model), options.load)
    played = small.speed(speed)
    prompts = Prompts(played, options.shape, options.seed)
    planned = [
        Planned(float(played.arrival_s[row]), prompts.tokens(row), int(played.output_tokens[row]))
        for row in range(len(played))
    ]
    results = await replay(
        endpoint,
        planned,
        lambda sent, ended: progress(
            f"replaying: {sent} of {len(planned)} sent, {ended} ended, {played.span_s:.0f} s"
        ),
    )
    failed = [each.error for each in results if each.error]
    if len(failed) == len(results):
        raise EngineFailed(f"Every request failed; the first error: {failed[0]}")
    # A second round, because a machine's speed drifts: the profile is that of the time around the replay.
    await measure(endpoint, options.shape, lengths, points, draws, progress)
    calibration = fit(points, endpoint.model)
    progress("simulating")
    expected = await asyncio.to_thread(predict, played, options.serving, calibration, options.seed)
    return _report(played, speed, results, calibration, expected)


def _report(
    played: Trace, speed: float, results: Sequence[ReplayTiming], calibration: Calibration, expected: Result
) -> Report:
    report = Report(
        "replay of a trace, and the simulator's prediction",
        machine=describe_machine(),
        versions=describe_versions(_DISTRIBUTIONS),
    )
    good = np.array([not each.error for each in results])
    kept = [each for each in results if not each.error]
    report.add(Row("requests replayed", float(len(results)), "requests"))
    report.add(bar_row("requests that failed", float((~good).sum()), "requests", at_most=0))
    report.add(Row("rate of requests", len(results) / max(1e-9, played.span_s), "1/s"))
    ttft = np.array([each.ttft_s for each in kept]) * 1e3
    predicted = expected.ttft_s[good] * 1e3
    for name, share in (("mean", None), ("p50", 50), ("p90", 90), ("p99", 99)):
        _pair(report, f"ttft, {name}", _of(ttft, share), _of(predicted, share), "ms")
    gaps = np.array([gap for each in kept for gap in each.gaps_s]) * 1e3
    steps = played.output_tokens[good] - 1
    step_ms = expected.tbt_mean_s[good] * 1e3
    mean_step = float(np.nansum(step_ms * steps) / max(1, steps[np.isfinite(step_ms)].sum()))
    _pair(report, "tbt, mean", float(gaps.mean()) if len(gaps) else 0.0, mean_step, "ms")
    worst = [worst_gaps_mean(np.array(each.gaps_s), 0.0)[0] * 1e3 for each in kept if each.gaps_s]
    worst_expected = expected.tbt_s[good][steps > 0] * 1e3
    _pair(report, "tbt, mean of the worst tenth", _of(np.array(worst), None), _of(worst_expected, None), "ms")
    prompt_tokens = max(1, sum(each.prompt_tokens for each in kept))
    cached = sum(each.cached_tokens for each in kept) / prompt_tokens
    _pair(report, "cached share of prompt tokens", cached, _cached_share(expected, good), "of 1")
    error = abs(_of(predicted, None) / _of(ttft, None) - 1) * 100
    report.add(bar_row("error of the predicted mean ttft", error, "%", at_most=ERROR_MAX_PERCENT))
    prefill, decode = calibration.profile.prefill, calibration.profile.decode
    busy = float(expected.instances.busy_s.mean()) / max(1e-9, played.span_s)
    report.notes += [
        f"played {speed:.1f} times as fast; the simulator has the engines busy for {busy:.0%} of the time",
        (
            f"profile from {calibration.points} points: prefill {prefill.a * 1e3:.1f} ms + {prefill.b * 1e6:.1f} us a "
            f"token + {prefill.c * 1e9:.2f} ns a token squared, step {decode.base_s * 1e3:.1f} ms + "
            f"{decode.per_sequence_s * 1e3:.2f} ms a sequence, {calibration.overhead_s * 1e3:.1f} ms a request beside"
        ),
    ]
    late = sum(each.late_s > _LATE_S for each in results)
    if late:
        report.notes.append(
            f"{late} requests were sent more than {_LATE_S * 1e3:.0f} ms late: the client could not keep up"
        )
    report.notes += [f"failed: {each.error}" for each in results if each.error][:3]
    return report


def _pair(report: Report, name: str, measured: float, predicted: float, unit: str) -> None:
    report.add(Row(f"{name}, measured", measured, unit))
    ratio = predicted / measured if measured and math.isfinite(predicted) else None
    report.add(Row(f"{name}, predicted", predicted, unit, ratio, "measured"))


def _of(values: NDArray[np.float64], share: int | None) -> float:
    kept = values[~np.isnan(values)]
    if not len(kept):
        return math.nan
    return float(kept.mean()) if share is None else float(np.percentile(kept, share))


def _cached_share(expected: Result, good: NDArray[np.bool_]) -> float:
    return float(expected.cached_tokens[good].sum() / max(1, expected.input_tokens[good].sum()))
