"""Blocks that will not come: who is to hear so, when, and what another request makes all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.conductor.core.give_ups import AGAIN_S, OPEN_MAX, GiveUp, GiveUpReason, GiveUps
from mooncache.conductor.core.in_flight import InFlight, Running
from mooncache.conductor.core.policy.types import Branch
from mooncache.conductor.core.progress import LegReport, Phase, ProgressReport
from mooncache.conductor.core.records import DecisionState
from mooncache.conductor.core.registry import InstanceInfo, InstanceState
from mooncache.errors import NodeUnavailable
from mooncache.kvcache.leg_hint import CacheReport, LegRole
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import until
from tests.conductor.support import Conductor, chain, pair, serve
from tests.conductor.test_handover_node import ONE_EACH, Fleet

KEYS = chain("a", 10)


def running(name: str, keys: bytes = KEYS, begin: int = 0, node: str = "n") -> Running:
    return Running(name, "p", keys, 1.0, begin=begin, store_node=node)


def taken(book: GiveUps, now_s: float, table: InFlight | None = None) -> list[tuple[str, int, int]]:
    book.check()
    return [(each.decision_id, each.begin, each.end) for each in book.take(now_s, table or InFlight())]


def test_they_are_taken_once_when_they_are_due() -> None:
    book = GiveUps()
    book.add(running("x"), 2, 10, GiveUpReason.FAILED, 5.0)
    book.add(running("y"), 4, 4, GiveUpReason.FAILED, 1.0)
    assert taken(book, 4.9) == [] and len(book) == 1, "a range without blocks is none"
    assert taken(book, 5.0) == [("x", 2, 10)]
    assert taken(book, 9.0) == []


def test_the_end_of_a_request_makes_them_due() -> None:
    book = GiveUps()
    book.add(running("x"), 0, 10, GiveUpReason.FAILED, 5.0)
    book.ended("other", 1.0)
    assert taken(book, 1.0) == []
    book.ended("x", 1.0)
    assert taken(book, 1.0) == [("x", 0, 10)]


def test_there_is_a_limit() -> None:
    book = GiveUps()
    for number in range(OPEN_MAX + 3):
        book.add(running(f"x{number}"), 0, 1, GiveUpReason.FAILED, 1.0)
    assert len(book) == OPEN_MAX and book.dropped == 3
    assert taken(book, 1.0)[0][0] == "x3"


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12), st.sampled_from("ab")), max_size=3),
    st.integers(0, 10),
)
def test_what_running_requests_make_is_left_out(others: list[tuple[int, int, str]], begin: int) -> None:
    table, made = InFlight(), set()
    for number, (shared, first, node) in enumerate(others):
        keys = chain(f"o{number}", 12, parent="a", shared=shared)
        table.add(Running(f"o{number}", f"p{number}", keys, 1.0, begin=first, store_node=node))
        if node == "a":
            made |= set(range(first, min(shared, 10)))
    ranges = table.unmade(KEYS, begin, 10, "a")
    left = [block for first, end in ranges for block in range(first, end)]
    assert sorted(left) == sorted(set(range(begin, 10)) - made)
    assert all(first < end for first, end in ranges)


def fail(fleet: Fleet, decision_id: str, *, may_follow: bool = False) -> None:
    report = ProgressReport(Phase.PREFILL_FAILED, prefill_may_follow=may_follow)
    fleet.core.report_progress(decision_id, report, fleet.now_s)


def given_up(fleet: Fleet) -> list[GiveUp]:
    fleet.core.check()
    return fleet.core.take_give_ups(fleet.now_s)


def test_a_failed_prefill_gives_its_blocks_up_at_its_node() -> None:
    fleet = Fleet(ONE_EACH)
    keys = chain("k", 400)
    decision = fleet.schedule(keys, in_pool=100)
    fail(fleet, decision.decision_id)
    (each,) = given_up(fleet)
    assert (each.store_node, each.reason) == (decision.store_node, GiveUpReason.FAILED)
    assert each.packed == keys[100 * 32 :], "what the pool has already is not given up"
    assert decision.record.observed["given_up"] == [
        {"from_block": 100, "to_block": 400, "reason": GiveUpReason.FAILED}
    ]
    fail(fleet, decision.decision_id)
    assert given_up(fleet) == [], "a report that comes twice"


def test_another_prefill_leg_of_the_request_takes_over() -> None:
    fleet = Fleet(ONE_EACH)
    first = fleet.schedule(chain("k", 400), "r")
    fail(fleet, first.decision_id, may_follow=True)
    assert given_up(fleet) == []
    again = fleet.schedule(chain("k", 400), "r", attempt=2, exclude=frozenset({first.prefill}))
    assert again.prefill
    fleet.now_s += AGAIN_S
    assert given_up(fleet) == [], "its blocks come after all"
    fail(fleet, again.decision_id)
    assert [each.decision_id for each in given_up(fleet)] == [again.decision_id]


def test_the_new_plan_may_be_known_before_the_report_of_the_failure() -> None:
    fleet = Fleet(ONE_EACH)
    first = fleet.schedule(chain("k", 400), "r")
    again = fleet.schedule(chain("k", 400), "r", attempt=2, exclude=frozenset({first.prefill}))
    fail(fleet, first.decision_id, may_follow=True)
    fleet.now_s += AGAIN_S
    assert again.prefill and given_up(fleet) == []


def test_a_new_plan_without_a_prefill_leg_gives_them_up() -> None:
    fleet = Fleet(ONE_EACH)
    first = fleet.schedule(chain("k", 400), "r")
    fail(fleet, first.decision_id, may_follow=True)
    again = fleet.schedule(chain("k", 400), "r", attempt=2, exclude=frozenset({"p1", "p2"}))
    assert not again.prefill
    assert [each.decision_id for each in given_up(fleet)] == [first.decision_id]


def test_a_plan_that_never_comes_gives_them_up_after_a_while() -> None:
    fleet = Fleet(ONE_EACH)
    first = fleet.schedule(chain("k", 400))
    fail(fleet, first.decision_id, may_follow=True)
    fleet.now_s += AGAIN_S
    assert len(given_up(fleet)) == 1


@pytest.mark.parametrize(
    ("held_tokens", "begin"),
    [(0, 0), (160, 10), (400 * 16, None), (-1, None)],
    ids=["none", "ten", "all", "not said"],
)
def test_what_a_prefill_leg_did_not_store_is_given_up(held_tokens: int, begin: int | None) -> None:
    fleet = Fleet(ONE_EACH)
    decision = fleet.schedule(chain("k", 400))
    cache = CacheReport(asked_tokens=6400, held_tokens=held_tokens, outcome="miss")
    leg = LegReport(LegRole.PREFILL, decision.prefill, 1.0, 9.0, "OK", cache=cache)
    report = ProgressReport(Phase.PREFILLED, legs=(leg,))
    fleet.core.report_progress(decision.decision_id, report, fleet.now_s)
    found = [(each.begin, each.end, each.reason) for each in given_up(fleet)]
    assert found == ([] if begin is None else [(begin, 400, GiveUpReason.NOT_STORED)])


def waiter_of(fleet: Fleet, parent: str) -> str:
    """The decision of a request that waits for the first one's blocks."""
    for number in range(20):
        found = fleet.schedule(chain(f"q{number}", 2010, parent=parent, shared=2000))
        if found.choice.branch is Branch.WAIT:
            return found.decision_id
    raise AssertionError("no request waits")


