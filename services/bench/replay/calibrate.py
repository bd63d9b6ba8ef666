"""A model profile of the cluster at hand, from a few measured points: what the simulator needs to know of it.

Prompts that were never sent before, of lengths as in the trace, one at a time, give the prefill; the same prompts made
longer give what a cached prefix saves; a few answers side by side give the step. What a request costs without any model
work (HTTP, tokenising, scheduling) is measured with the shortest prompt: it delays one request and keeps no engine
busy.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeVar

import aiohttp
import numpy as np

from mooncache.bench.replay.client import ReplayTarget, ReplayTiming, complete
from mooncache.bench.replay.workload import ReplayShape
from mooncache.conductor.core.policy.types import DecodeCost
from mooncache.errors import EngineFailed, ProfileInvalid
from mooncache.simulate.profile import ModelProfile, fit_decode, fit_prefill

_Point = tuple[float, float, float]
_Cost = TypeVar("_Cost")
_BATCHES = (1, 2, 4, 8)
_SHORT_TOKENS = 2
_SHORT_REQUESTS = 7
_ROUNDS = 2
_DECODE_TOKENS = 24


@dataclass(slots=True)
class Points:
    """Times that were measured: ttft by (tokens, cached tokens), gaps by (sequences, tokens of KV), ttft of the
    shortest prompt."""

    prefill: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    decode: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    short_s: list[float] = field(default_factory=list)

    @property
    def count(self) -> int:
        """All times."""
        return len(self.short_s) + sum(map(len, (*self.prefill.values(), *self.decode.values())))


@dataclass(frozen=True, slots=True)
class Calibration:
    """The profile, and the time of each request that keeps no engine busy."""

    profile: ModelProfile
    overhead_s: float
    points: int


async def measure(
    endpoint: ReplayTarget,
    shape: ReplayShape,
    lengths: Sequence[int],
    points: Points,
    draws: np.random.Generator,
    progress: Callable[[str], None],
) -> None:
    """Add one round of points. Raises EngineFailed when a request of the calibration fails."""
    async with aiohttp.ClientSession() as session:
        client = _Client(session, endpoint, shape, draws)
        progress("calibrating: warming up")
        middle = int(np.median(lengths))
        for length in (middle, max(lengths) // 2, middle):
            await client.ask(client.fresh(length), 4)
        for _ in range(_SHORT_REQUESTS):
            points.short_s.append((await client.ask(client.fresh(_SHORT_TOKENS), 1)).ttft_s)
        for again in range(_ROUNDS):
            for length in lengths:
                progress(f"calibrating: prompts of {length} tokens, {again + 1} of {_ROUNDS}")
                await _prompts(client, length, shape, points)
            for count in _BATCHES:
                progress(f"calibrating: {count} answers at once, {again + 1} of {_ROUNDS}")
                await _answers(client, middle, count, points)


async def _prompts(client: _Client, length: int, shape: ReplayShape, points: Points) -> None:
    """One prompt that was never sent before, and the same with as much again behind it."""
    prompt = client.fresh(length)
    points.prefill.setdefault((length, 0), []).append((await client.ask(prompt, 1)).ttft_s)
    longer = prompt + client.fresh(length)
    if len(longer) + 1 <= shape.context_tokens:
        found = await client.ask(longer, 1)
        cached = min(found.cached_tokens, length)
        points.prefill.setdefault((len(longer), cached), []).append(found.ttft_s)


async def _answers(client: _Client, length: int, count: int, points: Points) -> None:
    """So many answers side by side; gaps from the middle, when all are decoding and none has ended."""
    tokens = _DECODE_TOKENS * (1 + count // 2)
    answers = await asyncio.gather(*(client.ask(client.fresh(length), tokens) for _ in range(count)))
    gaps_s = [gap for each in answers for gap in each.gaps_s[-_DECODE_TOKENS // 2 - 1 : -1]]
    if gaps_s:
        held = count * (length + tokens * 3 // 4)
        points.decode.setdefault((count, held), []).append(statistics.fmean(gaps_s))


def fit(points: Points, name: str) -> Calibration:
    """The profile behind the points. Raises PROFILE_INVALID when they do not fit any."""
    # All answers were of one length, so what their KV costs is part of what a sequence costs.
    decode = _fitted(
        fit_decode,
        DecodeCost.tbt_s,
        [(count, 0.0, middle_mean(times)) for (count, _), times in points.decode.items()],
    )
    overhead_s = max(0.0, middle_mean(points.short_s) - decode.base_s - decode.per_sequence_s)
    prefill = _fitted(
        fit_prefill,
        lambda cost, tokens, cached: cost.seconds(int(tokens), int(cached)),
        [(*place, max(1e-4, middle_mean(times) - overhead_s)) for place, times in points.prefill.items()],
    )
    profile = ModelProfile(
        name=name,
        prefill=prefill,
        decode=decode,
        kv_bytes_per_token=1.0,
        load_bytes_per_s=1e12,
        chunk_overhead_s=0.0,
    )
    return Calibration(profile.check(), overhead_s, points.count)


def _fitted(
    fit_points: Callable[[list[_Point]], _Cost],
    seconds: Callable[[_Cost, float, float], float],
    points: list[_Point],
) -> _Cost:
    """The fit; where none explains all points, without the fewest that no fit explains, up to a quarter of them.

    A busy machine has such points. Of all ways to leave so many out, the one that is nearest to all points is taken.
    Raises PROFILE_INVALID when even then nothing fits.
    """
    reason = ProfileInvalid("there are no points")
    for dropped in range(len(points) // 4 + 1):
        fits: list[_Cost] = []
        for kept in combinations(points, len(points) - dropped):
            try:
                fits.append(fit_points(list(kept)))
            except ProfileInvalid as error:
                reason = error
        if fits:
            return min(fits, key=lambda cost: sum(abs(seconds(cost, p[0], p[1]) / p[2] - 1) for p in points))
    raise reason


def middle_mean(values: Sequence[float]) -> float:
    """Mean without the highest and lowest fifth: machines hiccup, and a hiccup is not what a prompt costs."""
    cut = len(values) // 5
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


class _Client:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: ReplayTarget,
        shape: ReplayShape,
        draws: np.random.Generator,
    ) -> None:
        self._session, self._endpoint, self._shape, self._draws = session, endpoint, shape, draws

    def fresh(self, count: int) -> list[int]:
        """Tokens that were never sent in this order."""
        drawn: list[int] = self._draws.integers(64, self._shape.vocab, count).tolist()
        return drawn

    async def ask(self, tokens: list[int], output_tokens: int) -> ReplayTiming:
        found = await complete(self._session, self._endpoint, tokens, output_tokens)
        if found.error:
            raise EngineFailed(f"A request of the calibration ({len(tokens)} tokens) failed: {found.error}")
        return found
