"""The generator makes what the papers describe, and nothing that breaks the format."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.errors import InvalidArgument
from mooncache.traces import GenerateOptions, generate, read, write
from mooncache.traces.generator import SystemPrompt, conversation, single_turn, tool_agent
from mooncache.traces.lengths import Lengths
from mooncache.traces.stats import stats


def test_conversations_have_the_published_statistics() -> None:
    figures = stats(generate(conversation(), random.Random(1)))
    assert figures.requests == 12_031
    assert figures.rate_per_s == pytest.approx(3.4, rel=0.05)
    assert figures.blocks_mean == pytest.approx(24.0, rel=0.06)
    assert figures.hit_ratio_blocks == pytest.approx(0.366, abs=0.025)
    assert figures.used_once_share == pytest.approx(0.758, abs=0.025)
    assert figures.first_blocks == 1
    published = {"p50": 6_909, "p90": 27_367, "p99": 85_400}
    assert {name: figures.input_quantiles[name] for name in published} == pytest.approx(published, rel=0.15)
    answers = {"p50": 350, "p90": 597, "p99": 1_119}
    assert {name: figures.output_quantiles[name] for name in answers} == pytest.approx(answers, rel=0.05)
    gaps = {"p50": 135, "p90": 531, "p99": 1_710}
    assert {name: figures.reuse_gap_s[name] for name in gaps} == pytest.approx(gaps, rel=0.3)


def test_tools_share_few_long_system_prompts() -> None:
    figures = stats(generate(tool_agent(requests=8_000), random.Random(2)))
    assert 3 <= figures.first_blocks <= 4
    assert 0.48 < figures.hit_ratio_blocks < 0.62
    assert figures.output_quantiles["p50"] == pytest.approx(30, abs=3)


def test_single_turns_are_a_poisson_process_that_shares_only_the_system_prompt() -> None:
    trace = generate(single_turn(requests=4_000, rate_per_s=10.0), random.Random(3))
    gaps_s = np.diff(trace.arrival_s)
    assert gaps_s.mean() == pytest.approx(0.1, rel=0.06)
    assert gaps_s.std() == pytest.approx(gaps_s.mean(), rel=0.08)
    counts = np.bincount(trace.hash_ids)
    assert counts[0] == 4_000
    assert counts[1:].max() == 1


def test_more_returning_is_more_reuse() -> None:
    ratios = [
        stats(generate(conversation(requests=3_000, returning=share), random.Random(4))).hit_ratio_blocks
        for share in (0.0, 0.6, 1.2)
    ]
    assert ratios[0] < 0.1 < ratios[1] < ratios[2]


def test_equal_seeds_give_equal_traces_and_others_others() -> None:
    one, two, other = (generate(conversation(requests=300), random.Random(seed)) for seed in (5, 5, 6))
    assert np.array_equal(one.hash_ids, two.hash_ids)
    assert np.array_equal(one.arrival_s, two.arrival_s)
    assert not np.array_equal(one.input_tokens, other.input_tokens)


lengths = st.tuples(st.integers(1, 5_000), st.floats(0, 2)).map(lambda pair: Lengths.lognormal(*pair))
options = st.builds(
    GenerateOptions,
    requests=st.integers(1, 120),
    duration_s=st.none() | st.floats(1, 1_000),
    rate_per_s=st.floats(0.05, 50),
    tick_s=st.sampled_from([0.0, 0.5, 3.0]),
    block_tokens=st.sampled_from([1, 16, 512]),
    context_tokens=st.integers(700, 9_000),
    system_prompts=st.lists(st.builds(SystemPrompt, st.integers(1, 699), st.floats(0.1, 5)), max_size=3).map(
        tuple
    ),
    first_tokens=lengths,
    message_tokens=lengths,
    output_tokens=lengths,
    returning=st.floats(0, 1.5),
    tenants=st.integers(0, 4),
)


@settings(max_examples=60, deadline=None)
@given(options=options, seed=st.integers(0, 1 << 32))
def test_whatever_the_options_the_trace_is_valid(
    options: GenerateOptions, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    trace = generate(options, random.Random(seed))
    assert len(trace) <= (options.requests or 0)
    if not len(trace):
        return
    assert trace.input_tokens.max() <= options.context_tokens
    path: Path = tmp_path_factory.mktemp("made") / "trace.jsonl"
    write(trace, path)
    again = read(path, block_tokens=options.block_tokens, time_unit="ms")
    assert np.array_equal(again.hash_ids, trace.hash_ids)
    assert np.array_equal(again.arrival_s, trace.arrival_s)
    # Ids in order of first use, as in the public format.
    _, first = np.unique(trace.hash_ids, return_index=True)
    assert np.array_equal(first, np.sort(first))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"requests": None}, "duration_s"),
        ({"rate_per_s": 0.0}, "rate_per_s"),
        ({"rate_per_s": float("nan")}, "rate_per_s"),
        ({"context_tokens": 100}, "context_tokens"),
        ({"returning": -1.0}, "returning"),
        ({"block_tokens": 0}, "block_tokens"),
    ],
)
def test_impossible_options_are_refused_by_name(changes: dict[str, object], word: str) -> None:
    with pytest.raises(InvalidArgument, match=word):
        conversation(**changes)


def test_lengths_keep_their_quantiles_and_refuse_nonsense() -> None:
    sample = Lengths(((0.0, 10), (0.5, 100), (1.0, 1_000))).sample(20_000, np.random.default_rng(1))
    assert np.median(sample) == pytest.approx(100, rel=0.05)
    assert Lengths.lognormal(1_000, 1.0).mean() == pytest.approx(1_000, rel=0.05)
    for points in ((), ((0.0, 5.0),), ((0.0, 5.0), (0.5, 4.0), (1.0, 9.0)), ((0.1, 1.0), (1.0, 2.0))):
        with pytest.raises(InvalidArgument):
            Lengths(points)
    with pytest.raises(InvalidArgument):
        Lengths.lognormal(float("nan"))


def test_more_requests_than_memory_holds_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="duration_s times rate_per_s"):
        GenerateOptions(requests=None, duration_s=1e12)