def test_a_request_that_waits_for_another_ones_blocks_hears_that_they_do_not_come() -> None:
    fleet = Fleet(ONE_EACH)
    maker = fleet.schedule(chain("doc", 2000))
    waiter_of(fleet, "doc")
    fleet.core.close(maker.decision_id, DecisionState.ABORTED, fleet.now_s)
    (each,) = given_up(fleet)
    assert (each.begin, each.end, each.reason) == (0, 2000, GiveUpReason.ENDED), (
        "the waiter makes none of them"
    )


def test_a_request_does_not_wait_for_an_instance_that_failed_it() -> None:
    fleet = Fleet(ONE_EACH)
    maker = fleet.schedule(chain("doc", 2000))
    keys = chain("q", 2010, parent="doc", shared=2000)
    for name, exclude, waits in (("r1", frozenset({maker.prefill}), False), ("r2", frozenset(), True)):
        decision = fleet.schedule(keys, name, exclude=exclude)
        awaited = decision.choice.awaited
        assert (awaited is not None and awaited.decision_id == maker.decision_id) is waits
        fleet.core.close(decision.decision_id, DecisionState.FINISHED, fleet.now_s)


def test_an_aborted_request_for_which_no_other_waits_costs_no_call() -> None:
    fleet = Fleet(ONE_EACH)
    decision = fleet.schedule(chain("k", 400))
    fleet.core.close(decision.decision_id, DecisionState.ABORTED, fleet.now_s)
    assert given_up(fleet) == []


