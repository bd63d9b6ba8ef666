"""The real conductor over real gRPC: what became of requests, lost words, restart, bad input, metrics."""

from __future__ import annotations

import asyncio
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from mooncache import errors
from mooncache.auth import tenant_token
from mooncache.conductor.core.decisions import PoolAnswer, SchedulingRequest
from mooncache.conductor.core.records import DecisionState
from mooncache.conductor.core.registry import InstanceInfo, InstanceState
from mooncache.conductor.core.scheduler import Scheduler
from mooncache.conductor.state import native_index
from mooncache.kvcache.instance_load import InstanceLoad
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import CONDUCTOR_SERVICE
from tests.conditions import until
from tests.conductor.support import (
    CALM,
    DECODE,
    PASSPORT,
    PREFILL,
    Conductor,
    chain,
    config_at,
    instance,
    pair,
    running,
    scheduler_settings,
    serve,
)

MISS = pb.CacheReport(asked_tokens=1600, outcome=pb.CACHE_OUTCOME_MISS)


def prefill(cache: pb.CacheReport | None, ended_ms: float = 405.0, code: str = "OK") -> pb.LegReport:
    return pb.LegReport(
        role=pb.LEG_ROLE_PREFILL, instance_id="p", sent_ms=5.0, ended_ms=ended_ms, code=code, cache=cache
    )


async def finish(c: Conductor, plan: pb.ScheduleResponse) -> None:
    leg = prefill(MISS)
    await c.progress(plan.decision_id, pb.REQUEST_PHASE_PREFILLED, leg, elapsed_ms=410.0)
    await c.progress(plan.decision_id, pb.REQUEST_PHASE_FIRST_TOKEN, elapsed_ms=450.0)
    found = pb.CacheReport(asked_tokens=1600, hit_tokens=1600, outcome=pb.CACHE_OUTCOME_HIT)
    decode = pb.LegReport(role=pb.LEG_ROLE_DECODE, instance_id="d", sent_ms=5.0, cache=found)
    await c.progress(
        plan.decision_id,
        pb.REQUEST_PHASE_FINISHED,
        leg,
        decode,
        code="OK",
        elapsed_ms=900.0,
        output_tokens=10,
    )


def test_an_engine_of_unknown_speed_is_given_time(tmp_path: Path) -> None:
    """What a slow machine takes for its first prompt says the prior nothing of."""

    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        for number in range(4):
            plan = await c.schedule(f"r{number}", chain(f"k{number}", 100))
            assert plan.prefill.instance_id == "p"
            assert (plan.decode.wait_ms > 30_000) is (number < 3)
            await finish(c, plan)

    serve(tmp_path, scenario)


