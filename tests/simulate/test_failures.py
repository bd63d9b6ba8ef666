"""Failures, joins and role switches: whoever was there is served elsewhere or breaks off, exactly once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.conductor.core.policy.types import Branch, Choice
from mooncache.simulate import InstanceGroup, ScheduledEvent
from mooncache.simulate.cluster import ClusterSpec, RoleSwitching
from mooncache.simulate.sim_request import SimOutcome
from tests.simulate.small import cluster, conversations, run, trace_of
from tests.simulate.test_run import finished

ONE = trace_of([(0.0, 32_768, 100, list(range(64)))])


def events(*rows: tuple[float, str, str] | tuple[float, str, str, str]) -> tuple[ScheduledEvent, ...]:
    return tuple(ScheduledEvent(*row) for row in rows)


def test_a_prompt_on_a_failed_instance_is_computed_elsewhere() -> None:
    calm = run(ONE, cluster(prefill=2))
    name = ("prefill-0", "prefill-1")[calm.prefill_row[0]]
    hit = run(ONE, cluster(prefill=2, events=events((2.0, "fail", name))))
    assert hit.outcome[0] == SimOutcome.DONE
    assert hit.attempts[0] == 2
    assert hit.prefill_row[0] != calm.prefill_row[0]
    assert hit.ttft_s[0] == pytest.approx(calm.ttft_s[0] + 2.0)
    assert hit.totals.retries == 1


def test_without_retries_it_fails() -> None:
    name = ("prefill-0", "prefill-1")[run(ONE, cluster(prefill=2)).prefill_row[0]]
    hit = run(ONE, cluster(prefill=2, events=events((2.0, "fail", name))), retries_max=0)
    assert hit.outcome[0] == SimOutcome.FAILED
    assert hit.reasons[hit.reason[0]] == "instance_failed"


def test_an_answer_that_streams_breaks_off() -> None:
    hit = run(ONE, cluster(decode=1, events=events((6.0, "fail", "decode-0"))))
    assert hit.outcome[0] == SimOutcome.FAILED
    assert hit.reasons[hit.reason[0]] == "broke_off"
    assert np.isfinite(hit.ttft_s[0])
    assert not hit.effective()[0]


def test_with_nobody_left_requests_are_refused() -> None:
    trace = trace_of([(0.0, 512, 5, [0]), (60.0, 512, 5, [0])])
    hit = run(
        trace,
        cluster(decode=1, prefill=1, events=events((30.0, "fail", "decode-0"), (30.0, "fail", "prefill-0"))),
    )
    assert hit.outcome.tolist() == [SimOutcome.DONE, SimOutcome.REJECTED]
    assert hit.reasons[hit.reason[1]] == "no_instance"


def test_a_failed_instance_forgets_its_blocks() -> None:
    trace = trace_of([(0.0, 8192, 1, list(range(16))), (20.0, 8192, 1, list(range(16)))])
    spec = cluster(prefill=2, events=events((10.0, "fail", "prefill-0"), (10.0, "fail", "prefill-1")))
    hit = run(trace, spec)
    assert hit.cached_tokens[1] == 0


def test_an_instance_that_joins_takes_work() -> None:
    trace = conversations(60, 2.0, seed=3)
    result = run(trace, cluster(prefill=1, events=events((5.0, "join", "prefill"))), "least_load")
    assert result.instances.names[-1] == "prefill-1"
    assert result.instances.requests[-1] > 0
    late = result.arrival_s[result.prefill_row == len(result.instances.names) - 1]
    assert late.min() >= 5.0
    assert result.mean_ttft_s() < run(trace, cluster(prefill=1), "least_load").mean_ttft_s()


def test_a_switched_instance_drains_and_works_in_its_new_role() -> None:
    trace = conversations(120, 3.0, seed=3)
    spec = cluster(prefill=3, decode=1, events=events((8.0, "role", "prefill-0", "decode")))
    result = run(trace, spec)
    assert (result.outcome == SimOutcome.DONE).all()
    assert result.totals.role_switches == 1
    assert result.instances.role[0] == "decode"
    switched = 8.0 + spec.roles.switch_s
    assert (result.decode_row == 0).any()
    assert result.arrival_s[result.decode_row == 0].min() >= switched
    assert not (result.prefill_row[result.arrival_s >= 8.0] == 0).any()


def test_a_fetch_that_broke_off_is_not_counted_as_read() -> None:
    """The second request reads 4 blocks from prefill-0, which fails in the middle of that."""
    trace = trace_of([(0.0, 2048, 5, [0, 1, 2, 3]), (10.0, 2560, 5, [0, 1, 2, 3, 4])])
    spec = cluster(prefill=2, decode=1, group_nic_out_gbps=1.0, events=events((10.2, "fail", "prefill-0")))

    class Fetching:
        """Sends the first request to prefill-0 and lets the second one fetch to prefill-1."""

        name = "fetching"

        def choose(self, request: Any, fleet: Any, rules: Any, rng: Any) -> Choice:
            first = request.number == 1
            return Choice(
                admitted=True,
                reason="",
                prefill=0 if first else 1,
                decode=2,
                branch=Branch.LOCAL if first else Branch.FETCH,
                prefix_tokens=0 if first else 2048,
                fetch_tokens=0 if first else 2048,
                source_row=-1 if first else 0,
                compute_s=0.5,
                ttft_s=1.0,
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mooncache.simulate.scheduling.find", lambda _name: Fetching())
        result = run(trace, spec, spread_tick_s=0)
    assert result.outcome.tolist() == [SimOutcome.DONE, SimOutcome.DONE]
    assert result.cached_tokens[1] == 0
    assert result.fetched_tokens[1] == 0
    whole = 2048 * spec.profile.kv_bytes_per_token
    assert 0 < result.totals.bytes_fetched < whole


def test_work_before_a_switch_is_still_work() -> None:
    trace = conversations(120, 3.0, seed=3)
    result = run(trace, cluster(prefill=2, decode=2, events=events((8.0, "role", "decode-0", "prefill"))))
    assert result.instances.role[2] == "prefill"
    worked_s = result.totals.prefill_s + result.totals.decode_s
    assert result.instances.busy_s.sum() == pytest.approx(worked_s)


def test_roles_follow_the_load() -> None:
    """Prompts without answers: the planner makes prefill instances of decode instances, and queues get shorter."""
    trace = conversations(300, 6.0, seed=4).with_outputs(2)
    spec = cluster(prefill=1, decode=4, group_keep_handover=False)
    spec = replace(spec, instances=tuple(replace(group, dram_blocks=300) for group in spec.instances))
    fixed = run(trace, spec)
    moved = run(trace, replace(spec, roles=RoleSwitching(enabled=True, switch_s=2.0, every_s=5.0)))
    assert moved.totals.role_switches > 0
    assert moved.instances.role.count("prefill") > 1
    assert (moved.outcome == SimOutcome.DONE).all()
    assert moved.mean_ttft_s() < 0.7 * fixed.mean_ttft_s()


EVENTS = st.lists(
    st.tuples(
        st.floats(0, 30),
        st.sampled_from(["fail", "fail", "join", "role"]),
        st.integers(0, 4),
        st.sampled_from(["prefill", "decode", "both"]),
    ),
    max_size=5,
)


@settings(max_examples=25, deadline=None)
@given(
    EVENTS, st.integers(0, 1000), st.sampled_from(["mooncache", "algorithm1", "random"]), st.integers(0, 3)
)
def test_nobody_is_lost_whatever_happens(
    rows: list[tuple[float, str, int, str]], seed: int, policy: str, retries: int
) -> None:
    names = ["prefill-0", "prefill-1", "prefill-2", "decode-0", "decode-1"]
    happen: list[tuple[Any, ...]] = []
    for at_s, kind, which, role in rows:
        target = ("prefill", "decode")[which % 2] if kind == "join" else names[which]
        happen.append((at_s, kind, target, role if kind == "role" else ""))
    spec = cluster(dram_blocks=60, events=events(*happen))
    simulation = finished(conversations(40, 2.0, seed), spec, policy=policy, retries_max=retries)
    outcomes = set(np.unique(simulation.world.record.outcome))
    assert outcomes <= {SimOutcome.DONE, SimOutcome.REJECTED, SimOutcome.FAILED}


@pytest.mark.parametrize("inline", ["whole", "chunked"])
def test_coupled_instances_fail_too(inline: str) -> None:
    group = InstanceGroup("both", 3, dram_blocks=100, inline=inline)
    spec = ClusterSpec(instances=(group,), events=events((4.0, "fail", "both-1"), (9.0, "join", "both")))
    simulation = finished(conversations(60, 2.0, seed=8), spec, policy="least_load")
    outcome = simulation.world.record.outcome
    assert (outcome >= 0).all()
    assert (outcome == SimOutcome.DONE).sum() > 40
