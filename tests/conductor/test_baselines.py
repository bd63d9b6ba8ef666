"""The policies for comparison: each follows its published rule; all modes of admission; pipelines against a loop."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.conductor.core.policy import NAMES, find, overload, pipeline
from mooncache.conductor.core.policy.types import (
    NO_ROW,
    AdmissionMode,
    PrefillCost,
    PrefixSource,
    Rules,
    TransferCost,
)
from tests.conductor.fleets import COST, OPEN, Row, choose, fleet, names, request

D = Row("d", role="decode")
COSTS = PrefillCost(0.0666, 1.1003e-4, 7.386e-10, 2.618e-6)


def test_there_is_one_policy_of_each_name() -> None:
    assert {find(name).name for name in NAMES} == set(NAMES)
    with pytest.raises(ValueError, match="there is no policy 'x'; there are mooncache, algorithm1"):
        find("x")


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_serves_and_says_no_when_nobody_is_there(name: str) -> None:
    rows = (Row("p0", queue_s=1.0), Row("p1"), D)
    choice = choose(rows, policy=name, number=1, affinity=(7, 8, 9))
    assert choice.admitted
    assert names(choice, rows)[1] == "d"
    assert choose(tuple(row.but(ready=False) for row in rows), policy=name).reason == "no_instance"
    assert choose((Row("p"),), policy=name).prefill == NO_ROW, "one instance does both"


def test_algorithm_1_fetches_beyond_its_threshold_only() -> None:
    rows = (Row("p", local_tokens=2048, transfer=TransferCost(0.0, 1e6)), D)
    best = (PrefixSource(NO_ROW, 4096),)
    far = choose(rows, 8192, policy="algorithm1", sources=best, rules=replace(OPEN, threshold=1.9))
    assert (far.branch, far.prefix_tokens, far.fetch_tokens) == ("fetch", 4096, 2048)
    near = choose(rows, 8192, policy="algorithm1", sources=best, rules=replace(OPEN, threshold=2.0))
    assert (near.branch, near.prefix_tokens) == ("local", 2048)
    assert choose(rows, 8192, policy="local", sources=best).branch == "local"
    # A prefix of nothing is infinitely exceeded by any other one.
    assert choose((Row("p"), D), 8192, policy="algorithm1", sources=best).branch == "fetch"


def test_algorithm_1_adds_up_what_it_could_overlap() -> None:
    rows = (Row("p", queue_s=2.0, transfer=TransferCost(0.5, 4096.0)), D)
    choice = choose(rows, 8192, policy="algorithm1", sources=(PrefixSource(NO_ROW, 4096),))
    expected_s = 0.5 + 1.0 + 2.0 + COST.seconds(8192, 4096)
    assert choice.ttft_s - choice.handover_s == pytest.approx(expected_s)


def test_algorithm_1_counts_what_is_being_computed_on_the_same_instance() -> None:
    rows = (Row("a", queue_s=0.2), Row("b"), D)
    asked = {"awaited": ((8000, 0.2, "a"),)}
    assert names(choose(rows, 8192, policy="algorithm1", **asked), rows)[0] == "a"
    assert names(choose(rows, 8192, policy="algorithm1"), rows)[0] == "b"


def test_round_robin_goes_round() -> None:
    rows = (Row("a"), Row("gone", ready=False), Row("b"), D)
    found = [names(choose(rows, policy="round_robin", number=number), rows)[0] for number in range(4)]
    assert found == ["a", "b", "a", "b"]


def test_load_and_prefix_baselines() -> None:
    rows = (Row("cached", queue_s=9.0, local_tokens=4000), Row("idle"), D)
    assert names(choose(rows, policy="least_load"), rows)[0] == "idle"
    assert names(choose(rows, policy="longest_prefix"), rows)[0] == "cached"
    assert {names(choose(rows, policy="random", seed=seed), rows)[0] for seed in range(20)} == {
        "cached",
        "idle",
    }


def test_dynamo_and_lmetric_weigh_tokens_to_compute() -> None:
    rows = (Row("cached", queue_tokens=3000, queue_prompts=1, local_tokens=4000), Row("idle"), D)
    assert names(choose(rows, policy="dynamo"), rows)[0] == "cached", "3,096 tokens against 4,096"
    assert names(choose(rows, policy="lmetric"), rows)[0] == "idle", "3,096 x 2 against 4,096 x 1"


def test_dualmap_stays_with_two_until_both_are_late() -> None:
    rows = (*(Row(f"p{i}") for i in range(8)), D)
    asked = {"affinity": (1, 99), "policy": "dualmap"}
    found = {names(choose(rows, seed=seed, **asked), rows)[0] for seed in range(20)}  # type: ignore[arg-type]
    assert len(found) == 1, "the same prefix goes to the same instance"
    (near,) = found
    late = tuple(row.but(queue_s=100.0) if row.name == near else row for row in rows)
    (other,) = {names(choose(late, seed=seed, **asked), late)[0] for seed in range(20)}  # type: ignore[arg-type]
    assert other != near
    both = tuple(row.but(queue_s=100.0) if row.name in (near, other) else row for row in rows)
    assert names(choose(both, **asked), both)[0] not in (near, other)  # type: ignore[arg-type]


# --- admission ----------------------------------------------------------------------------------------------------


def reason(
    mode: AdmissionMode, *rows: Row, policy: str = "algorithm1", n: int = 4096, **fields: object
) -> str:
    return choose(
        rows, n, rules=Rules(admission=mode, inline_tokens_max=512), policy=policy, tbt_slo_s=0.1, **fields
    ).reason


def test_modes_of_admission_look_at_what_they_say() -> None:
    late = (Row("p", queue_s=40.0), D)
    assert [reason(mode, *late) for mode in AdmissionMode] == ["admitted", *["ttft"] * 5]
    full = (Row("p"), D.but(sequences=200.0, stay_s=1e9))
    assert [reason(mode, *full) for mode in AdmissionMode] == [
        "admitted",
        "tbt",
        "admitted",  # baseline looks at the decode side when the prompt is computed
        "tbt",
        "tbt",
        "tbt",
    ]
    # Those who decode now will have left when this prompt is computed.
    soon = (Row("p", queue_s=20.0), D.but(sequences=200.0, stay_s=2.0))
    assert reason(AdmissionMode.EARLY, *soon) == "tbt"
    assert reason(AdmissionMode.PREDICTED, *soon) == "admitted"
    assert reason(AdmissionMode.LEARNED, *soon, policy="mooncache") == "admitted"
    with pytest.raises(ValueError, match="'x' is not a valid AdmissionMode"):
        AdmissionMode("x")


def test_the_newcomer_counts_in_the_load_that_it_is_judged_by() -> None:
    """A cluster that the double check keeps full to the brim is full at arrival too."""
    cost = D.decode
    brim = int((0.1 - cost.base_s) / cost.per_sequence_s) if cost.per_sequence_s else 100
    rows = (Row("p"), D.but(sequences=float(brim), stay_s=1e9))
    seen = fleet(*rows)
    asked = request(rows, 4096, tbt_slo_s=float(seen.tbt_s(seen.sequences, seen.kv_tokens)[1]))
    assert overload.decode_load(seen, seen.batch_sequences, seen.batch_kv_tokens, asked) > 1


def test_who_uses_more_than_a_share_is_refused_first() -> None:
    late = (Row("p", queue_s=20.0), D)
    assert reason(AdmissionMode.LEARNED, *late, policy="mooncache") == "admitted"
    assert reason(AdmissionMode.LEARNED, *late, policy="mooncache", tenant_share=3.0) == "ttft"


def test_refusals_say_when_to_come_back() -> None:
    rows = (Row("p", queue_s=35.0), D)
    few = Rules(inline_tokens_max=512)
    choice = choose(rows, rules=few, ttft_slo_s=30.0)
    assert choice.reason == "ttft"
    assert choice.retry_after_s == pytest.approx(choice.ttft_s - 30.0), "then the queue is short enough"
    far = choose((Row("p", queue_s=900.0), D), rules=few)
    assert far.retry_after_s == Rules().retry_after_max_s


def test_what_waiting_cannot_mend_is_no_reason_unless_asked_for() -> None:
    rows = (Row("p"), D)
    assert choose(rows, 4096, rules=Rules(), ttft_slo_s=0.01, tbt_slo_s=0.001).admitted
    assert choose(rows, 4096, rules=Rules(), ttft_slo_s=0.01, ttft_strict=True).reason == "ttft"
    assert choose(rows, 4096, rules=Rules(), tbt_slo_s=0.001, tbt_strict=True).reason == "tbt"


@given(st.floats(0, 100), st.floats(0, 300), st.integers(-10, 10), st.integers(-10, 10))
def test_the_more_important_request_is_never_refused_alone(
    queue_s: float, sequences: float, one: int, other: int
) -> None:
    rows = (Row("p", queue_s=queue_s), D.but(sequences=sequences))
    less, more = (
        choose(rows, rules=Rules(), tbt_slo_s=0.1, priority=level) for level in sorted((one, other))
    )
    assert more.admitted or not less.admitted


# --- pipelines ----------------------------------------------------------------------------------------------------


def chunk_seconds(n: int, p: int, chunk_tokens: int) -> np.ndarray:
    """The time that each chunk would take on one instance; the first brings the cached prefix into place."""
    p = max(0, min(p, n - 1))
    ends = np.minimum(np.arange(p + chunk_tokens, n + chunk_tokens, chunk_tokens, dtype=np.float64), n)
    begins = np.concatenate(([float(p)], ends[:-1]))
    times: np.ndarray = COSTS.b * (ends - begins) + COSTS.c * (ends * ends - begins * begins)
    times[0] += COSTS.a + COSTS.d * p
    return times


@given(st.integers(1, 200_000), st.floats(0, 1), st.integers(2, 8), st.sampled_from(pipeline.CHUNKS_TOKENS))
def test_the_closed_form_is_what_chunks_and_stages_give(
    n: int, cached: float, stages: int, chunk: int
) -> None:
    p = int(n * cached)
    times = chunk_seconds(n, p, chunk) / stages + pipeline.CHUNK_OVERHEAD_S
    ends = np.zeros(stages)
    for time_s in times:
        for stage in range(stages):
            ends[stage] = max(ends[stage], ends[stage - 1] if stage else 0.0) + time_s
    assert pipeline.seconds(COSTS, n, p, stages, chunk) == pytest.approx(float(ends[-1]), rel=1e-9)


def test_pipelines_of_the_published_model() -> None:
    """Within a tenth of what the papers' coefficients give without overhead: 27.2, 14.2 and 7.4 s."""
    long = 128 * 1024
    assert pipeline.best(COSTS, long, 0, 1).seconds == pytest.approx(27.2, rel=0.1)
    assert pipeline.best(COSTS, long, 0, 2).seconds == pytest.approx(14.2, rel=0.1)
    best = pipeline.best(COSTS, long, 0, 4)
    assert best.seconds == pytest.approx(7.4, rel=0.1)
    assert best.seconds < COSTS.seconds(long, 0) / 3
    assert random.Random(1).random() < 1