def test_many_updates_in_one_call(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        plans = [await c.schedule(f"r{i}", chain(f"k{i}", 100)) for i in range(3)]
        end = pb.REQUEST_PHASE_FINISHED
        updates = [pb.ReportProgressRequest(decision_id=plan.decision_id, phase=end) for plan in plans]
        unknown = pb.ReportProgressRequest(decision_id="d-none", phase=end)
        batch = updates[0]
        batch.more.extend([unknown, *updates[1:]])
        with pytest.raises(errors.DecisionUnknown):
            await c.call("ReportProgress", batch)
        assert len(c.service.state.core.work) == 0, "one wrong update does not hold up the others"
        batch.more.extend([unknown] * 1024)
        with pytest.raises(errors.TooLarge):
            await c.call("ReportProgress", batch)

    serve(tmp_path, scenario)


def test_records_tell_what_happened_and_why(tmp_path: Path) -> None:
    keys, content = chain("mine", 100), chain("content", 100)

    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        first = await c.schedule("r1", keys, content_keys=content)
        await finish(c, first)
        record = await c.record("r1")
        assert record["state"] == "finished"
        assert record["misses"] == [
            {"from_token": 0, "to_token": 1600, "reason": "never_seen"},
            {"from_token": 1600, "to_token": 1605, "reason": "no_complete_block"},
        ]
        observed = record["observed"]
        assert (observed["ttft_ms"], observed["total_ms"], observed["output_tokens"]) == (450.0, 900.0, 10)
        assert (observed["computed_tokens"], observed["loaded_tokens"]) == (1605, 0)
        assert [event["phase"] for event in record["events"]] == ["prefilled", "first_token", "finished"]
        assert record["prefill_candidates"][0]["instance_id"] == "p"
        assert record["decode_candidates"][0]["instance_id"] == "d"
        assert record["expected"]["ttft_ms"] > 0
        assert len(c.service.state.core.work) == len(c.service.state.core.in_flight) == 0

        second = await c.schedule("r2", keys, content_keys=content)
        assert (await c.record(second.decision_id))["misses"][0]["reason"] == "pool_unreachable"
        await c.schedule("r3", chain("theirs", 100), content_keys=content)
        assert (await c.record("r3"))["misses"][0]["reason"] == "other_tenant"
        other = json.dumps({**json.loads(PASSPORT), "weights_digest": "x"})
        await c.register(instance("x", model="m2", passport_json=other))
        await c.schedule("r4", chain("else", 100), content_keys=content, model="m2")
        assert (await c.record("r4"))["misses"][0]["reason"] == "other_passport"
        failed = pb.CacheReport(asked_tokens=1600, outcome=pb.CACHE_OUTCOME_TIMEOUT)
        for number in range(20):  # what is overdue is not waited for, and a busy machine makes it so
            await c.schedule(f"before{number}", keys, content_keys=content)
            third = await c.schedule(f"r5-{number}", chain(f"child{number}", 120, parent="mine", shared=100))
            if "branch=wait" in third.summary:
                break
        assert "branch=wait" in third.summary
        await c.progress(third.decision_id, pb.REQUEST_PHASE_PREFILLED, prefill(failed))
        assert (await c.record(third.decision_id))["misses"][0] == {
            "from_token": 0,
            "to_token": 1600,
            "reason": "timed_out",
        }

    serve(tmp_path, scenario)


def test_observations_teach_the_models(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        before = (await c.schedule("r", chain("x", 100))).expected_ttft_ms
        for number in range(20):
            plan = await c.schedule(f"r{number}", chain(f"k{number}", 100))
            await finish(c, plan)
            await c.progress(plan.decision_id, pb.REQUEST_PHASE_PREFILLED, prefill(MISS, 6.0), elapsed_ms=1)
        model = c.service.state.core.models.of("m")
        assert model.prefills["hf"].count == 20, "repeats are not learned from"
        assert before > 0
        assert model.lengths.count == 20
        assert model.lengths.mean("t 0") < 60, "all answers had ten tokens, before them 128 were believed"

    serve(tmp_path, scenario)


def test_a_small_rest_of_two_measurements_is_no_prefill(tmp_path: Path) -> None:
    """An engine that waited as long as was seen of its prefill tells nothing of its speed, not that it takes 0.1 ms."""

    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        for number in range(8):
            plan = await c.schedule(f"r{number}", chain(f"k{number}", 100))
            waited = pb.CacheReport(asked_tokens=1600, waited_ms=60.0, outcome=pb.CACHE_OUTCOME_MISS)
            await c.progress(plan.decision_id, pb.REQUEST_PHASE_PREFILLED, prefill(waited, 50.0))
            await c.progress(plan.decision_id, pb.REQUEST_PHASE_FINISHED, output_tokens=3)
        info = InstanceInfo("p", 1, "prefill", "m", engine="hf")
        learner = c.service.state.core.models.of("m").prefill(info)
        assert learner.cost.seconds(1605, 0) > 0.1
        assert (await c.record("r7"))["expected"]["prefill_ms"] > 100

    serve(tmp_path, scenario)


def test_what_is_not_heard_of_any_more_is_released(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        await c.schedule("r", chain("a", 100))
        core = c.service.state.core
        await until(lambda: len(core.work) == 0)
        assert len(core.in_flight) == 0
        assert (await c.record("r"))["state"] == "expired"

    serve(tmp_path, scenario, **{"conductor.request_timeout_s": 0.3})


def test_a_silent_instance_is_suspect_then_forgotten(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(instance("a"))
        await c.schedule("r", chain("a", 100))
        seen = set()

        async def gone() -> bool:
            listed = await c.call("ListInstances", pb.ListInstancesRequest())
            seen.update(view.instance.state for view in listed.instances)
            return not listed.instances

        await until(gone)
        assert pb.INSTANCE_STATE_SUSPECT in seen
        with pytest.raises(errors.InstanceUnknown):
            await c.report("a")
        await c.register(instance("a"))
        assert (await c.schedule("r2", chain("a", 100))).admitted

    serve(tmp_path, scenario, **{"conductor.suspect_after_s": 0.5, "conductor.lease_s": 1.5})


def test_restart_of_the_conductor(tmp_path: Path) -> None:
    async def life(check_version: int, report: bool) -> int:
        async with running(config_at(tmp_path, **CALM)) as c:
            if report:
                with pytest.raises(errors.InstanceUnknown):
                    await c.report("a")
                with pytest.raises(errors.DecisionUnknown):
                    await c.progress("d-1", pb.REQUEST_PHASE_FINISHED)
            await c.register(instance("a"))
            wish = await c.report("a", changes=pb.CacheChanges(stored=chain("a", 3), sequence=57))
            assert wish.want_full, "what came before was lost with the conductor"
            answer = await c.call(
                "ListInstances", pb.ListInstancesRequest(known_version=check_version, wait_ms=5000)
            )
            return int(answer.version)

    async def scenario() -> None:
        version = await life(0, report=False)
        assert await life(version, report=True) > version

    asyncio.run(scenario())


def test_bad_input_is_refused_by_name(tmp_path: Path) -> None:
    bad_schedules: list[dict[str, Any]] = [
        {"keys": b"x" * 33},
        {"keys": b"", "content_keys": b"x" * 32},
        {"passport_root": b"short"},
        {"prompt_tokens": 1 << 63},
        {"keys": b"x" * 64, "prompt_tokens": 1},
        {"request_id": ""},
        {"request_id": "a\nb"},
        {"model": "m" * 1000},
        {"exclude": ["x"] * 5000},
    ]
    bad_instances: list[dict[str, Any]] = [
        {"instance_id": ""},
        {"role": 0},
        {"state": pb.INSTANCE_STATE_SUSPECT},
        {"passport_json": "{}"},
        {"passport_json": "[" * 4000},
        {"url": "x" * 5000},
        {"block_tokens": 1 << 31},
    ]

    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        for fields in bad_schedules:
            with pytest.raises(errors.InvalidArgument):
                await c.schedule(**{"request_id": "r", "keys": b"", "prompt_tokens": 50, **fields})
        for fields in bad_instances:
            with pytest.raises(errors.InvalidArgument):
                await c.register(instance(**{"name": "z", **fields}))
        for keys in (b"x" * 31, b"x" * 63):
            with pytest.raises(errors.InvalidArgument):
                await c.report("p", changes=pb.CacheChanges(stored=keys, sequence=1))
        with pytest.raises(errors.InvalidArgument):
            await c.progress("d-1", 0)
        with pytest.raises(errors.DecisionUnknown):
            await c.progress("d-1", pb.REQUEST_PHASE_FINISHED)
        with pytest.raises(errors.DecisionUnknown):
            await c.record("nothing")

    serve(tmp_path, scenario)


def test_absurd_numbers_change_nothing(tmp_path: Path) -> None:
    top = (1 << 32) - 1

    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        for odd in (math.nan, math.inf, -math.inf, -1.0, 1e300):
            await c.report("d", load=pb.InstanceLoad(kv_usage=odd, tbt_ms=odd, ttft_ms=odd, running=1))
        await c.report("p", load=pb.InstanceLoad(kv_usage=math.nan, waiting=0))
        plan = await c.schedule(
            "r1",
            chain("a", 100),
            sequence_count=top,
            max_output_tokens=top,
            priority=-(1 << 31),
            tbt_slo_ms=top,
        )
        assert plan.expected_ttft_ms >= 0
        await c.report("d", load=pb.InstanceLoad())
        plan = await c.schedule("r2", chain("a", 100), attempt=top, session="s" * 10_000)
        wild = pb.CacheReport(hit_tokens=top, loaded_bytes=(1 << 64) - 1, load_ms=math.inf, waited_ms=-1)
        for cache in (None, wild, pb.CacheReport(load_ms=math.nan, outcome=77)):
            leg = prefill(cache, ended_ms=-math.inf, code="y" * 10_000)
            await c.progress(plan.decision_id, pb.REQUEST_PHASE_PREFILLED, leg, elapsed_ms=math.nan)
        for legs in ([pb.LegReport()], [prefill(None)] * 1000):
            with pytest.raises(errors.MooncacheError):
                await c.progress(plan.decision_id, pb.REQUEST_PHASE_PREFILLED, *legs)
        decode = pb.LegReport(role=pb.LEG_ROLE_DECODE, cache=wild, usage=pb.TokenUsage(prompt_tokens=top))
        await c.progress(
            plan.decision_id,
            pb.REQUEST_PHASE_FINISHED,
            decode,
            output_tokens=(1 << 64) - 1,
            cached_tokens=(1 << 64) - 1,
            elapsed_ms=-5,
        )
        record = await c.record("r2")
        json.dumps(record, allow_nan=False)
        assert (await c.schedule("r3", chain("b", 100))).decode.instance_id

    serve(tmp_path, scenario)


def test_only_the_cluster_token_may_ask(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        tenant = tenant_token(c.service.token, "team-a")
        channel = GrpcChannel(c.service.grpc_target, CONDUCTOR_SERVICE, token=tenant.text)
        try:
            with pytest.raises(errors.PermissionDenied):
                await channel.call("GetDecision", pb.GetDecisionRequest(id="r"), pb.GetDecisionResponse, 5.0)
            with pytest.raises(errors.PermissionDenied):
                await channel.call("Schedule", pb.ScheduleRequest(), pb.ScheduleResponse, 5.0)
        finally:
            await channel.close()

    serve(tmp_path, scenario)


def test_metrics_are_there(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        await finish(c, await c.schedule("r", chain("a", 100)))
        text = c.service.metrics.render().decode()
        for line in (
            'mooncache_conductor_decisions_total{reason="admitted"} 1.0',
            'mooncache_conductor_branches_total{branch="local"} 1.0',
            'mooncache_conductor_instances{role="prefill",state="ready"} 1.0',
            'mooncache_conductor_observed_tokens_total{source="computed"} 1605.0',
            'mooncache_conductor_pool_lookups_total{state="absent"} 1.0',
            "mooncache_conductor_ttft_observed_over_predicted_count 1.0",
            "mooncache_conductor_requests_active 0.0",
        ):
            assert line in text, line

    serve(tmp_path, scenario)


def test_nobody_waits_for_an_instance_that_is_silent(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(instance("p1", PREFILL), instance("p2", PREFILL), instance("d", DECODE))
        keys = chain("a", 2000)
        first = await c.schedule("r1", keys)
        assert "wait" in (await c.schedule("r2", keys)).summary
        await c.report(first.prefill.instance_id, state=pb.INSTANCE_STATE_SUSPECT, reason="hangs")
        third = await c.schedule("r3", keys)
        assert third.prefill.instance_id != first.prefill.instance_id
        assert (await c.record("r3"))["chosen"]["awaited_decision_id"] != first.decision_id

    serve(tmp_path, scenario)


def test_an_idle_engine_proves_that_word_was_lost() -> None:
    core = Scheduler(scheduler_settings(), random.Random(1), native_index)
    info = InstanceInfo("a", 1, "both", "m", max_sequences=8)
    one = core.register(info, InstanceState.READY, 0.0)
    decision = core.schedule(SchedulingRequest("r", "m", 1000), PoolAnswer(), 0.0, 0.0)
    for now_s in range(1, 20):
        core.report(one, InstanceState.READY, InstanceLoad(), "", float(now_s))
    assert len(core.work) == 1, "an engine that never reported any load proves nothing"
    core.report(one, InstanceState.READY, InstanceLoad(running=1), "", 20.0)
    for now_s in (21.0, 22.0):
        core.report(one, InstanceState.READY, InstanceLoad(), "", now_s)
    assert len(core.work) == 1
    core.report(one, InstanceState.READY, InstanceLoad(), "", 24.0)
    assert len(core.work) == 0
    assert decision.record.state == "lost"
    core.check()


def test_a_busy_engine_forgets_what_a_dead_gateway_sent() -> None:
    core = Scheduler(scheduler_settings(), random.Random(1), native_index)
    one = core.register(InstanceInfo("a", 1, "both", "m", max_sequences=64), InstanceState.READY, 0.0)
    old = [
        core.schedule(SchedulingRequest(f"old{i}", "m", 1000), PoolAnswer(), float(i), 0.0) for i in range(6)
    ]
    core.report(one, InstanceState.READY, InstanceLoad(running=6), "", 8.0)
    for now_s in range(20, 25):
        core.report(one, InstanceState.READY, InstanceLoad(running=2), "", float(now_s))
    assert len(core.work) == 6, "a few reports may be wrong"
    new = core.schedule(SchedulingRequest("new", "m", 1000), PoolAnswer(), 25.0, 0.0)
    core.report(one, InstanceState.READY, InstanceLoad(running=2), "", 26.0)
    states = [decision.record.state for decision in old]
    assert states == ["lost"] * 4 + ["running"] * 2, "the oldest, and as many as are missing"
    assert new.record.state == "running", "it may be on its way"
    core.report(one, InstanceState.READY, InstanceLoad(running=3), "", 27.0)
    assert len(core.work) == 3
    core.check()


def test_work_of_others_counts_when_two_reports_agree() -> None:
    core = Scheduler(scheduler_settings(), random.Random(1), native_index)
    one = core.register(InstanceInfo("a", 1, "both", "m", max_sequences=8), InstanceState.READY, 0.0)

    def expected_s() -> float:
        decision = core.schedule(SchedulingRequest("r", "m", 1000), PoolAnswer(), 1.0, 0.0)
        core.close(decision.decision_id, DecisionState.FINISHED, 1.0)
        return decision.choice.ttft_s

    idle_s = expected_s()
    core.report(one, InstanceState.READY, InstanceLoad(waiting=3, running=2), "", 1.0)
    assert expected_s() == idle_s, "a single report may be older than the end of a request"
    core.report(one, InstanceState.READY, InstanceLoad(waiting=3, running=2), "", 1.0)
    assert expected_s() > idle_s
    assert one.foreign == 5
    core.report(one, InstanceState.READY, InstanceLoad(), "", 1.0)
    assert expected_s() == idle_s
