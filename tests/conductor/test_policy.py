"""The policy `mooncache` as properties: what must hold for every prompt, every cache and every load."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.conductor.core.policy import branches, placement
from mooncache.conductor.core.policy.common import QUIET, handovers_s
from mooncache.conductor.core.policy.mooncache import Mooncache
from mooncache.conductor.core.policy.types import (
    NO_ROW,
    AdmissionMode,
    Branch,
    Choice,
    PrefillCost,
    PrefixSource,
    Rules,
    TransferCost,
)
from tests.conductor.fleets import COST, FAST, OPEN, Row, choose, fleet, names, near, request

RULES = Rules(inline_tokens_max=512)
price = QUIET(placement.price)  # policies call it with numpy's warnings off
seconds = st.floats(0, 100)
tokens = st.integers(0, 200_000)
costs = st.builds(
    lambda a, b, c, share: PrefillCost(a, b, c, b * share),
    st.floats(0, 1),
    st.floats(1e-9, 0.01),
    st.floats(0, 1e-6),
    st.floats(0, 1),
)


def cost(row: Row, n: int, **fields: Any) -> float:
    rows = (row,)
    return float(branches.scores(request(rows, n, **fields), fleet(*rows), OPEN).score_s[0])


@given(costs, st.integers(1, 200_000), tokens, tokens, seconds)
def test_more_own_cache_never_costs_more(
    model: PrefillCost, n: int, one: int, other: int, queue_s: float
) -> None:
    less, more = sorted((one, other))
    poorer = cost(Row(prefill=model, local_tokens=less, queue_s=queue_s), n, pool_tokens=n // 2)
    richer = cost(Row(prefill=model, local_tokens=more, queue_s=queue_s), n, pool_tokens=n // 2)
    assert richer <= poorer * (1 + 1e-9) + 1e-9


@given(costs, st.integers(1, 200_000), tokens, tokens, seconds, seconds)
def test_pool_and_running_requests_never_cost_more(
    model: PrefillCost, n: int, local: int, pool: int, queue_s: float, ready_s: float
) -> None:
    row = Row(prefill=model, local_tokens=local, queue_s=queue_s)
    alone = cost(row, n)
    assert cost(row, n, pool_tokens=pool) <= alone
    assert cost(row, n, awaited=((min(n, pool), ready_s, "other"),)) <= alone


@given(st.integers(1, 200_000), tokens, tokens, seconds, seconds)
def test_cost_grows_with_the_queue(n: int, local: int, pool: int, one: float, other: float) -> None:
    shorter, longer = sorted((one, other))
    fields: dict[str, Any] = {"pool_tokens": pool, "awaited": ((n, 3.0, "other"),)}
    low = cost(Row(local_tokens=local, queue_s=shorter), n, **fields)
    assert low <= cost(Row(local_tokens=local, queue_s=longer), n, **fields)


@given(st.integers(1, 100_000), tokens, st.floats(1, 1e7), st.floats(1, 1e7), seconds)
def test_more_bandwidth_never_costs_more(n: int, pool: int, one: float, other: float, queue_s: float) -> None:
    slower, faster = sorted((one, other))
    prices = [
        cost(Row(queue_s=queue_s, transfer=TransferCost(0.0, rate)), n, pool_tokens=pool)
        for rate in (faster, slower)
    ]
    assert prices[0] <= prices[1]


@given(st.integers(32, 100_000), seconds, seconds)
def test_waiting_is_chosen_only_when_cheaper(n: int, ready_s: float, queue_s: float) -> None:
    rows = (Row(queue_s=queue_s),)
    found = branches.options(
        request(rows, n, awaited=((n // 16 * 16, ready_s, "other"),)), fleet(*rows), OPEN, 0
    )
    best = branches.cheapest(found)
    others = [option.score_s for option in found if option.branch != Branch.WAIT]
    assert (best.branch == Branch.WAIT) == (best.score_s < min(others))
    late_s = best.total_s - found[0].total_s
    assert late_s <= OPEN.work_weight * found[0].compute_s, "not for long to save little"
    if best.branch == Branch.WAIT:
        assert best.ready_s >= ready_s


def test_branches_are_what_the_papers_say() -> None:
    row = Row(local_tokens=1024, queue_s=0.5, transfer=TransferCost(0.0, 10_000.0))
    asked = request((row,), 4096, pool_tokens=3072)
    local, fetch = branches.options(asked, fleet(row), OPEN, 0)
    assert local.total_s == pytest.approx(0.5 + COST.seconds(4096, 1024))
    # 2048 tokens at 10,000 a second take 0.2 s, which the queue hides.
    assert fetch.total_s == pytest.approx(0.5 + COST.seconds(4096, 3072))
    slow = fleet(row.but(transfer=TransferCost(0.0, 10.0)))
    assert branches.cheapest(branches.options(asked, slow, OPEN, 0)).branch == "local"


def test_other_passports_and_engines_without_pool_fetch_nothing() -> None:
    for row in (Row(group=2), Row(group=1, pool=False)):
        asked = request((row,), 4096, pool_tokens=4096, group=1, awaited=((4096, 0.0, "x"),))
        assert [option.branch for option in branches.options(asked, fleet(row), OPEN, 0)] == ["local"]
        assert cost(row, 4096, pool_tokens=4096, group=1) == cost(row, 4096)


def test_what_the_same_instance_computes_is_waited_for_without_transfer() -> None:
    row = Row(queue_s=0.2, pool=False)
    asked = request((row,), 4096, awaited=((4096, 0.2, "i"),))
    best = branches.cheapest(branches.options(asked, fleet(row), OPEN, 0))
    assert (best.branch, best.fetch_tokens) == ("wait", 0)


# --- the whole choice ---------------------------------------------------------------------------------------------


SLOW = PrefillCost(0.05, 4e-4, 3e-9, 2e-6)


@st.composite
def clusters(draw: Any) -> tuple[Row, ...]:
    count = draw(st.integers(1, 8))
    return tuple(
        Row(
            f"i{number}",
            role=draw(st.sampled_from(("prefill", "decode", "both"))),
            ready=draw(st.booleans()),
            group=draw(st.integers(0, 2)),
            pool=draw(st.booleans()),
            local_tokens=draw(tokens),
            prefill=draw(st.sampled_from((COST, COST, SLOW))),
            transfer=draw(st.sampled_from((FAST, FAST, TransferCost(0.1, 1e4)))),
            queue_s=draw(seconds),
            queue_prompts=draw(st.integers(0, 9)),
            sequences=draw(st.integers(0, 300)),
            sequences_max=draw(st.integers(0, 256)),
            kv_tokens=draw(tokens),
            kv_capacity_tokens=draw(st.integers(0, 1_000_000)),
            stay_s=draw(st.floats(0, 1000)),
            pipeline=draw(st.integers(-1, 1)),
        )
        for number in range(count)
    )


asks = st.fixed_dictionaries(
    {
        "pool_tokens": tokens,
        "exclude": st.sets(st.sampled_from([f"i{n}" for n in range(8)])),
        "no_prefill": st.booleans(),
        "group": st.integers(0, 2),
        "awaited": st.lists(st.tuples(tokens, seconds, st.sampled_from(("i0", "i1", "gone"))), max_size=2),
    }
)


@settings(max_examples=300)
@given(clusters(), st.integers(1, 200_000), asks, st.booleans(), st.integers(0, 1 << 32))
def test_every_choice_is_allowed(
    rows: tuple[Row, ...], n: int, fields: dict[str, Any], refuses: bool, seed: int
) -> None:
    choice = choose(rows, n, rules=Rules() if refuses else OPEN, seed=seed, **fields)
    usable = {row.name for row in rows if row.ready} - fields["exclude"]
    if not usable:
        assert (choice.admitted, choice.reason) == (False, "no_instance")
        return
    assert rows[choice.decode].name in usable
    assert choice.admitted == (choice.reason == "admitted")
    assert choice.admitted or (refuses and choice.retry_after_s >= RULES.retry_after_min_s)
    assert 0 <= choice.queue_s <= choice.ttft_s
    if any(row.role != "prefill" for row in rows if row.name in usable):
        assert rows[choice.decode].role != "prefill"
    if choice.prefill != NO_ROW:
        giver, taker = rows[choice.prefill], rows[choice.decode]
        assert not fields["no_prefill"]
        assert giver.name in usable - {taker.name}
        assert giver.role == "prefill"
        assert giver.group == taker.group
        assert giver.pool
        assert taker.pool
    for member in choice.members:
        assert rows[member].name in usable
        assert rows[member].pipeline == rows[choice.members[0]].pipeline != -1
    assert len(set(choice.members)) == len(choice.members) != 1


holders = st.lists(st.tuples(st.integers(0, 7), tokens, st.sampled_from((1e4, 1e5, 1e6))), max_size=4)


@settings(max_examples=300)
@given(clusters(), st.integers(1, 200_000), asks, holders)
def test_columns_price_every_row_as_its_ways_in_plain_numbers(
    rows: tuple[Row, ...], n: int, fields: dict[str, Any], held: list[tuple[int, int, float]]
) -> None:
    found = tuple(PrefixSource(*source) for source in held if source[0] < len(rows))
    for row, count, *_ in found:
        rows = (*rows[:row], rows[row].but(local_tokens=max(count, rows[row].local_tokens)), *rows[row + 1 :])
    # As much as one holder has, others have too: the fastest of them counts.
    found += tuple(PrefixSource(NO_ROW, source.tokens, 5e4) for source in found[:1])
    asked, seen = request(rows, n, sources=found, **fields), fleet(*rows)
    priced = branches.scores(asked, seen, OPEN)
    for row in range(len(rows)):
        options = branches.options(asked, seen, OPEN, row)
        assert near(float(priced.score_s[row]), branches.cheapest(options).score_s)
        assert any(
            near(float(priced.score_s[row]), option.score_s)
            and near(float(priced.total_s[row]), option.total_s)
            and near(float(priced.compute_s[row]), option.compute_s)
            for option in options
        )


@settings(max_examples=200)
@given(clusters(), st.integers(1, 200_000), asks)
def test_columns_choose_what_a_loop_over_instances_would(
    rows: tuple[Row, ...], n: int, fields: dict[str, Any]
) -> None:
    """Brute force: every prefill with every decode instance, priced one by one in plain numbers."""
    rules = Rules(admission=AdmissionMode.NONE, pipelines=False, inline_tokens_max=-(10**9))
    rows = tuple(row.but(role="decode" if row.role == "both" else row.role) for row in rows)
    asked, seen = request(rows, n, **fields), fleet(*rows)
    choice = Mooncache().choose(asked, seen, rules, random.Random(1))
    usable = [at for at, row in enumerate(rows) if row.ready and at not in asked.exclude]
    takers = [at for at in usable if rows[at].role == "decode"]
    givers = [at for at in usable if rows[at].role == "prefill" and rows[at].pool]
    if asked.no_prefill or not takers:
        return
    handover_s = handovers_s(asked, seen)
    ends = []
    for group in {rows[at].group for at in givers}:
        options = [
            branches.cheapest(branches.options(asked, seen, rules, at))
            for at in givers
            if rows[at].group == group
        ]
        option = min(options, key=lambda option: option.score_s)
        placed = price(asked, seen, option.total_s, handover_s)
        ends += [
            option.score_s + float(placed.score_s[at])
            for at in takers
            if rows[at].group == group and rows[at].pool
        ]
    if not ends:
        assert choice.prefill == NO_ROW
        return
    option = branches.cheapest(branches.options(asked, seen, rules, choice.prefill))
    placed = price(asked, seen, option.total_s, handover_s)
    assert near(option.score_s + float(placed.score_s[choice.decode]), min(ends))


@given(clusters(), st.integers(1, 200_000), asks, st.integers(0, 99))
def test_the_same_question_has_the_same_answer(
    rows: tuple[Row, ...], n: int, fields: dict[str, Any], seed: int
) -> None:
    assert choose(rows, n, seed=seed, **fields) == choose(rows, n, seed=seed, **fields)


def test_costs_that_are_no_numbers_never_win_and_are_told() -> None:
    broken = Row("broken", prefill=PrefillCost(float("nan"), 0.0, 0.0, 0.0), local_tokens=4000)
    rows = (broken, Row("p", queue_s=50.0), Row("d", role="decode"))
    for policy in ("mooncache", "algorithm1", "local"):
        choice = choose(rows, 4096, policy=policy)
        assert names(choice, rows) == ("p", "d"), policy
        assert choice.invalid_costs == 1, policy
    alone = (broken, Row("d", role="decode", prefill=broken.prefill))
    assert choose(alone, 4096).reason == "no_instance"
    blind = (Row("p"), Row("d", role="decode", sequences=float("nan")), Row("e", role="decode", sequences=99))
    assert names(choose(blind, 4096), blind) == ("p", "e")


def test_the_longer_prefix_wins_until_its_queue_is_too_long() -> None:
    d = Row("d", role="decode")
    rows = (Row("rich", local_tokens=4000), Row("poor"), d)
    assert names(choose(rows), rows) == ("rich", "d")
    rows = (Row("rich", local_tokens=4000, queue_s=5.0), Row("poor"), d)
    assert names(choose(rows), rows) == ("poor", "d")


def test_nobody_reads_from_itself_and_slow_senders_are_seen() -> None:
    rows = (Row("p", queue_s=0.1), Row("owner", queue_s=9.0, local_tokens=4096), Row("d", role="decode"))
    rows = tuple(row.but(local_tokens=2 * row.local_tokens) for row in rows)
    fast = choose(rows, 9000, sources=(PrefixSource(1, 8192, 1e6),))
    assert (names(fast, rows), fast.branch, fast.source_row) == (("p", "d"), "fetch", 1)
    slow = choose(rows, 9000, sources=(PrefixSource(1, 8192, 10.0),))
    assert (slow.branch, slow.source_row) == ("local", NO_ROW)


def test_ties_are_broken_at_random_and_repeatably() -> None:
    rows = (*(Row(f"p{i}") for i in range(4)), Row("d", role="decode"))
    found = [names(choose(rows, seed=seed), rows)[0] for seed in range(64)]
    assert set(found) == {"p0", "p1", "p2", "p3"}
    assert found == [names(choose(rows, seed=seed), rows)[0] for seed in range(64)]


def test_only_both_instances_need_no_prefill_leg() -> None:
    rows = (Row("a", role="both"), Row("b", role="both", queue_s=9))
    assert names(choose(rows, 50_000), rows) == ("", "a")


def test_short_rests_are_computed_on_decode_and_long_ones_are_not() -> None:
    rows = (Row("p"), Row("d", role="decode", local_tokens=4000))
    assert names(choose(rows, 4096), rows) == ("", "d")
    assert names(choose(rows, 9000), rows) == ("p", "d")
    never = Rules(admission=AdmissionMode.NONE, inline_tokens_max=0)
    assert names(choose(rows, 4096, rules=never), rows) == ("p", "d")
    assert names(choose(rows, 4096, rules=never, no_prefill=True), rows) == ("", "d")


def test_inlining_does_not_stall_a_busy_decode_batch() -> None:
    slow = PrefillCost(0.0, 0.01, 0.0, 0.0)
    rows = (Row("p"), Row("d", role="decode", prefill=slow, local_tokens=3900, sequences=8))
    assert names(choose(rows, 4096, tbt_slo_s=0.5), rows) == ("p", "d")


def test_without_an_instance_of_the_right_role_another_one_serves() -> None:
    for row in (Row("p"), Row("d", role="decode")):
        assert names(choose((row,)), (row,)) == ("", row.name)


def test_decode_within_the_promise_goes_first() -> None:
    full = Row("full", role="decode", sequences=200, local_tokens=4096)
    rows = (Row("p"), full, Row("free", role="decode", sequences=2))
    assert names(choose(rows, tbt_slo_s=0.1), rows) == ("p", "free")


def test_the_decode_leg_that_runs_is_kept() -> None:
    rows = (Row("p"), Row("d1", role="decode"), Row("d2", role="decode", sequences=30))
    assert names(choose(rows, keep_decode="d2"), rows)[1] == "d2"
    assert names(choose(rows, keep_decode="gone"), rows)[1] == "d1"


@given(st.floats(0, 1000), st.floats(0, 1000), st.integers(0, 500), tokens)
def test_later_means_fewer_of_those_running_now(one: float, other: float, sequences: int, kv: int) -> None:
    rows = (Row(role="decode", sequences=sequences, kv_tokens=kv, stay_s=20.0),)
    sooner, later = sorted((one, other))
    asked, seen = request(rows, 1000), fleet(*rows)
    early, late = (price(asked, seen, at_s, 0.0).tbt_s[0] for at_s in (sooner, later))
    assert late <= early


def test_a_full_decode_instance_makes_wait() -> None:
    rows = (Row(role="decode", sequences=4, sequences_max=4, stay_s=8.0),)
    assert price(request(rows, 100), fleet(*rows), 0.0, 0.0).wait_s[0] == pytest.approx(2.0)
    rows = (Row(role="decode", sequences=4, kv_tokens=1000, kv_capacity_tokens=1100, stay_s=10.0),)
    waits = price(request(rows, 100, output_tokens=100), fleet(*rows), 0.0, 0.0).wait_s
    assert waits[0] == pytest.approx(10.0 * 100 / 1100), "what is too much has to end first"
    later = price(request(rows, 100, output_tokens=100), fleet(*rows), 5.0, 0.0).wait_s
    assert later[0] == 0.0, "it has ended when the prompt is computed"


def test_all_that_was_sent_comes_before_a_newcomer_whether_it_generates_or_not() -> None:
    sent = tuple(
        Row("d", role="decode", sequences=count, sequences_max=10, stay_s=20.0) for count in (9, 15, 30)
    )
    waits = [price(request((row,), 100), fleet(row), 0.0, 0.0).wait_s[0] for row in sent]
    assert waits == pytest.approx([0.0, 12.0, 42.0])


@given(st.integers(1, 400), st.floats(0.0, 60.0), st.floats(0.03, 1.0))
def test_held_newcomers_come_into_a_batch_that_keeps_the_promise(
    sequences: int, at_s: float, promised_s: float
) -> None:
    row = Row("d", role="decode", sequences=sequences, kv_tokens=1000.0 * sequences, stay_s=20.0)
    asked = request((row,), 1000, tbt_slo_s=promised_s)
    priced = price(asked, fleet(row), at_s, 0.0, holds=True)
    free = price(asked, fleet(row), at_s, 0.0)
    assert priced.tbt_s[0] <= promised_s
    assert free.wait_s[0] == 0.0, "without a promise that is kept there is always room"
    assert priced.wait_s[0] >= 0.0
    work_s = row.decode.tbt_s(sequences + 1, row.kv_tokens + asked.kv_tokens)
    assert (priced.wait_s[0] > 0) <= (work_s > placement.HELD_AT * promised_s)


def test_waiting_that_may_take_longer_is_counted_against_the_promise() -> None:
    rows = (Row("p", queue_s=24.0), Row("d", role="decode"))
    assert choose(rows, 2048, rules=RULES, ttft_slo_s=30.0).admitted
    late = choose(rows, 2048, rules=RULES, ttft_slo_s=30.0, lateness=0.5)
    assert late.reason == "ttft"
    idle = (Row("p"), Row("d", role="decode"))
    strict = choose(idle, 2048, rules=RULES, ttft_slo_s=1.0, lateness=0.9, ttft_strict=True)
    assert strict.admitted == (strict.ttft_s <= 1.0), "nothing is waited for"


def test_long_prompts_are_computed_together_and_short_ones_alone() -> None:
    group = tuple(
        Row(f"p{i}", pipeline=0, prefill=PrefillCost(0.07, 1.1e-4, 7.4e-10, 2.6e-6)) for i in range(4)
    )
    rows = (*group, Row("d", role="decode"))
    long: Choice = choose(rows, 128 * 1024)
    assert len(long.members) == 4
    assert long.ttft_s < 0.4 * group[0].prefill.seconds(128 * 1024, 0)
    assert choose(rows, 2048).members == ()
    busy = (*group[:2], *(row.but(queue_s=60.0) for row in group[2:]), rows[-1])
    assert set(choose(busy, 128 * 1024).members) == {0, 1}, "who is busy does not hold the others up"
    assert np.isfinite(long.compute_s)
