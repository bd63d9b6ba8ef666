"""What an engine says of a decode leg comes by its worker too: before or after the end, once, of its own legs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from mooncache.conductor.core.work import SILENT_MAX, Active, WorkBook
from mooncache.kvcache.leg_hint import CacheReport
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conductor.support import Conductor, chain, pair, serve

LOADED = pb.CacheReport(
    asked_tokens=1600,
    hit_tokens=1600,
    loaded_tokens=1600,
    loaded_bytes=1 << 28,
    waited_ms=30.0,
    load_ms=10.0,
    hidden_ms=6.0,
    outcome=pb.CACHE_OUTCOME_HIT,
)
Step = Callable[[Conductor, str], Awaitable[None]]


async def by_worker(c: Conductor, decision_id: str, name: str = "d", cache: pb.CacheReport = LOADED) -> None:
    await c.report(name, ended_legs=[pb.EndedLeg(decision_id=decision_id, cache=cache)])


async def end(c: Conductor, decision_id: str) -> None:
    """The gateway's word of a streamed answer: its engine said nothing of the cache there."""
    prefill = pb.LegReport(role=pb.LEG_ROLE_PREFILL, instance_id="p", sent_ms=1.0, ended_ms=20.0, code="OK")
    decode = pb.LegReport(role=pb.LEG_ROLE_DECODE, instance_id="d", sent_ms=1.0, ended_ms=90.0, code="OK")
    await c.progress(decision_id, pb.REQUEST_PHASE_PREFILLED, prefill, elapsed_ms=20.0)
    first = pb.LegReport(role=pb.LEG_ROLE_DECODE, instance_id="d", sent_ms=1.0)
    await c.progress(decision_id, pb.REQUEST_PHASE_FIRST_TOKEN, first, elapsed_ms=40.0)
    await c.progress(
        decision_id, pb.REQUEST_PHASE_FINISHED, prefill, decode, output_tokens=3, elapsed_ms=90.0
    )


def parts(record: dict[str, Any]) -> list[str]:
    return [span["part"] for span in record["spans"] if span["leg"] == "decode"]


@pytest.mark.parametrize("order", [(by_worker, end), (end, by_worker), (by_worker, end, by_worker)])
def test_a_streamed_leg_is_seen_as_one_that_is_not(tmp_path: Path, order: tuple[Step, ...]) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        plan = await c.schedule("r1", chain("a", 100))
        for step in order:
            await step(c, plan.decision_id)
        record = await c.record("r1")
        assert parts(record) == ["wait", "load", "compute", "generate"]
        assert record["observed"]["handover"] == "landed"
        last = record["events"][-1]["legs"][-1]
        assert (last["leg"], last["cache"]["hidden_ms"]) == ("decode", 6.0)
        model = c.service.state.core.models.of("m")
        assert model.handovers["d"].bytes_per_s.count == 1, "learnt once, however often it is said"
        page = c.service.metrics.render().decode()
        assert 'mooncache_conductor_handovers_total{outcome="landed"} 1.0' in page
        assert 'mooncache_conductor_updates_total{phase="leg_ended"} 1.0' in page

    serve(tmp_path, scenario)


def test_waits_and_what_is_hidden_behind_them_are_learnt(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        plan = await c.schedule("r1", chain("a", 100))
        core = c.service.state.core
        active = core.work.get(plan.decision_id)
        assert active is not None
        assert plan.decode.expected_ms == round(active.expected_wait_s * 1e3)
        await end(c, plan.decision_id)
        await by_worker(c, plan.decision_id)
        model = core.models.of("m")
        assert model.waited.value == pytest.approx(0.03 / active.expected_wait_s)
        visible_s = 0.004 - 0.002  # 4 of 10 ms were seen; half of so short a time is taken for the fixed part
        assert model.handovers["d"].bytes_per_s.value == pytest.approx((1 << 28) / visible_s)
        second = await c.schedule("r2", chain("b", 100))
        raw = core.work.get(second.decision_id)
        assert raw is not None
        assert second.decode.expected_ms == round(raw.expected_wait_s * model.waited.value * 1e3)
        timed_out = pb.CacheReport(asked_tokens=1600, waited_ms=9e5, outcome=pb.CACHE_OUTCOME_TIMEOUT)
        await by_worker(c, second.decision_id, cache=timed_out)
        await end(c, second.decision_id)
        assert model.waited.count == 1, "a wait that was cut says nothing of how long it would have been"

    serve(tmp_path, scenario)


def test_what_the_answer_said_stands(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        plan = await c.schedule("r1", chain("a", 100))
        leg = pb.LegReport(role=pb.LEG_ROLE_DECODE, instance_id="d", sent_ms=1.0, ended_ms=90.0, cache=LOADED)
        await c.progress(plan.decision_id, pb.REQUEST_PHASE_FINISHED, leg, output_tokens=3, elapsed_ms=90.0)
        other = pb.CacheReport(asked_tokens=1600, outcome=pb.CACHE_OUTCOME_TIMEOUT)
        await by_worker(c, plan.decision_id, cache=other)
        record = await c.record("r1")
        assert record["events"][-1]["legs"][-1]["cache"]["outcome"] == "hit"
        assert c.service.state.core.models.of("m").handovers["d"].bytes_per_s.count == 1

    serve(tmp_path, scenario)


def test_an_instance_speaks_of_its_own_legs_only(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        plan = await c.schedule("r1", chain("a", 100))
        await by_worker(c, plan.decision_id, "p")
        await by_worker(c, "d-of-no-one")
        await end(c, plan.decision_id)
        await by_worker(c, plan.decision_id, "p")
        assert parts(await c.record("r1")) == ["unknown", "generate"]
        assert "d" not in c.service.state.core.models.of("m").handovers
        await by_worker(c, plan.decision_id)
        assert parts(await c.record("r1")) == ["wait", "load", "compute", "generate"], (
            "its own is still taken"
        )

    serve(tmp_path, scenario)


def test_a_leg_that_goes_on_under_another_plan(tmp_path: Path) -> None:
    """Its engine knows the first decision only."""

    async def scenario(c: Conductor) -> None:
        await c.register(*pair(), pb.Instance.FromString(pair()[0].SerializeToString()))
        first = await c.schedule("r1", chain("a", 100))
        failed = pb.LegReport(role=pb.LEG_ROLE_PREFILL, instance_id="p", sent_ms=1.0, ended_ms=5.0, code="X")
        await c.progress(first.decision_id, pb.REQUEST_PHASE_PREFILL_FAILED, failed, prefill_may_follow=True)
        second = await c.schedule("r1", chain("a", 100), attempt=2)
        assert (second.prefill.instance_id, second.decode.instance_id) == ("p", "d")
        await by_worker(c, first.decision_id)
        await end(c, second.decision_id)
        record = await c.record(second.decision_id)
        assert record["observed"]["handover"] == "landed"
        assert "load" in parts(record)

    serve(tmp_path, scenario)


def test_few_ended_requests_are_remembered() -> None:
    book = WorkBook()
    for number in range(SILENT_MAX + 3):
        name = f"d{number}"
        book.assign(Active(name, name, "t", "m", "p", "d", 100, 0, 1, 0.0, 1.0, keys=b"k" * 32))
        ended = book.end(name)
        assert ended is not None
        assert ended.keys == b"", "prompts may have megabytes of keys"
        book.check()
    report = CacheReport(hit_tokens=5)
    assert book.reported("d2", "d", report) is None, "the oldest went"
    found = book.reported("d3", "d", report)
    assert found is not None
    assert found.decode_cache == report
    assert book.reported("d3", "d", report) is None, "said once"
    book.check()