def test_an_engine_that_started_again_has_lost_what_it_computed() -> None:
    fleet = Fleet(ONE_EACH)
    decision = fleet.schedule(chain("k", 400))
    info = InstanceInfo(decision.prefill, 2, "prefill", "m", group=1, host_id="hp")
    fleet.core.register(info, InstanceState.READY, fleet.now_s)
    assert [(each.decision_id, each.reason) for each in given_up(fleet)] == [
        (decision.decision_id, GiveUpReason.ENDED)
    ]


def test_the_store_nodes_are_called_and_it_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(c: Conductor) -> None:
        calls: list[tuple[int, str]] = []

        async def give_up(keys: bytes, store_node: str = "", tenant: str = "") -> int:
            calls.append((len(keys) // 32, store_node))
            if len(calls) == 2:
                raise NodeUnavailable("it is away")
            return 3

        monkeypatch.setattr(c.service.state.pool, "give_up", give_up)
        await c.register(*pair())
        for name in ("a", "b"):
            plan = await c.schedule(name, chain(name, 100))
            leg = pb.LegReport(role=pb.LEG_ROLE_PREFILL, instance_id="p", sent_ms=1.0, ended_ms=2.0, code="X")
            await c.progress(plan.decision_id, pb.REQUEST_PHASE_PREFILL_FAILED, leg)
        await until(lambda: len(calls) == 2)
        assert calls == [(100, ""), (100, "")]

        def counted() -> bool:
            page = c.service.metrics.render()
            return (
                b'mooncache_conductor_give_ups_total{outcome="ok",reason="failed"} 1.0' in page
                and b'mooncache_conductor_give_ups_total{outcome="NODE_UNAVAILABLE",reason="failed"} 1.0'
                in page
                and b"mooncache_conductor_ended_waits_total 3.0" in page
            )

        await until(counted)
        assert (await c.record("a"))["observed"]["given_up"][0]["to_block"] == 100

    serve(tmp_path, scenario)


def test_a_node_that_does_not_answer_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(c: Conductor) -> None:
        begun = asyncio.Event()

        async def give_up(keys: bytes, store_node: str = "", tenant: str = "") -> int:
            begun.set()
            await asyncio.Event().wait()
            return 0

        monkeypatch.setattr(c.service.state.pool, "give_up", give_up)
        await c.register(*pair())
        plan = await c.schedule("a", chain("a", 100))
        await c.progress(plan.decision_id, pb.REQUEST_PHASE_PREFILL_FAILED)
        await begun.wait()
        assert (await c.schedule("b", chain("b", 100))).admitted

    serve(tmp_path, scenario)


def test_blocks_at_other_nodes_end_the_wait_at_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node that was named could not take them, and another one has them: the leg that waits looks again."""
    from mooncache.conductor.core.decisions import PoolAnswer, PoolState

    async def scenario(c: Conductor) -> None:
        calls: list[tuple[int, str]] = []
        blocks = 4

        async def match(keys: bytes, tenant: str = "") -> PoolAnswer:
            return PoolAnswer(PoolState.OK, blocks)

        async def give_up(keys: bytes, store_node: str = "", tenant: str = "") -> int:
            calls.append((len(keys) // 32, store_node))
            return 1

        monkeypatch.setattr(c.service.state.pool, "match", match)
        monkeypatch.setattr(c.service.state.pool, "give_up", give_up)
        await c.call("FindBlocks", pb.FindBlocksRequest(keys=chain("k", 5), store_node="n1"))
        blocks = 5
        await c.call("FindBlocks", pb.FindBlocksRequest(keys=chain("k", 5)))
        await c.call("FindBlocks", pb.FindBlocksRequest(keys=chain("k", 5), store_node="n1"))
        await until(lambda: calls)
        assert calls == [(5, "n1")], "only when all are there, and only where a leg waits"

    serve(tmp_path, scenario)
