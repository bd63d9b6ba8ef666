"""Coupled engines: one prompt alone, two that disturb each other, chunks, prefix cache, gaps by brute force."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.errors import InvalidArgument
from mooncache.simulate.coupled import CoupledOptions, simulate_coupled, tail_gap_s
from mooncache.simulate.profile import LLAMA3_70B_8XA800 as PROFILE
from mooncache.traces import BLOCK_TOKENS, Trace, generate
from mooncache.traces.generator import conversation

A, B, C, _D = PROFILE.prefill
ONE = CoupledOptions(instances=1)


def trace_of(*requests: tuple[float, int, int], shared: bool = False) -> Trace:
    """Requests of (arrival, input, output); with `shared` every prompt begins with the blocks of the longest."""
    chains, fresh = [], 0
    for _, tokens, _ in requests:
        blocks = math.ceil(tokens / BLOCK_TOKENS)
        begin = 0 if shared else fresh
        chains.append(list(range(begin, begin + blocks)))
        fresh += blocks
    return Trace(
        arrival_s=np.array([at for at, _, _ in requests], float),
        input_tokens=np.array([tokens for _, tokens, _ in requests], np.int32),
        output_tokens=np.array([output for _, _, output in requests], np.int32),
        offsets=np.cumsum([0, *(len(chain) for chain in chains)]).astype(np.int64),
        hash_ids=np.array([block for chain in chains for block in chain], np.int64),
    )


def prompt_s(tokens: int, held: int = 0) -> float:
    return A + B * (tokens - held) + C * (tokens**2 - held**2)


def step_s(*kv_tokens: int) -> float:
    return PROFILE.decode.tbt_s(len(kv_tokens), sum(kv_tokens))


def test_one_request_alone() -> None:
    result = simulate_coupled(trace_of((5.0, 4096, 101)), PROFILE, ONE)
    assert result.ttft_s[0] == pytest.approx(prompt_s(4096))
    assert result.gpu_s[0] == pytest.approx(prompt_s(4096))
    # 100 gaps, the longest ten are the last ones; the growth of 100 tokens is far below the tolerance.
    assert result.tbt_s[0] == pytest.approx(step_s(4146), rel=1e-3)


def test_a_prompt_stops_everybody_who_decodes_but_not_itself() -> None:
    first, second = (0.0, 1024, 200), (1.0, 16_384, 200)
    result = simulate_coupled(trace_of(first, second), PROFILE, ONE)
    longest = prompt_s(16_384) + step_s(1100, 16_384)
    others = 19 * step_s(1200, 16_484)  # 199 gaps: the longest twenty
    assert result.tbt_s[0] == pytest.approx((longest + others) / 20, rel=0.01)
    assert result.tbt_s[1] == pytest.approx(step_s(1200, 16_500), rel=0.02)


def test_time_that_prompts_took_passes_once() -> None:
    requests = trace_of((0.0, 1024, 3), (0.1, 16_384, 1), (0.2, 1024, 1), (2.5, 512, 1))
    result = simulate_coupled(requests, PROFILE, ONE)
    together = prompt_s(1024) + prompt_s(16_384) + prompt_s(1024)
    assert result.ttft_s[2] == pytest.approx(together - 0.2)
    # The last comes while the first decodes its two tokens: it waits for one step at most.
    end_s = together + 2 * step_s(1024)
    assert result.ttft_s[3] <= max(0.0, end_s - 2.5) + prompt_s(512) + 1e-9
    assert result.ttft_s[3] >= prompt_s(512)


def test_chunks_shorten_the_gap_and_cost_time() -> None:
    requests = trace_of(
        (0.0, 1024, 40), (0.5, 16_384, 40)
    )  # 39 gaps: the longest four count, chunks are eight
    whole = simulate_coupled(requests, PROFILE, ONE)
    chunked = simulate_coupled(requests, PROFILE, CoupledOptions(instances=1, chunk_tokens=2048))
    assert chunked.tbt_s[0] < whole.tbt_s[0]
    assert chunked.ttft_s[1] > whole.ttft_s[1]
    assert chunked.gpu_s[1] == pytest.approx(prompt_s(16_384) + 7 * A, rel=0.02)


def test_prefix_cache_saves_what_was_computed_before() -> None:
    requests = trace_of((0.0, 8192, 10), (30.0, 8192, 10), shared=True)
    result = simulate_coupled(requests, PROFILE, CoupledOptions(instances=1, prefix_cache=True))
    assert result.cached_tokens.tolist() == [0, 8191]
    assert result.gpu_s[1] == pytest.approx(prompt_s(8192, 8191))
    without = simulate_coupled(requests, PROFILE, ONE)
    assert without.cached_tokens.tolist() == [0, 0]


def test_one_at_a_time_keeps_gaps_short_and_lets_others_wait() -> None:
    requests = trace_of((0.0, 16_384, 100), (0.1, 16_384, 100))
    result = simulate_coupled(requests, PROFILE, CoupledOptions(instances=1, sequences_max=1))
    assert result.tbt_s.max() < 1.1 * step_s(16_500)
    assert result.ttft_s[1] > prompt_s(16_384) * 2 + 99 * step_s(16_384) - 0.2


def test_a_request_that_fits_nowhere_is_told() -> None:
    with pytest.raises(InvalidArgument, match="request 0 needs 2100 tokens of KV"):
        simulate_coupled(trace_of((0.0, 2000, 100)), PROFILE, CoupledOptions(kv_capacity_tokens=2048))


@pytest.mark.parametrize(
    "options",
    [
        CoupledOptions(instances=4),
        CoupledOptions(instances=4, chunk_tokens=2048),
        CoupledOptions(instances=4, prefix_cache=True),
        CoupledOptions(instances=2, kv_capacity_tokens=140_000, chunk_tokens=512),
    ],
)
def test_everybody_is_served_once_and_the_same_way_each_time(options: CoupledOptions) -> None:
    trace = generate(conversation(requests=150), random.Random(7)).spread()
    result = simulate_coupled(trace, PROFILE, options)
    assert np.isfinite(result.ttft_s).all()
    assert (result.ttft_s > 0).all()
    more = trace.output_tokens > 1
    assert (result.tbt_s[more] >= PROFILE.decode.base_s).all()
    again = simulate_coupled(trace, PROFILE, options)
    assert (again.ttft_s == result.ttft_s).all()
    assert (again.tbt_s == result.tbt_s).all()
    if not options.prefix_cache and not options.chunk_tokens:
        # Work conservation: the computing time of a prompt is that of its length, whoever ran it and when.
        tokens = trace.input_tokens.astype(float)
        assert result.gpu_s == pytest.approx(A + B * tokens + C * tokens**2)


@settings(max_examples=60, deadline=None)
@given(
    segments=st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([0.03, 0.05, 0.4, 2.0])), min_size=1, max_size=12
    ),
    data=st.data(),
)
def test_tail_gap_equals_sorting_all_gaps(segments: list[tuple[int, float]], data: st.DataObject) -> None:
    gaps = [gap for steps, gap in segments for _ in range(steps)]
    ends = np.cumsum([steps for steps, _ in segments]).tolist()
    first = data.draw(st.integers(0, len(gaps) - 1))
    last = data.draw(st.integers(first + 1, len(gaps)))
    wanted = max(1, math.ceil((last - first) * 0.1))
    expected = sum(sorted(gaps[first:last], reverse=True)[:wanted]) / wanted
    assert tail_gap_s([gap for _, gap in segments], ends, first, last) == pytest.approx(expected)
