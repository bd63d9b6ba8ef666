"""The queue in front of prefill and the batch of decoding: against plain simulations, and monotone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.conductor.core.policy import pipeline
from mooncache.conductor.core.policy.types import PrefillCost
from mooncache.plan import loading
from mooncache.plan.core import machine
from mooncache.plan.core.decode import steps
from mooncache.plan.core.machine import InstanceType
from mooncache.plan.core.prefill import PoolCosts, fetches_s, waits_s
from tests.plan.builders import demand, floats, node, spec

customers = st.lists(
    st.tuples(st.floats(0, 5), st.floats(0.01, 8)), min_size=1, max_size=30
)  # (pause before the arrival, service)


def engine(**changes: float) -> InstanceType:
    measured = loading.measured(spec())["A800"]
    made = machine.engine(measured, node(**changes), 8, 0.9)
    assert made is not None
    return made


def columns(rows: list[tuple[float, float]]) -> tuple[machine.Floats, machine.Floats]:
    return np.cumsum([pause for pause, _ in rows]), floats([service for _, service in rows])


@given(customers, st.integers(1, 4))
def test_waits_are_those_of_servers_that_take_the_next_customer(
    rows: list[tuple[float, float]], servers: int
) -> None:
    arrival, service = columns(rows)
    free = [0.0] * servers
    expected = []
    for at, takes in zip(arrival, service, strict=True):
        first = min(range(servers), key=lambda number: free[number])
        start = max(at, free[first])
        expected.append(start - at)
        free[first] = start + takes
    assert waits_s(arrival, service, servers) == pytest.approx(expected, abs=1e-9)


@given(customers, st.integers(1, 4), st.floats(1, 3), st.floats(1, 3))
def test_nobody_waits_longer_with_more_servers_shorter_work_or_less_load(
    rows: list[tuple[float, float]], servers: int, slower: float, calmer: float
) -> None:
    arrival, service = columns(rows)
    waits = waits_s(arrival, service, servers) + 1e-9
    assert (waits_s(arrival, service, servers + 1) <= waits).all()
    assert (waits_s(arrival, service / slower, servers) <= waits).all()
    assert (waits_s(arrival * calmer, service, servers) <= waits).all()


@given(st.integers(1, 6), st.floats(0.3, 4), st.integers(1, 5))
def test_steps_are_monotone(instances: int, rate_per_s: float, seed: int) -> None:
    load = demand(40, rate_per_s, seed)
    tokens = (load.input_tokens, load.output_tokens)
    tbt = steps(engine(), instances, load.arrival_s, *tokens).tbt_s + 1e-9
    assert (steps(engine(), instances + 1, load.arrival_s, *tokens).tbt_s <= tbt).all()
    assert (steps(engine(), instances, load.arrival_s * 1.5, *tokens).tbt_s <= tbt).all()
    assert (steps(engine(gpu_memory_gb_per_s=4000), instances, load.arrival_s, *tokens).tbt_s <= tbt).all()


def test_one_sequence_alone_has_the_step_of_an_empty_batch() -> None:
    alone = steps(engine(), 1, floats([0.0]), floats([1000.0]), floats([10.0]))
    made = engine()
    assert alone.tbt_s[0] == pytest.approx(made.step_s(floats([1.0]), floats([1005.0]))[0])
    assert alone.fits.all()


def test_kv_that_does_not_fit_is_told() -> None:
    tokens = floats([400_000.0] * 4)
    together = steps(engine(), 1, floats([0.0, 0.1, 0.2, 0.3]), tokens, floats([500.0] * 4))
    assert not together.fits.any()
    assert together.kv_load_max > 1


@given(st.integers(2, 120_000), st.floats(0, 0.99), st.sampled_from([2, 4, 8]))
def test_pipelines_take_as_long_as_the_policy_says(tokens: int, share: float, stages: int) -> None:
    made = engine()
    cached = int(tokens * share)
    policy = pipeline.best(PrefillCost(*made.prefill), tokens, cached, stages)
    alone = made.prefill_s(floats([tokens]), floats([cached]))[0]
    got = made.pipelined_s(floats([tokens]), floats([cached]), stages)[0]
    assert got == pytest.approx(min(policy.seconds, alone), rel=1e-6)


@given(st.floats(0, 0.99), st.floats(0, 0.99))
def test_a_busier_network_is_slower(one: float, other: float) -> None:
    network = PoolCosts(327_680, 50e9, 6e9)
    cached, none = floats([0.0, 1000.0]), floats([0.0, 0.0])
    slow, fast = (fetches_s(network, cached, none, load, 0.0) for load in (max(one, other), min(one, other)))
    assert (fast <= slow).all()
    assert fast[0] == 0
    assert np.isinf(fetches_s(network, cached, none, 1.0, 0.0)[1])


def test_measured_hardware_is_used_as_it_is_and_better_hardware_is_faster() -> None:
    measured = loading.measured(spec())["A800"]
    same = engine()
    assert same.measured
    assert same.prefill == measured.prefill_s
    assert same.step_base_s == pytest.approx(measured.step_base_s)
    better = engine(gpu_tflops=624, gpu_memory_gb_per_s=4080, gpu_memory_gb=160)
    assert not better.measured
    assert better.prefill[1] == pytest.approx(same.prefill[1] / 2)
    assert better.step_per_token_s == pytest.approx(same.step_per_token_s / 2)
    assert same.step_base_s / 2 < better.step_base_s < same.step_base_s
    assert better.kv_capacity_tokens > 2 * same.kv_capacity_tokens
