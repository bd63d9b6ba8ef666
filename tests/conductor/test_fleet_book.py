"""The book of instances: sums stay true over any history; queues, shares of links, the decode load ahead; roles."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.conductor.core.decode_ahead import BUCKETS, Curve, DecodeAhead
from mooncache.conductor.core.fairness import FairShares
from mooncache.conductor.core.fleet_book import Assignment, FleetBook, InstanceShape
from mooncache.conductor.core.output_lengths import OutputLengths
from mooncache.conductor.core.policy import find, placement, roles
from mooncache.conductor.core.policy.fleet import DECODE, PREFILL, FleetSummary
from mooncache.conductor.core.policy.replication import PrefixDemand, copies_wanted, plan_replicas
from mooncache.conductor.core.policy.roles import NO_SIDE, Needs, RolePlanner
from mooncache.conductor.core.policy.types import (
    NO_ROW,
    Branch,
    Choice,
    DecodeCost,
    PrefillCost,
    Request,
    Rules,
    TransferCost,
)
from tests.conductor.fleets import Row, fleet, pair, request

NOTHING = np.zeros(2, dtype=np.int64)


def assignment(name: str, compute_s: float = 2.0, **choice: object) -> Assignment:
    asked = Request(prompt_tokens=1000, local=NOTHING, output_tokens=100.0)
    made = Choice(True, "admitted", prefill=0, decode=1, compute_s=compute_s, ttft_s=compute_s, tbt_s=0.05)
    return Assignment(name, replace(made, **choice), asked)  # type: ignore[arg-type]


def test_queue_is_what_is_left_of_pending_prefills() -> None:
    book = pair()
    book.assign(assignment("1", 2.0), 0.0)
    book.assign(assignment("2", 3.0), 0.0)
    assert book.view(0.5).queue_s[0] == pytest.approx(4.5)
    assert book.view(99.0).queue_s[0] == pytest.approx(3.0), "an overdue prefill is not more than done"
    assert book.view(0.5).queue_prompts.tolist() == [2, 0]
    assert book.view(0.5).sequences.tolist() == [0, 2]
    assert book.computed("1", 2.5) == 0.0
    assert book.view(3.0).queue_s[0] == pytest.approx(2.5)
    assert book.computed("2", 5.0) == 2.5, "the second began when the first had ended"
    assert book.computed("2", 5.0) is None
    assert book.assigned("d") == 2
    assert book.ended("1", 6.0) is not None
    assert book.ended("2", 6.0) is not None
    assert book.ended("2", 6.0) is None
    assert book.view(6.0).sequences.tolist() == [0, 0]
    book.check()


def test_who_fetches_shares_the_links() -> None:
    book = pair()
    book.set("p", transfer=TransferCost(0.0, 900.0))
    book.add("s", InstanceShape())
    book.assign(assignment("1", branch=Branch.FETCH, fetch_tokens=10, source_row=2), 0.0)
    assert book.view(0.0).fetch_tokens_per_s[0] == pytest.approx(450.0)
    book.started("1", 1.0)
    assert book.view(1.0).fetch_tokens_per_s[0] == pytest.approx(900.0)


def test_members_of_a_pipeline_are_busy_together() -> None:
    book = pair()
    book.add("q", InstanceShape())
    book.assign(assignment("1", 4.0, members=(0, 2)), 0.0)
    assert book.view(1.0).queue_s.tolist() == pytest.approx([3.0, 0.0, 3.0])
    book.computed("1", 4.0)
    assert book.view(4.0).queue_s.tolist() == [0.0, 0.0, 0.0]


def test_the_decode_load_ahead_joins_and_leaves() -> None:
    book = pair()
    uniform = lambda tokens: (tokens < 200).astype(np.float64)  # noqa: E731 - 200 tokens of 50 ms: ten seconds
    book.assign(replace(assignment("1", 5.0), survival=uniform), 0.0)
    seen = book.view(0.0)
    assert [float(seen.decode_at(at_s)[0][1]) for at_s in (0.0, 4.0, 6.0, 13.0, 17.0, 500.0)] == [
        0,
        0,
        1,
        1,
        0,
        0,
    ]
    book.first_token("1", 2.0)
    seen = book.view(2.0)
    assert [float(seen.decode_at(at_s)[0][1]) for at_s in (0.0, 9.0, 11.0)] == [1, 1, 0], "it came sooner"
    late = book.view(14.0)
    assert 0.9 < float(late.decode_at(0.0)[0][1]) <= 1.0, "it is still there, whatever the curve said"
    assert float(late.decode_at(10.0)[0][1]) < 0.5
    book.ended("1", 15.0)
    assert float(book.view(15.0).decode_at(0.0)[0][1]) == 0.0


class PlainAhead:
    """The decode load ahead with a dict and loops, for one instance."""

    def __init__(self) -> None:
        self.load: dict[int, float] = {}

    def change(self, begin: int, share: list[float], sign: float, bucket: int) -> None:
        for later, part in enumerate(share):
            if begin + later >= bucket:
                self.load[begin + later] = self.load.get(begin + later, 0.0) + sign * part


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.floats(0, 200), st.floats(0, 200), st.booleans(), st.lists(st.floats(0, 1), max_size=9)),
        max_size=30,
    )
)
def test_the_table_of_the_load_ahead_is_a_sum_of_curves(
    moves: list[tuple[float, float, bool, list[float]]],
) -> None:
    """Requests come and go while time passes, by steps longer than the table too."""
    ahead, plain, now_s = DecodeAhead(), PlainAhead(), 0.0
    ahead.room(2)
    there: list[tuple[Curve, int, list[float]]] = []
    for passes_s, join_s, ends, share in moves:
        now_s += passes_s
        ahead.roll(now_s)
        if ends and there:
            curve, begin, gone = there.pop(0)
            ahead.drop(curve)
            plain.change(begin, gone, -1.0, int(now_s))
        else:
            later = np.array([*share, *[0.0] * (BUCKETS - len(share))])
            curve = Curve(row=1, whole=np.multiply.outer(later, (1.0, 100.0)))
            ahead.add(curve, now_s, join_s)
            begin = int(now_s) + min(int(now_s + join_s) - int(now_s), BUCKETS - 1)
            kept = share[: int(now_s) + BUCKETS - begin]
            plain.change(begin, kept, 1.0, int(now_s))
            there.append((curve, begin, kept))
        for after_s in (0.0, 1.0, 50.0, 127.0):
            ((sequences, kv_tokens),) = ahead.at(now_s, [after_s], np.zeros((2, 2)), None, 1.0)
            at = min(int(now_s + after_s), int(now_s) + BUCKETS - 1)
            assert sequences[1] == pytest.approx(max(0.0, plain.load.get(at, 0.0)), abs=1e-9)
            assert kv_tokens[1] == pytest.approx(100.0 * sequences[1], abs=1e-6)
            assert sequences[0] == 0.0


def test_who_read_the_clock_before_the_present_moved_joins_now() -> None:
    ahead, curve = DecodeAhead(), Curve(row=1, whole=np.ones((BUCKETS, 2)))
    ahead.room(2)
    ahead.roll(1000.1)
    ahead.add(curve, 999.9, 0.0)
    assert ahead.at(1000.1, [0.0], np.zeros((2, 2)), None, 1.0)[0, 0].tolist() == [0.0, 1.0]
    ahead.drop(curve)
    assert ahead.at(1000.1, [0.0], np.zeros((2, 2)), None, 1.0)[0, 0].tolist() == [0.0, 0.0]


def test_rows_are_used_again_and_late_words_of_the_old_one_change_nothing() -> None:
    book = pair()
    book.assign(assignment("1"), 0.0)
    book.remove("d")
    assert book.view(0.0).role[1] == -1
    assert book.add("e", InstanceShape(role=DECODE)) == 1
    book.first_token("1", 3.0)
    book.ended("1", 4.0)
    assert book.view(4.0).sequences.tolist() == [0, 0]
    book.check()


def plain(value: object) -> object:
    """Arrays as lists, so that values can be compared."""
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


MOVES = ("assign", "started", "computed", "first_token", "ended", "leave", "change")


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from(MOVES)), max_size=80))
def test_the_book_stays_whole(moves: list[tuple[int, str]]) -> None:
    book = pair()
    there: set[str] = set()
    for now, (number, move) in enumerate(moves):
        name, now_s = str(number), float(now)
        if move == "assign" and name not in there:
            book.assign(assignment(name, 1.0 + number, prefill=NO_ROW if number % 3 == 0 else 0), now_s)
            there.add(name)
        elif move == "ended":
            book.ended(name, now_s)
            there.discard(name)
        elif move == "leave":
            book.remove("d")
            book.add("d", InstanceShape(role=DECODE, group=number % 2))
        elif move == "change":
            book.set("p", ready=number % 2 == 0, prefill=PrefillCost(0.0, 1e-4 * number, 0.0, 0.0))
        elif move in ("started", "computed", "first_token"):
            getattr(book, move)(name, now_s)
        book.check()
        view = book.view(now_s)
        assert (view.queue_s >= 0).all()
        assert plain(view.summary) == plain(FleetSummary.of(view)), "the book kept what is not true any more"
    for name in there:
        book.ended(name, 99.0)
    assert book.view(99.0).sequences.tolist() == pytest.approx([0.0, 0.0])
    assert book.view(99.0).decode_at(0.0)[0].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


# --- what is learnt -----------------------------------------------------------------------------------------------


def test_lengths_of_answers_are_learnt_for_each_class() -> None:
    lengths = OutputLengths(prior_tokens=128.0)
    assert lengths.mean("x") == pytest.approx(128.0, rel=0.1)
    for _ in range(500):
        lengths.observe("short", 20.0)
        lengths.observe("long", 900.0)
    assert lengths.mean("short") == pytest.approx(20.0, rel=0.5)
    assert lengths.mean("long") == pytest.approx(900.0, rel=0.2)
    assert lengths.mean("long", limit=100) <= 100
    assert 400 < lengths.mean("unknown") < 500, "like all others together"
    share = lengths.survival("short")(np.array([0.0, 10.0, 30.0, 1e6]))
    assert share[0] == pytest.approx(1.0)
    assert share[1] > 0.9
    assert share[2] < 0.1
    assert share[3] == pytest.approx(0.0, abs=1e-9)
    assert lengths.survival("long", limit=100)(np.array([99.0, 101.0])).tolist() == pytest.approx(
        [1.0, 0.0], abs=0.1
    )


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=50),
    st.floats(0, 1e7),
    st.floats(0, 1e7),
)
def test_survival_never_grows(values: list[float], one: float, other: float) -> None:
    lengths = OutputLengths()
    for value in values:
        lengths.observe("x", value)
    sooner, later = lengths.survival("x")(np.array(sorted((one, other))))
    assert 0 <= later <= sooner + 1e-9 <= 1 + 2e-9


def test_shares_of_tenants_fade() -> None:
    shares = FairShares()
    shares.use("a", 9000.0, 0.0)
    assert shares.share("a", 0.0) == 1.0, "alone nobody takes from anybody"
    shares.use("b", 1000.0, 0.0)
    assert shares.share("a", 0.0) == pytest.approx(1.8)
    assert shares.share("b", 0.0) == 1.0
    shares.use("b", 9000.0, 120.0)
    assert shares.share("a", 120.0) == 1.0
    assert shares.share("b", 120.0) > 1.5
    shares.use("b", 9000.0, 360.0)
    assert shares.share("b", 360.0) == 1.0, "who left minutes ago takes part in the mean"


# --- roles and replicas -------------------------------------------------------------------------------------------


def roles_after(
    planner: RolePlanner, rows: tuple[Row, ...], rate: float, begin_s: float, plans: int
) -> list[int]:
    found = []
    for step in range(plans):
        now_s = begin_s + 15.0 * step
        found += [switch.role for switch in planner.plan(fleet(*rows), rate * now_s, 0.1, now_s)]
    return found


def test_roles_follow_a_lasting_load_and_do_not_go_to_and_fro() -> None:
    rows = (*(Row(f"p{i}") for i in range(4)), *(Row(f"d{i}", role="decode", sequences=1) for i in range(4)))
    assert roles_after(RolePlanner(), rows, 2.0, 0.0, 10) == [], "there is enough of both"
    assert set(roles_after(RolePlanner(), rows, 4.5, 0.0, 3)) == {PREFILL}
    crowd = tuple(row.but(sequences=150.0) if row.role == "decode" else row for row in rows)
    assert set(roles_after(RolePlanner(), crowd, 0.5, 0.0, 4)) == {DECODE}
    planner = RolePlanner()
    assert roles_after(planner, rows, 4.5, 0.0, 3)
    assert DECODE not in roles_after(planner, crowd, 4.5, 45.0, 3), "not at once the other way"
    busy = tuple(row.but(queue_s=60.0) for row in crowd)
    assert roles_after(RolePlanner(), busy, 9.0, 0.0, 9) == [], "nobody has anything to give"


def test_answers_that_wait_for_a_place_need_instances_whatever_a_step_takes() -> None:
    idle = (Row("p0"), Row("p1"))
    few = Row("d", role="decode", sequences=12.0, sequences_max=4.0)
    assert set(roles_after(RolePlanner(), (*idle, few), 0.1, 0.0, 3)) == {DECODE}
    assert roles_after(RolePlanner(), (*idle, few.but(sequences_max=0.0)), 0.1, 0.0, 3) == [], "no limit"
    assert roles_after(RolePlanner(), (*idle, few.but(sequences_max=16.0)), 0.1, 0.0, 3) == [], "all fit"
    queued = (Row("p0", queue_prompts=6), Row("p1", queue_prompts=5))
    assert roles_after(RolePlanner(), (*queued, few), 0.1, 0.0, 3) == [], "their prompts are not computed yet"


def test_what_a_switch_costs_says_how_long_a_load_has_to_last() -> None:
    rows = (*(Row(f"p{i}") for i in range(4)), *(Row(f"d{i}", role="decode", sequences=1) for i in range(4)))
    crowd = tuple(row.but(sequences=150.0) if row.role == "decode" else row for row in rows)

    def back_after_s(switch_s: float, rate: float) -> float:
        planner = RolePlanner(switch_s)
        assert {switch.role for switch in planner.plan(fleet(*crowd), 0.0, 0.1, 0.0)} == {DECODE}
        for now_s in range(1, 1000):
            found = planner.plan(fleet(*rows), rate * now_s, 0.1, float(now_s))
            if found:
                assert {switch.role for switch in found} == {PREFILL}
                return float(now_s)
        raise AssertionError("prompts queue and no instance helps")

    for rate, times in ((3.5, roles.TURN_BACK), (5.0, roles.FOLLOWS_IN)):  # a small lack, and a clear one
        assert times * 4.0 <= back_after_s(4.0, rate) < times * 20.0 <= back_after_s(20.0, rate)


def test_when_both_sides_lack_the_slower_one_gets_more() -> None:
    prefill = tuple(Row(f"p{i}", queue_s=60.0) for i in range(6))
    full = tuple(Row(f"d{i}", role="decode", sequences=340.0) for i in range(2))
    planner = RolePlanner()
    assert roles_after(planner, (*prefill, *full), 5.0, 0.0, 4) == [], "not in the first minute"
    assert roles_after(planner, (*prefill, *full), 5.0, 60.0, 3)[:1] == [DECODE]
    counts = {PREFILL: 8, DECODE: 8}
    assert roles.split(Needs(20.0, 12.0, 12.0, 4.0), counts) == (PREFILL, 1)
    assert roles.split(Needs(20.0, 20.0, 8.0, 8.0), counts) == (NO_SIDE, 0), "nothing is gained"
    assert roles.split(Needs(20.0, 20.0), counts) == (NO_SIDE, 0), "not known yet"
    assert roles.split(Needs(4.0, 12.0, 12.0, 4.0), counts) == (DECODE, 3), (
        "who has more than is needed gives first"
    )


def test_hot_prefixes_get_copies_and_lose_them() -> None:
    rows = (*(Row(f"p{i}", queue_s=float(i)) for i in range(6)), Row("d", role="decode"))
    demand = PrefixDemand()
    for number in range(600):
        demand.use(1, 50_000, number * 0.1)
    demand.use(2, 500, 60.0)
    makes, drops = plan_replicas(demand, {1: [5], 2: [4]}, fleet(*rows), 100_000.0, 60.0)
    assert drops == []
    assert {copy.key for copy in makes} == {1}
    assert [copy.row for copy in makes] == [0, 1][: len(makes)], "to the least busy"
    _, drops = plan_replicas(demand, {1: [0, 1, 2, 3, 4, 5]}, fleet(*rows), 100_000.0, 1000.0)
    assert drops
    assert len(drops) < 6, "one is left"
    for prefix in (demand.hottest(1, 60.0)[0][1],):
        assert copies_wanted(prefix, 1e3, 6, 60.0) == 3, "at most half of the instances"


BAD = (math.nan, math.inf, -math.inf, -1.0)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("policy", ["mooncache", "algorithm1", "least_load"])
def test_costs_that_cannot_be_are_passed_over(bad: float, policy: str) -> None:
    """One of them in the decode load ahead would stay there, and no decision could be made any more."""
    book = pair()
    known = book.view(0.0).prefill_cost(0), book.view(0.0).summary.decode_base_s
    book.learnt(0, PrefillCost(bad, bad, bad, bad))
    book.set("d", prefill=PrefillCost(bad, 1e-4, 0.0, 0.0), decode=DecodeCost(bad, bad, bad))
    book.set("p", transfer=TransferCost(bad, math.nan), handover=TransferCost(bad, math.nan))
    book.stays(bad)
    book.report("d", foreign_sequences=bad, foreign_queue_s=bad, kv_tokens=bad)
    assert (book.view(0.0).prefill_cost(0), book.view(0.0).summary.decode_base_s) == known
    asked = Request(prompt_tokens=1000, local=NOTHING, cacheable_tokens=1000)
    for number in range(3):
        choice = find(policy).choose(asked, book.view(float(number)), Rules(), random.Random(1))
        assert choice.admitted
        assert choice.invalid_costs == 0
        book.assign(Assignment(str(number), choice, asked), float(number))
        book.first_token(str(number), number + 0.5)
    book.check()
    assert all(np.isfinite(column).all() for column in book.view(3.0).decode_at(2.0))


@pytest.mark.parametrize("bad", BAD)
def test_a_newcomer_with_impossible_costs_gets_the_usual_ones(bad: float) -> None:
    book = FleetBook()
    row = book.add(
        "new", InstanceShape(prefill=PrefillCost(bad, bad, bad, bad), decode=DecodeCost(0.02, bad, 0.0))
    )
    assert book.view(0.0).prefill_cost(row) == InstanceShape().prefill
    assert book.view(0.0).decode_per_sequence_s[row] == InstanceShape().decode.per_sequence_s


def test_a_limit_is_found_however_few_instances_are_over_it() -> None:
    """Prices look at the sums first and at the rows only when somebody could be over a limit."""
    roomy = Row("d", role="decode", sequences=1.0, sequences_max=8.0, kv_tokens=500.0)
    full = roomy.but(name="f", sequences=8.0)
    asked = request((roomy, full), 100)
    assert placement.price(asked, fleet(roomy, full), 0.0, 0.0).wait_s.tolist()[0] == 0.0
    assert placement.price(asked, fleet(roomy, full), 0.0, 0.0).wait_s[1] > 0.0
