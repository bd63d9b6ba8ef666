"""The conductor with thousands of requests and instances: nothing is lost because there is much of it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from mooncache import errors
from mooncache.conductor.core.decisions import PoolAnswer, SchedulingRequest
from mooncache.conductor.core.progress import Phase, ProgressReport
from mooncache.conductor.core.registry import (
    GONE_MAX,
    LEASE_INTERVALS,
    REPORTS_PER_S,
    SUSPECT_INTERVALS,
    InstanceInfo,
    InstanceState,
    Registry,
)
from mooncache.conductor.core.scheduler import Scheduler
from mooncache.conductor.state import native_index
from mooncache.gateway.shell.instance_list import InstanceList
from mooncache.kvcache.instance_load import InstanceLoad
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import until
from tests.conductor.support import PASSPORT, Conductor, chain, instance, scheduler_settings, serve


def test_requests_end_when_their_records_are_dropped() -> None:
    core = Scheduler(scheduler_settings(decision_count_max=100), random.Random(1), native_index)
    core.register(InstanceInfo("a", 1, "both", "m"), InstanceState.READY, 0.0)
    lengths = core.models.of("m").lengths
    before = lengths.mean("", 0)
    under_way = [
        core.schedule(SchedulingRequest(f"r{i}", "m", 100), PoolAnswer(), 1.0, 0.0) for i in range(120)
    ]
    assert len(core.records) == 100
    for decision in under_way:
        core.report_progress(decision.decision_id, ProgressReport(Phase.FIRST_TOKEN, 0.1, 1), 2.0)
        assert core.report_progress(decision.decision_id, ProgressReport(Phase.FINISHED, 0.2, 10), 3.0).ended
    assert len(core.work) == 0
    book = core.models.of("m").book
    assert book.assigned("a") == 0
    assert float(book.view(3.0).sequences.sum()) == 0, "the policy sees an idle instance again"
    assert abs(lengths.mean("", 0) - 10) < abs(before - 10) / 4, "answers were learnt from all the same"
    with pytest.raises(errors.DecisionUnknown):
        core.report_progress(under_way[0].decision_id, ProgressReport(Phase.FINISHED, 0.2, 10), 4.0)
    core.check()


def registered(name: str, **fields: object) -> pb.RegisterInstanceRequest:
    given = {"worker_run": 7, **fields}
    return pb.RegisterInstanceRequest(instance=instance(name), **given)  # type: ignore[arg-type]


def test_reports_are_spaced_when_there_are_many_instances(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(instance("first"))
        assert (await c.report("first")).report_interval_ms == 250
        core, now_s = c.service.state.core, c.service.clock.now_s()
        for number in range(999):
            core.register(InstanceInfo(f"i{number}", 1, "both", "m"), InstanceState.READY, now_s)
        told_s = (await c.report("first")).report_interval_ms / 1e3
        interval_s = 1000 / REPORTS_PER_S
        assert interval_s / 2 - 0.001 <= told_s < interval_s * 1.5
        first = core.registry.get("first")
        assert first is not None
        patience_s = SUSPECT_INTERVALS * max(told_s, interval_s)
        core.expire(first.reported_s + patience_s - 1.0)
        assert first.state == InstanceState.READY, "one report may be lost"
        gone = core.expire(first.reported_s + patience_s + 1.0)[0]
        assert first not in gone, "it was told to report more seldom than the others"
        assert first.state == InstanceState.SUSPECT
        assert first in core.expire(first.reported_s + LEASE_INTERVALS * max(told_s, interval_s) + 1.0)[0]

    serve(tmp_path, scenario, **{"conductor.suspect_after_s": 2, "conductor.lease_s": 10})


def test_instances_that_register_together_do_not_report_together() -> None:
    registry = Registry(suspect_after_s=2.0, lease_s=10.0, count_max=2000, report_interval_s=0.25)
    instances = [
        registry.register(InstanceInfo(f"i{n}", 1, "both", "m"), InstanceState.READY, 70.0)[0]
        for n in range(1000)
    ]
    due_s = dict.fromkeys(range(1000), 70.0)
    for number, reporting in enumerate(instances):
        registry.report(reporting, InstanceState.READY, InstanceLoad(), "", 70.0)
        due_s[number] += reporting.next_report_s
    for _ in range(3):
        in_slots = Counter(int(at_s * 10) for at_s in due_s.values())
        assert max(in_slots.values()) <= REPORTS_PER_S / 10 + 1, "the same in each tenth of a second"
        for number, at_s in due_s.items():
            registry.report(instances[number], InstanceState.READY, InstanceLoad(), "", at_s)
            due_s[number] += instances[number].next_report_s
            assert due_s[number] - at_s == pytest.approx(1000 / REPORTS_PER_S)


def test_a_list_holds_what_has_changed_since(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        for number in range(50):
            await c.register(instance(f"i{number:02}"))
        mine = InstanceList()

        async def ask(known_version: int) -> pb.ListInstancesResponse:
            answer: pb.ListInstancesResponse = await c.call(
                "ListInstances", mine.question(known_version, 0.0)
            )
            mine.take(answer)
            return answer

        whole = await ask(0)
        assert (whole.delta, len(whole.instances)) == (False, 50)
        assert list(whole.passports) == [PASSPORT], "told once"
        await c.call("SetInstance", pb.SetInstanceRequest(instance_id="i07", drain=True))
        answer = await ask(mine.version)
        assert answer.delta
        assert [view.instance.instance_id for view in answer.instances] == ["i07"]
        assert len(answer.SerializeToString()) * 10 < len(whole.SerializeToString())
        core = c.service.state.core
        gone = core.registry.get("i03")
        assert gone is not None
        gone.gone_at_s -= 1000
        core.expire(c.service.clock.now_s())
        await c.register(instance("i99"))
        answer = await ask(mine.version)
        assert (list(answer.gone), len(answer.instances)) == (["i03"], 1)
        plain = await c.call("ListInstances", pb.ListInstancesRequest())
        assert not plain.passports
        for view in mine.views + list(plain.instances):
            view.report_age_ms = view.passport = 0
        assert mine.views == list(plain.instances), "the same as who asks for the whole list"
        mine.run += 1  # of another process of the conductor
        assert not (await ask(mine.version)).delta

    serve(tmp_path, scenario)


def test_many_changes_make_few_answers(tmp_path: Path) -> None:
    """An engine after the other is registered while somebody watches."""

    async def scenario(c: Conductor) -> None:
        await c.register(instance("a"))
        mine, answers = InstanceList(), 0
        mine.take(await c.call("ListInstances", mine.question(0, 0.0)))

        async def watch() -> None:
            nonlocal answers
            while len(mine.views) < 301:
                mine.take(await c.call("ListInstances", mine.question(mine.version, 5.0)))
                answers += 1

        watching = asyncio.ensure_future(watch())
        await until(lambda: c.service.state.watchers == 1)
        state = c.service.state
        for number in range(300):
            state.core.register(
                InstanceInfo(f"i{number}", 1, "both", "m"), InstanceState.READY, state.clock.now_s()
            )
            state.announce()
            await asyncio.sleep(0)
        await watching
        assert answers < 60

    serve(tmp_path, scenario)


def test_changes_of_long_ago_are_a_whole_list() -> None:
    registry = Registry(suspect_after_s=2, lease_s=10, count_max=10_000, first_version=100)
    assert registry.changes(99) is None
    assert registry.changes(101) is None
    for number in range(GONE_MAX + 2):
        registry.register(InstanceInfo(f"i{number}", 1, "both", "m"), InstanceState.READY, float(number))
    before = registry.version
    registry.expire(1e6)
    assert registry.changes(before) is None, "more are gone than are remembered"
    changed, gone = registry.changes(registry.version - 1) or ([], [])
    assert (len(changed), len(gone)) == (0, 1)
    registry.check()


def test_a_restarted_conductor_leaves_a_drained_instance_drained(tmp_path: Path) -> None:
    """What an operator asked for is told again by the worker; see also tests/worker/test_with_conductor.py."""

    async def scenario(c: Conductor) -> None:
        await c.call("RegisterInstance", registered("p", drain=True, role_pinned=True))
        answer = await c.report("p")
        assert (answer.drain, answer.role_pinned) == (True, True)
        assert (await c.schedule("r", chain("a", 4))).reason == pb.ADMISSION_REASON_NO_INSTANCE
        await c.call("SetInstance", pb.SetInstanceRequest(instance_id="p", drain=False))
        answer = await c.report("p")
        assert answer.HasField("drain")
        assert not answer.drain
        await c.call("RegisterInstance", registered("p", drain=True))
        assert not (await c.report("p")).drain, "the conductor's own answer counts"
        await c.call("RegisterInstance", registered("q"))
        assert not (await c.report("q")).HasField("drain"), "nobody asked"

    serve(tmp_path, scenario)


def test_two_workers_with_one_name(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.call("RegisterInstance", registered("a", worker_run=1))
        version = c.service.state.core.registry.version
        twin = registered("a", worker_run=2)
        twin.instance.incarnation = 5
        for _ in range(20):
            with pytest.raises(errors.StaleIncarnation, match="another worker"):
                await c.call("RegisterInstance", twin)
            with pytest.raises(errors.InstanceUnknown):
                await c.report("a", incarnation=5)
            await c.report("a")
        assert c.service.state.core.registry.version == version, "nobody hears of the second one"
        again = registered("a", worker_run=1)
        again.instance.incarnation = 2
        await c.call("RegisterInstance", again)  # the same worker started its engine again
        await c.report("a", incarnation=2, state=pb.INSTANCE_STATE_DRAINING)
        await c.call("RegisterInstance", twin)  # the first one ends
        known = c.service.state.core.registry.get("a")
        assert known is not None
        known.suspect_at_s -= 61.0
        await c.call("RegisterInstance", again)  # the other one is silent

    serve(tmp_path, scenario)
