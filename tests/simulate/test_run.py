"""Whole runs: nothing is lost or served twice, equal seeds give equal runs, and known cases come out as by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.conductor.core.policy import NAMES
from mooncache.conductor.core.policy.types import AdmissionMode, Request, Rules
from mooncache.errors import SimulationInvalid
from mooncache.simulate import ClusterSpec, InstanceGroup, SimOptions, simulate
from mooncache.simulate import run as run_module
from mooncache.simulate.cluster import Replication
from mooncache.simulate.profile import LLAMA3_70B_8XA800 as PROFILE
from mooncache.simulate.sim_request import SimOutcome
from tests.simulate.small import OPEN, cluster, columns, conversations, run, trace_of


def finished(trace: Any, spec: ClusterSpec, **options: Any) -> run_module.Simulation:
    """Run with everything checked after every event; return the simulation at its end."""
    simulation = run_module.Simulation(trace, spec.check(), SimOptions(**{"rules": OPEN, **options}))
    world, index = simulation.world, simulation.world.index
    push = world.push
    steps = 0

    def checked(at_s: float, handler: Any, *arguments: Any) -> None:
        nonlocal steps
        assert at_s >= world.now_s, "nothing happens in the past"
        steps += 1
        if steps % 20 == 0:
            world.network.check()
            for node in world.nodes:
                assert node.batch.reserved_tokens <= node.batch.capacity_tokens
                assert len(node.batch.running) <= node.batch.sequences_max
                assert len(node.dram) <= node.group.dram_blocks
        push(at_s, handler, *arguments)

    world.push = checked  # type: ignore[method-assign]
    simulation.run(None)
    assert not world.requests, "a request is left"
    assert not world.queue
    assert not world.inflight, "what is computed is not in flight"
    for node in world.nodes:
        assert node.idle
        assert not any(world.network._flows[link] for link in (node.ssd_read, node.nic_out, node.nic_in))
        held = sum(1 for mask in index._holders.values() if mask >> node.row & 1)
        below = 0 if node.ssd is None else len(node.ssd)
        both = sum(1 for block in index._holders if below and block in node.dram and block in node.ssd)
        assert held == len(node.dram) + below - both, "the index is the truth"
    world.book.check()
    view = world.book.view(world.now_s)
    assert not view.queue_prompts.any()
    assert not view.sequences.round(6).any()
    return simulation


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 40),
    st.floats(0.2, 8.0),
    st.integers(0, 10_000),
    st.sampled_from(NAMES),
    st.sampled_from(["global", "local"]),
    st.sampled_from(AdmissionMode),
    st.sampled_from(["prefill", "decode"]),
    st.sampled_from([0, 40, 400]),
)
def test_every_request_ends_once(
    count: int,
    rate: float,
    seed: int,
    policy: str,
    pool: str,
    admission: AdmissionMode,
    first: str,
    dram_blocks: int,
) -> None:
    trace = conversations(count, rate, seed)
    spec = cluster(dram_blocks=dram_blocks, pool=pool, first_token=first, group_ssd_blocks=dram_blocks // 2)
    rules = Rules(admission=admission)
    simulation = finished(trace, spec, policy=policy, rules=rules, ttft_slo_s=5.0, tbt_slo_s=0.03)
    record = simulation.world.record
    assert set(np.unique(record.outcome)) <= {
        SimOutcome.DONE,
        SimOutcome.REJECTED,
        SimOutcome.REJECTED_AFTER_PREFILL,
    }
    if admission is AdmissionMode.NONE:
        assert (record.outcome == SimOutcome.DONE).all()
        served = record.totals
        assert served.output_tokens == trace.output_tokens.sum()
        assert served.prompt_tokens == trace.input_tokens.sum()
        assert served.hit_tokens + served.computed_tokens == served.prompt_tokens
    assert np.isfinite(record._float["ttft_s"][record.outcome == SimOutcome.DONE]).all()
    assert record.arrived == count == record.rejected + record.done


@pytest.mark.parametrize("policy", NAMES)
def test_equal_seeds_equal_runs(policy: str) -> None:
    trace = conversations(60, 3.0, seed=5)
    one = run(trace, cluster(), policy, noise=0.2, seed=7)
    other = run(trace, cluster(), policy, noise=0.2, seed=7)
    for name, column in columns(one).items():
        assert np.array_equal(column, columns(other)[name], equal_nan=column.dtype.kind == "f"), name
    another = run(trace, cluster(), policy, noise=0.2, seed=8)
    assert not np.array_equal(one.prefill_s, another.prefill_s)


def test_one_request_alone_costs_what_the_model_says() -> None:
    trace = trace_of([(0.0, 8192, 11, list(range(16)))])
    result = run(trace, cluster())
    compute_s = PROFILE.prefill.seconds(8192, 0)
    assert result.ttft_s[0] == pytest.approx(compute_s)
    load_s = 8192 * PROFILE.kv_bytes_per_token / PROFILE.load_bytes_per_s
    steps = [PROFILE.decode.tbt_s(1, 8192 + step) for step in range(10)]
    assert result.end_s[0] == pytest.approx(compute_s + load_s + sum(steps))
    assert result.tbt_s[0] == pytest.approx(load_s + steps[0])
    assert result.tbt_mean_s[0] == pytest.approx((load_s + sum(steps)) / 10)


def test_first_token_of_decode_comes_after_the_hand_over() -> None:
    trace = trace_of([(0.0, 8192, 11, list(range(16)))])
    result = run(trace, cluster(first_token="decode"))
    load_s = 8192 * PROFILE.kv_bytes_per_token / PROFILE.load_bytes_per_s
    first_s = PROFILE.decode.tbt_s(1, 8192)
    assert result.ttft_s[0] == pytest.approx(PROFILE.prefill.seconds(8192, 0) + load_s + first_s)
    assert result.tbt_s[0] == pytest.approx(PROFILE.decode.tbt_s(1, 8192 + 10))


def test_a_slow_link_makes_the_hand_over_late() -> None:
    trace = trace_of([(0.0, 8192, 2, list(range(16)))])
    fast, slow = run(trace, cluster()), run(trace, cluster(group_nic_in_gbps=10.0))
    assert fast.ttft_s[0] == slow.ttft_s[0]
    size = 8192 * PROFILE.kv_bytes_per_token
    stream_s = size / (10e9 / 8 * 0.87)
    load_s = size / PROFILE.load_bytes_per_s
    assert slow.end_s[0] == pytest.approx(stream_s + load_s + PROFILE.decode.tbt_s(1, 8192), rel=1e-6)


def test_the_second_turn_uses_the_first_ones_blocks() -> None:
    chain = list(range(32))
    trace = trace_of([(0.0, 8192, 1, chain[:16]), (10.0, 16384, 1, chain)])
    local = run(trace, cluster(prefill=1), "local")
    assert local.cached_tokens.tolist() == [0, 8192]
    assert local.prefill_s[1] == pytest.approx(PROFILE.prefill.seconds(16384, 8192))
    assert run(trace, cluster(prefill=1, dram_blocks=0)).cached_tokens.tolist() == [0, 0]


def test_a_prefix_is_fetched_from_another_instance_unless_the_pool_is_local() -> None:
    rows = [(0.0, 16384, 1, list(range(32))), (9.0, 32768, 1, list(range(100, 164)))]
    rows += [(9.1, 16896, 1, [*range(32), 900])]
    for pool, branch in (("global", 1), ("local", 0)):
        result = run(trace_of(rows), cluster(prefill=2, pool=pool), spread_tick_s=0)
        first, busy, last = result.prefill_row.tolist()
        if pool == "global" and last != first:
            assert result.branch[2] == branch
            assert result.fetched_tokens[2] == 16384
        assert result.cached_tokens[2] in (0, 16384)
        assert busy >= 0


def test_blocks_in_flight_are_waited_for_not_computed_twice() -> None:
    chain = list(range(200))
    trace = trace_of([(0.0, 200 * 512, 1, chain), (0.5, 200 * 512 + 100, 1, [*chain, 500])])
    result = run(trace, cluster(prefill=2), "mooncache", spread_tick_s=0)
    assert result.cached_tokens[1] == 200 * 512
    assert result.totals.computed_tokens == 200 * 512 + 100


@pytest.mark.parametrize("inline", ["whole", "chunked"])
def test_coupled_instances_stall_their_batch(inline: str) -> None:
    group = InstanceGroup("both", 1, dram_blocks=0, inline=inline)
    spec = ClusterSpec(instances=(group,))
    trace = trace_of([(0.0, 1024, 200, [0, 1]), (2.0, 32768, 5, list(range(10, 74)))])
    result = run(trace, spec, spread_tick_s=0)
    assert (result.outcome == SimOutcome.DONE).all()
    prompt_s = PROFILE.prefill.seconds(32768, 0)
    if inline == "whole":
        assert result.tbt_s[0] > prompt_s / 20  # one gap as long as the prompt, among the twenty longest
    else:
        assert result.tbt_s[0] < 0.2
        assert result.prefill_s[1] == pytest.approx(prompt_s + 64 * PROFILE.chunk_overhead_s)


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_prompt_that_stops_the_batch_is_counted_once(first: str) -> None:
    group = InstanceGroup("both", 1, dram_blocks=0)
    trace = trace_of([(0.0, 8192, 200, list(range(16))), (5.0, 8192, 100, list(range(20, 36)))])
    result = run(trace, ClusterSpec(instances=(group,), first_token=first), spread_tick_s=0)
    step_s = PROFILE.decode.tbt_s(2, 2 * 8192 + 300)
    assert result.ttft_s[1] < PROFILE.prefill.seconds(8192, 0) + 2 * step_s, (
        "not its own prompt a second time"
    )
    assert result.tbt_s[1] < 1.05 * step_s, "its gaps do not contain its own prompt"
    assert result.instances.busy_s[0] <= result.end_s.max() - result.arrival_s[0] + 1e-6


def test_coupled_instances_lose_nobody() -> None:
    for inline in ("whole", "chunked"):
        group = InstanceGroup("both", 3, dram_blocks=200, inline=inline, kv_capacity_tokens=40_000)
        finished(conversations(60, 2.0, seed=3), ClusterSpec(instances=(group,)), policy="least_load")


def test_first_come_first_served_is_the_queue_of_theory() -> None:
    """M/D/1: the mean wait at utilisation u is u s / (2 (1 - u)), for equal prompts of s seconds."""
    rng = np.random.default_rng(3)
    tokens, load = 4096, 0.6
    seconds = PROFILE.prefill.seconds(tokens, 0)
    arrivals = np.cumsum(rng.exponential(seconds / load, 3_000))
    trace = trace_of([(float(at), tokens, 1, [8 * n + k for k in range(8)]) for n, at in enumerate(arrivals)])
    result = run(trace, cluster(prefill=1, decode=1, dram_blocks=0), "least_load", spread_tick_s=0)
    assert result.prefill_s == pytest.approx(np.full(len(trace), seconds))
    waits = [0.0]  # Lindley's recursion, exact for one server
    for gap in np.diff(arrivals):
        waits.append(max(0.0, waits[-1] + seconds - float(gap)))
    assert result.queue_s == pytest.approx(np.array(waits), abs=1e-6)
    assert result.queue_s.mean() == pytest.approx(load * seconds / (2 * (1 - load)), rel=0.25)
    assert result.instances.busy_s.sum() == pytest.approx(seconds * len(trace))
    order = np.argsort(result.arrival_s + result.ttft_s, kind="stable")
    assert np.array_equal(order, np.arange(len(trace)))


def test_an_instance_is_never_idle_while_prompts_wait() -> None:
    trace = conversations(150, 6.0, seed=11)
    result = run(trace, cluster(prefill=2, pool="local"), "least_load")
    ends = result.arrival_s + result.ttft_s
    for row in (0, 1):
        mine = np.flatnonzero(result.prefill_row == row)
        begins = ends[mine] - result.prefill_s[mine]
        order = np.argsort(begins)
        for earlier, later in pairwise(order):
            idle_s = begins[later] - ends[mine][earlier]
            assert idle_s >= -1e-9, "one prompt at a time"
            if idle_s > 1e-9:
                waiting = (result.arrival_s[mine] < ends[mine][earlier] - 1e-9) & (
                    begins > ends[mine][earlier]
                )
                assert not waiting.any(), "it stood still with somebody waiting"


@pytest.mark.parametrize("policy", ["local", "algorithm1", "mooncache"])
@pytest.mark.parametrize(
    "changes",
    [{"dram_blocks": (30, 3000)}, {"prefill": (2, 6)}, {"group_nic_in_gbps": (20.0, 800.0)}],
    ids=["memory", "instances", "bandwidth"],
)
def test_more_never_hurts_beyond_noise(policy: str, changes: dict[str, tuple[Any, Any]]) -> None:
    means = []
    for which in (0, 1):
        spec = cluster(**{key: pair[which] for key, pair in changes.items()})
        runs = [run(conversations(120, 3.0, seed), spec, policy) for seed in (1, 2)]
        means.append(np.mean([result.mean_ttft_s() for result in runs]))
    assert means[1] <= means[0] * 1.02


def test_a_tiny_decode_memory_holds_requests_back() -> None:
    trace = conversations(40, 5.0, seed=2)
    wide, narrow = run(trace, cluster()), run(trace, cluster(group_kv_capacity_tokens=30_000))
    assert (narrow.outcome == SimOutcome.DONE).all()
    assert narrow.end_s.max() > wide.end_s.max()


def test_answers_that_fit_nowhere_fail_in_words() -> None:
    trace = trace_of([(0.0, 2048, 50, [0, 1, 2, 3])])
    result = run(trace, cluster(group_kv_capacity_tokens=1000))
    assert result.failed == 1
    assert result.reasons[result.reason[0]] in ("too_large", "capacity", "too_long")


def test_rejected_after_prefill_is_wasted_work() -> None:
    trace = conversations(120, 30.0, seed=4)
    rules = Rules(admission=AdmissionMode.BASELINE)
    result = run(trace, cluster(prefill=6, decode=1), rules=rules, tbt_slo_s=0.0275)
    wasted = result.outcome == SimOutcome.REJECTED_AFTER_PREFILL
    assert wasted.any()
    assert result.totals.wasted_prefill_s == pytest.approx(result.prefill_s[wasted].sum())
    assert result.rejected + result.count(SimOutcome.DONE) == len(trace)
    assert not result.effective()[wasted].any()


def test_pipelines_share_a_long_prompt() -> None:
    trace = trace_of([(0.0, 100_352, 1, list(range(196)))])
    alone = run(trace, cluster(prefill=4), "mooncache")
    together = run(trace, cluster(prefill=4, group_pipeline_size=4), "mooncache")
    assert together.ttft_s[0] < alone.ttft_s[0] / 2.5
    assert together.instances.busy_s[:4] == pytest.approx(np.full(4, together.prefill_s[0]))
    assert together.prefill_gpu_s() == pytest.approx(4 * together.prefill_s[0])


def test_pipelines_never_block_each_other() -> None:
    trace = conversations(60, 2.0, seed=9, blocks_max=200)
    finished(trace, cluster(prefill=4, group_pipeline_size=2), policy="mooncache")


def test_hot_prefixes_are_copied_ahead_of_demand() -> None:
    trace = conversations(200, 10.0, seed=6)
    spec = cluster(prefill=6, replication=Replication(enabled=True, every_s=2.0), group_nic_out_gbps=3.0)
    result = run(trace, spec, "mooncache")
    assert result.totals.copies > 0
    assert result.totals.bytes_replicated > 0
    assert (result.outcome == SimOutcome.DONE).all()
    finished(trace, spec, policy="mooncache")


@pytest.mark.parametrize("inline", ["whole", "chunked"])
def test_who_waits_for_a_prompt_inside_the_batch_does_not_begin_it_twice(inline: str) -> None:
    """The end of one prompt wakes those that wait for it, while the next one stops the batch already."""
    spec = ClusterSpec(instances=(InstanceGroup("both", 2, dram_blocks=300, inline=inline),))
    assert (run(conversations(60, 4.0, seed=1), spec, "mooncache").outcome == SimOutcome.DONE).all()


def test_a_copy_that_may_go_leaves_the_last_one_of_each_block() -> None:
    made = run_module.Simulation(conversations(5, 1.0, seed=6), cluster(prefill=2), SimOptions())
    index, (here, there) = made.world.index, made.world.nodes[:2]
    here.store([1, 2, 3], 0.0, index)
    there.store([1, 2], 0.0, index)
    made.duties._drop([1, 2, 3], here)
    assert index.holders(1) == index.holders(2) == index.bit(there.row)
    assert index.holders(3) == index.bit(here.row)
    assert here.dram.held([1, 2, 3]) == [3]


def test_tenants_have_their_own_lengths_and_shares() -> None:
    trace = conversations(80, 4.0, seed=6)
    tenants = np.arange(80, dtype=np.int32) % 3
    seen: dict[int, list[float]] = {0: [], 1: [], 2: []}
    outputs = np.where(tenants == 0, 20, 150).astype(np.int32)
    trace = replace(trace, tenant=tenants, output_tokens=outputs)
    shares = []

    def look(at: int, request: Request, *_rest: object) -> None:
        seen[at % 3].append(request.output_tokens)
        shares.append(request.tenant_share)

    simulate(trace, cluster(), SimOptions(policy="mooncache", rules=OPEN, on_decision=look))
    assert seen[0][-1] < 80 < seen[1][-1]
    assert max(shares) > 1.0


def test_series_and_progress() -> None:
    trace = conversations(50, 2.0, seed=1)
    seen: list[tuple[int, int, float]] = []
    options = SimOptions(policy="algorithm1", rules=OPEN, sample_s=2.0)
    result = simulate(trace, cluster(), options, lambda *now: seen.append(now))
    series = result.series
    assert seen[-1][:2] == (50, 50)
    assert series.prefill_load.shape == (len(series.at_s), 5) == series.decode_load.shape
    assert (np.diff(series.at_s) > 0).all()
    assert series.done[-1] == 50
    assert series.replicas.shape[1] == len(series.watched)
    assert series.replicas[-1, 0] == 3  # everybody has block 0


def test_decisions_are_told() -> None:
    reported: list[int] = []
    options = SimOptions(policy="mooncache", rules=OPEN, on_decision=lambda at, *_rest: reported.append(at))
    simulate(conversations(20, 2.0, seed=1), cluster(), options)
    assert reported == list(range(20))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "nobody"}, "policy"),
        ({"noise": float("nan")}, "noise is nan"),
        ({"sample_s": 0.0}, "sample_s is 0"),
        ({"output_tokens": "guess"}, "output_tokens"),
        ({"ttft_slo_s": -1.0}, "ttft_slo_s"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SimulationInvalid, match=words):
        simulate(conversations(3, 1.0, 1), cluster(), SimOptions(**options))


@pytest.mark.parametrize(
    ("promise", "words"),
    [
        ({"ttft_slo_s": 0.05}, r"ttft promise is 0\.05 s, but .* 0\.06671 s .* 0\.01671 s too short"),
        ({"tbt_slo_s": 0.02}, r"tbt promise is 0\.02 s, but .* 0\.02651 s .* 0\.00651 s too short"),
    ],
)
def test_promises_that_nothing_keeps(promise: dict[str, float], words: str) -> None:
    with pytest.raises(SimulationInvalid, match=words):
        run(conversations(3, 1.0, 1), cluster(), **promise)


def test_blocks_of_another_size_are_refused() -> None:
    trace = replace(conversations(3, 1.0, 1), block_tokens=256)
    with pytest.raises(SimulationInvalid, match="256 tokens"):
        simulate(trace, cluster())


def test_an_empty_trace() -> None:
    result = run(trace_of([]), cluster())
    assert len(result) == 0
    assert result.attainment() == 0.0
    assert result.count(SimOutcome.FAILED) == 0


def test_a_full_batch_holds_newcomers_back_and_keeps_the_promise() -> None:
    trace = conversations(150, 30.0, seed=4)
    few = cluster(prefill=6, decode=1, first_token="decode")
    held = run(
        trace, few, "mooncache", rules=Rules(admission=AdmissionMode.LEARNED, holds=True), tbt_slo_s=0.0275
    )
    free = run(
        trace, few, "mooncache", rules=Rules(admission=AdmissionMode.LEARNED, holds=False), tbt_slo_s=0.0275
    )
    served = held.outcome == SimOutcome.DONE
    assert held.count(SimOutcome.REJECTED_AFTER_PREFILL) == 0, "no prompt is computed in vain"
    assert np.nanmean(held.tbt_s[served] <= 0.0275) > 0.95
    assert held.attainment() >= free.attainment()


def test_places_are_given_in_the_order_of_decisions() -> None:
    """A long prompt's KV comes after that of a short one, which was decided later: the long one is before it."""
    first = (0.0, 4096, 400, list(range(8)))
    rows = [first, (0.1, 65_536, 10, list(range(1000, 1128))), (0.2, 4096, 10, list(range(2000, 2008)))]
    result = run(trace_of(rows), cluster(prefill=3, group_sequences_max=1), "mooncache", sample_s=1.0)
    assert (result.outcome == SimOutcome.DONE).all()
    assert result.end_s[1] < result.end_s[2]


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_in_overload_the_whole_promise_is_used_and_kept(seed: int, first: str) -> None:
    trace = conversations(900, 12.0, seed=seed, blocks_max=60)
    spec = cluster(prefill=2, decode=3, dram_blocks=4000, first_token=first)
    mooncache = run(trace, spec, "mooncache", rules=Rules(), ttft_slo_s=8.0)
    assert mooncache.rejected > len(trace) / 5, "more is asked for than there is"
    assert 0.9 * 8.0 <= mooncache.quantile("ttft_s", 0.99) <= 1.1 * 8.0
    for policy, gate in (("mooncache", "early"), ("algorithm1", "early"), ("algorithm1", "predicted")):
        other = run(trace, spec, policy, rules=Rules(admission=AdmissionMode(gate)), ttft_slo_s=8.0)
        assert mooncache.attainment() >= other.attainment(), (policy, gate)
