"""Which policy a running conductor follows, and what it tells of itself."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from mooncache.conductor.core.policy import NAMES
from mooncache.config import load
from mooncache.config.serving import PolicyName
from mooncache.errors import ConfigInvalid
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conductor.support import BLOCK, Conductor, chain, instance, pair, serve


def test_the_setting_knows_every_policy() -> None:
    assert get_args(PolicyName) == NAMES


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        load(env={}, overrides={"conductor.policy": "algoritm1"})
    for name in NAMES:
        assert name in refused.value.message


async def _status(c: Conductor) -> pb.GetConductorStatusResponse:
    answer: pb.GetConductorStatusResponse = await c.call("GetConductorStatus", pb.GetConductorStatusRequest())
    return answer


@pytest.mark.parametrize(("policy", "waits"), [("mooncache", True), ("algorithm1", False)])
def test_a_running_conductor_follows_the_policy_that_was_set(
    tmp_path: Path, policy: str, waits: bool
) -> None:
    """Two prompts that begin alike, one right after the other: Algorithm 1 knows no waiting for what is computed."""
    first, second = chain("long", 600), chain("tail", 608, parent="long", shared=600)

    async def scenario(c: Conductor) -> None:
        # A slow network and one engine that is at work: waiting is what pays.
        await c.register(*pair(), instance("p2", pb.INSTANCE_ROLE_PREFILL))
        assert (await _status(c)).policy == policy
        await c.schedule("one", first)
        plan = await c.schedule("two", second)
        assert bool(plan.prefill.wait_ms) == waits
        record = await c.call("GetDecision", pb.GetDecisionRequest(id="two", policy=policy))
        assert '"same":true' in record.record_json.replace(" ", "")

    serve(tmp_path, scenario, **{"conductor.policy": policy})


@pytest.mark.parametrize("policy", NAMES)
def test_every_policy_serves_a_running_conductor(tmp_path: Path, policy: str) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        for number in range(3):
            plan = await c.schedule(f"r{number}", chain(f"own{number}", 8, parent="all", shared=4))
            assert plan.admitted
            assert plan.decode.instance_id == "d"
            await c.progress(plan.decision_id, pb.REQUEST_PHASE_FIRST_TOKEN, elapsed_ms=10.0)
            await c.progress(plan.decision_id, pb.REQUEST_PHASE_FINISHED, elapsed_ms=20.0, output_tokens=4)
        status = await _status(c)
        assert dict(status.decisions) == {"admitted": 3}
        assert status.active_request_count == 0

    serve(tmp_path, scenario, **{"conductor.policy": policy})


def test_the_status_counts_refusals_by_reason_and_roles_as_they_are(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        assert (await c.schedule("ok", chain("a", 2))).admitted
        late = await c.schedule("late", chain("b", 2000), prompt_tokens=2000 * BLOCK, ttft_slo_ms=1)
        unknown = await c.schedule("unknown", b"", model="nobody")
        status = await _status(c)
        assert not late.admitted
        assert status.decisions["admitted"] == 1
        assert status.decisions["ttft"] == 1
        assert unknown.reason == pb.ADMISSION_REASON_UNKNOWN_MODEL
        assert status.decisions["unknown_model"] >= 1
        assert dict(status.roles) == {"prefill": 1, "decode": 1}
        role = pb.SetInstanceRequest(instance_id="d", role=pb.INSTANCE_ROLE_BOTH)
        await c.call("SetInstance", role)
        assert dict((await _status(c)).roles) == {"prefill": 1, "both": 1}
        assert (status.admission, status.rebalance_roles, status.copied_prefix_count) == (True, True, 0)

    serve(tmp_path, scenario)
