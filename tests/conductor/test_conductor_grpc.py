"""The real conductor over real gRPC on loopback, without a pool: life of instances, decisions, bad input, restart."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mooncache import errors
from mooncache.conductor.background import expire
from mooncache.conductor.core.registry import InstanceState
from mooncache.kvcache.keys import passport_from_json
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.clock import Clock
from tests.conditions import until
from tests.conductor.support import BLOCK, DECODE, PASSPORT, PREFILL, Conductor, chain, instance, pair, serve


def test_register_report_schedule_list(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        answer = await c.call("RegisterInstance", pb.RegisterInstanceRequest(instance=instance("p", PREFILL)))
        assert (answer.report_interval_ms, answer.lease_ms, answer.role) == (250, 120_000, PREFILL)
        await c.register(instance("d", DECODE))
        await c.report("p", load=pb.InstanceLoad(waiting=2, kv_usage=0.5))
        listed = await c.call("ListInstances", pb.ListInstancesRequest())
        assert [v.instance.instance_id for v in listed.instances] == ["d", "p"]
        assert listed.instances[1].load.waiting == 2
        assert listed.instances[1].instance.passport_json == PASSPORT
        plan = await c.schedule("r1", chain("a", 100))
        assert plan.admitted, plan
        assert plan.reason == pb.ADMISSION_REASON_ADMITTED
        assert (plan.prefill.instance_id, plan.decode.instance_id) == ("p", "d")
        assert plan.prefill.url == "http://127.0.0.1:1/p"
        assert plan.decode.wait_tokens == 100 * BLOCK
        assert plan.decode.wait_ms > 0
        assert plan.summary.startswith(
            "prefill=p;decode=d;branch=local;local=0;pool=0;computed=1605;ttft_ms="
        )
        assert (await c.record("r1"))["decision_id"] == plan.decision_id

    serve(tmp_path, scenario)


def test_legs_say_which_engines_order_by_priority(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(instance("p", PREFILL), instance("d", DECODE, orders_by_priority=True))
        plan = await c.schedule("r1", chain("a", 100))
        assert (plan.prefill.instance_id, plan.decode.instance_id) == ("p", "d")
        assert (plan.prefill.orders_by_priority, plan.decode.orders_by_priority) == (False, True)
        listed = await c.call("ListInstances", pb.ListInstancesRequest())
        assert [v.instance.orders_by_priority for v in listed.instances] == [True, False]

    serve(tmp_path, scenario)


def test_long_poll_ends_with_a_change_and_not_with_load(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(instance("a"))
        version = (await c.call("ListInstances", pb.ListInstancesRequest())).version
        unchanged = await c.call("ListInstances", pb.ListInstancesRequest(known_version=version, wait_ms=50))
        assert unchanged.version == version
        watch = asyncio.ensure_future(
            c.call("ListInstances", pb.ListInstancesRequest(known_version=version, wait_ms=9000))
        )
        await until(lambda: c.service.state.watchers == 1)
        await c.report("a", load=pb.InstanceLoad(running=1))
        assert c.service.state.core.registry.version == version
        assert not watch.done()
        await c.call("SetInstance", pb.SetInstanceRequest(instance_id="a", drain=True))
        changed = await watch
        assert changed.version > version
        assert changed.instances[0].instance.state == pb.INSTANCE_STATE_DRAINING

    serve(tmp_path, scenario)


class _JumpingClock:
    """A clock that is ahead by a while, as after a stop of the whole process."""

    def __init__(self, clock: Clock, ahead_s: float) -> None:
        self._clock, self._ahead_s = clock, ahead_s

    def now_s(self) -> float:
        return self._clock.now_s() + self._ahead_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)


def test_a_conductor_that_was_stopped_takes_no_instance_for_silent(tmp_path: Path) -> None:
    """It looks before it reads the reports that wait for it; a request that is sent meanwhile is planned."""

    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        state = c.service.state
        state.clock = _JumpingClock(state.clock, 300.0)  # longer than the lease
        await expire.run_once(state)
        assert [one.state for one in state.core.registry] == [InstanceState.READY] * 2
        assert (await c.schedule("r1", chain("a", 4))).admitted

    serve(tmp_path, scenario)


def test_wishes_of_operators_reach_the_worker(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        await c.call("SetInstance", pb.SetInstanceRequest(instance_id="p", role=DECODE, drain=True))
        wish = await c.report("p")
        assert (wish.role, wish.drain) == (DECODE, True)
        await c.call("SetInstance", pb.SetInstanceRequest(instance_id="p", drain=False))
        assert not (await c.report("p")).drain
        with pytest.raises(errors.InstanceUnknown):
            await c.call("SetInstance", pb.SetInstanceRequest(instance_id="x", drain=True))

    serve(tmp_path, scenario)


def test_caches_reports_gaps_and_new_incarnations(tmp_path: Path) -> None:
    keys = chain("a", 64)

    async def scenario(c: Conductor) -> None:
        await c.register(instance("p1", PREFILL), instance("p2", PREFILL), instance("d", DECODE))
        assert (await c.report("p2")).want_full, (
            "nothing was heard of its cache: an earlier conductor may know it"
        )
        wish = await c.report("p2", changes=pb.CacheChanges(stored=keys[: 32 * 48], sequence=1))
        assert not wish.want_full and not (await c.report("p2")).want_full
        plan = await c.schedule("r1", keys)
        assert (plan.prefill.instance_id, plan.local_hit_tokens) == ("p2", 48 * BLOCK)
        wish = await c.report("p2", changes=pb.CacheChanges(removed=keys, sequence=3))
        assert wish.want_full
        wish = await c.report("p2", changes=pb.CacheChanges(stored=keys[: 32 * 8], sequence=4, full=True))
        assert not wish.want_full
        listed = await c.call("ListInstances", pb.ListInstancesRequest())
        assert {v.instance.instance_id: v.cached_blocks for v in listed.instances}["p2"] == 8
        await c.register(instance("p2", PREFILL, incarnation=2))
        listed = await c.call("ListInstances", pb.ListInstancesRequest())
        assert {v.instance.instance_id: v.cached_blocks for v in listed.instances}["p2"] == 0
        with pytest.raises(errors.InstanceUnknown):
            await c.report("p2")

    serve(tmp_path, scenario)


def test_a_second_request_waits_for_blocks_that_are_being_computed(tmp_path: Path) -> None:
    first, second = chain("a", 2000), chain("b", 2020, parent="a", shared=2000)

    async def scenario(c: Conductor) -> None:
        await c.register(instance("p1", PREFILL), instance("p2", PREFILL), instance("d", DECODE))
        one = await c.schedule("r1", first)
        two = await c.schedule("r2", second)
        assert "branch=wait;local=0;pool=32000;computed=325;" in two.summary
        assert two.prefill.wait_tokens == 2000 * BLOCK
        assert two.prefill.wait_ms > two.expected_ttft_ms / 2
        assert two.decode.wait_tokens == 2020 * BLOCK
        record = await c.record("r2")
        assert record["chosen"]["awaited_decision_id"] == one.decision_id
        await c.progress(one.decision_id, pb.REQUEST_PHASE_PREFILL_FAILED)
        three = await c.schedule("r3", chain("c", 2010, parent="a", shared=2000))
        assert "branch=wait" in three.summary, "the second request computes the blocks now"
        for plan in (two, three):
            await c.progress(plan.decision_id, pb.REQUEST_PHASE_ABORTED)
        assert "branch=local" in (await c.schedule("r4", first)).summary

    serve(tmp_path, scenario)


def test_bursts_are_spread(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*[instance(f"p{i}", PREFILL) for i in range(4)], instance("d", DECODE))
        plans = [await c.schedule(f"r{i}", chain(f"k{i}", 500)) for i in range(8)]
        counts = [sum(p.prefill.instance_id == f"p{i}" for p in plans) for i in range(4)]
        assert counts == [2, 2, 2, 2]

    serve(tmp_path, scenario)


def test_a_failed_prefill_goes_elsewhere_and_decode_stays(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        names = [instance(f"{r}{i}", role) for r, role in (("p", PREFILL), ("d", DECODE)) for i in range(3)]
        await c.register(*names)
        keys = chain("a", 500)
        first = await c.schedule("r", keys)
        leg = pb.LegReport(
            role=pb.LEG_ROLE_PREFILL, instance_id=first.prefill.instance_id, code="ENGINE_FAILED"
        )
        await c.progress(first.decision_id, pb.REQUEST_PHASE_PREFILL_FAILED, leg)
        again = await c.schedule("r", keys, attempt=2, exclude=[first.prefill.instance_id])
        assert again.prefill.instance_id != first.prefill.instance_id
        assert again.decode.instance_id == first.decode.instance_id
        assert len(c.service.state.core.work) == 1
        record = await c.record("r")
        assert record["earlier"] == [first.decision_id]
        assert (await c.record(first.decision_id))["state"] == "superseded"
        nobody = await c.schedule("r", keys, attempt=3, exclude=[one.instance_id for one in names])
        assert (nobody.admitted, nobody.reason) == (False, pb.ADMISSION_REASON_NO_INSTANCE)

    serve(tmp_path, scenario)


def test_one_request_id_for_many_requests(tmp_path: Path) -> None:
    """Clients choose the ids: a second request under one is no second attempt, and costs no more than another."""

    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        plans = [await c.schedule("same", chain(f"k{i}", 60), tenant=f"t{i % 2}") for i in range(40)]
        assert len(c.service.state.core.work) == 40
        other = await c.schedule("same", chain("x", 100), tenant="t2", attempt=2)
        assert len(c.service.state.core.work) == 41, "another tenant's attempt ends nothing"
        assert len((await c.record(other.decision_id))["earlier"]) == 16
        assert (await c.record(plans[-1].decision_id))["earlier"] == []
        for plan in plans:
            await c.progress(plan.decision_id, pb.REQUEST_PHASE_ABORTED)
        assert len(c.service.state.core.work) == 1

    serve(tmp_path, scenario)


def test_refusals(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        unknown = await c.schedule("r0", b"", model="other")
        assert (unknown.admitted, unknown.reason) == (False, pb.ADMISSION_REASON_UNKNOWN_MODEL)
        await c.register(
            instance("p", PREFILL, max_model_tokens=1000), instance("d", DECODE, max_model_tokens=1000)
        )
        assert (await c.schedule("r1", b"", prompt_tokens=1000)).reason == pb.ADMISSION_REASON_TOO_LONG
        keys = chain("a", 60)
        slow = [await c.schedule(f"s{i}", keys[: 32 * i], ttft_slo_ms=1) for i in (40, 50, 60)]
        assert {plan.reason for plan in slow} == {pb.ADMISSION_REASON_TTFT}
        assert all(not plan.admitted and plan.retry_after_ms >= 250 for plan in slow)
        assert slow[0].summary.startswith("refused=ttft;")
        assert not slow[0].decode.instance_id
        assert (await c.schedule("r2", keys)).admitted
        await c.report("d", state=pb.INSTANCE_STATE_SUSPECT, reason="hangs")
        await c.report("p", state=pb.INSTANCE_STATE_DRAINING)
        assert (await c.schedule("r3", keys)).reason == pb.ADMISSION_REASON_NO_INSTANCE
        assert (await c.record("r3"))["state"] == "refused"

    serve(tmp_path, scenario)


def test_requests_without_keys_are_served_by_one_instance(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        plan = await c.schedule("r", b"", prompt_tokens=5000)
        assert plan.admitted
        assert not plan.prefill.instance_id
        assert plan.decode.wait_tokens == 0

    serve(tmp_path, scenario)


def test_passports_that_differ_are_not_paired(tmp_path: Path) -> None:
    other = json.dumps({**json.loads(PASSPORT), "weights_digest": "x"})

    async def scenario(c: Conductor) -> None:
        await c.register(instance("p", PREFILL, passport_json=other), instance("d", DECODE))
        plan = await c.schedule("r", chain("a", 500))
        assert plan.admitted
        assert not plan.prefill.instance_id
        await c.register(instance("d2", DECODE, passport_json=other))
        root = passport_from_json(other).root()
        plan = await c.schedule("r2", chain("b", 500), passport_root=root)
        assert (plan.prefill.instance_id, plan.decode.instance_id) == ("p", "d2")

    serve(tmp_path, scenario)
