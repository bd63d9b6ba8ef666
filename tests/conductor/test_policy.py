"""The policies as properties: what must hold for every prompt, every cache and every load."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.conductor.core.policy import admission, decode, plan, prefill
from mooncache.conductor.core.policy.facts import (
    Awaited,
    Choice,
    DecodeCost,
    InstanceFacts,
    PrefillCost,
    Request,
    Rules,
    TransferCost,
)

COST = PrefillCost(0.01, 1e-4, 1e-9, 1e-6)
DECODE = DecodeCost(0.02, 0.001, 1e-8)
FAST = TransferCost(0.001, 1e6)
RULES = Rules()
OPEN = Rules(admission=False)

seconds = st.floats(0, 100)
tokens = st.integers(0, 200_000)


def facts(name: str = "i", **fields: Any) -> InstanceFacts:
    given = {"role": "prefill", "ready": True, "prefill": COST, "transfer": FAST, "decode": DECODE}
    return InstanceFacts(instance_id=name, **{**given, **fields})


def request(n: int = 4096, **fields: Any) -> Request:
    return Request(prompt_tokens=n, **{"cacheable_tokens": n // 16 * 16, **fields})


def cost(asked: Request, one: InstanceFacts) -> float:
    return prefill.price(asked, one).best.score_s


costs = st.builds(
    lambda a, b, c, share: PrefillCost(a, b, c, b * share),
    st.floats(0, 1),
    st.floats(1e-9, 0.01),
    st.floats(0, 1e-6),
    st.floats(0, 1),
)


@given(costs, st.integers(1, 200_000), tokens, tokens, seconds)
def test_more_own_cache_never_costs_more(
    model: PrefillCost, n: int, one: int, other: int, queue_s: float
) -> None:
    less, more = sorted((one, other))
    asked = request(n, pool_tokens=n // 2)
    poorer = cost(asked, facts(prefill=model, local_tokens=less, queue_s=queue_s))
    richer = cost(asked, facts(prefill=model, local_tokens=more, queue_s=queue_s))
    assert richer <= poorer * (1 + 1e-9) + 1e-9


@given(costs, st.integers(1, 200_000), tokens, tokens, seconds, seconds)
def test_pool_and_running_requests_never_cost_more(
    model: PrefillCost, n: int, local: int, pool: int, queue_s: float, ready_s: float
) -> None:
    one = facts(prefill=model, local_tokens=local, queue_s=queue_s)
    alone = cost(request(n), one)
    assert cost(request(n, pool_tokens=pool), one) <= alone
    awaited = (Awaited(min(n, pool), ready_s, "other"),)
    assert cost(request(n, awaited=awaited), one) <= alone


@given(st.integers(1, 200_000), tokens, tokens, seconds, seconds)
def test_cost_grows_with_the_queue(n: int, local: int, pool: int, one: float, other: float) -> None:
    asked = request(n, pool_tokens=pool, awaited=(Awaited(n, 3.0, "other"),))
    shorter, longer = sorted((one, other))
    low = cost(asked, facts(local_tokens=local, queue_s=shorter))
    assert low <= cost(asked, facts(local_tokens=local, queue_s=longer))


@given(st.integers(32, 100_000), seconds, seconds)
def test_waiting_is_chosen_only_when_cheaper(n: int, ready_s: float, queue_s: float) -> None:
    awaited = Awaited(n // 16 * 16, ready_s, "other")
    option = prefill.price(request(n, awaited=(awaited,)), facts(queue_s=queue_s))
    others = [branch.score_s for branch in option.branches if branch.kind != "wait"]
    assert (option.best.kind == "wait") == (option.best.score_s < min(others))
    late_s = option.best.total_s - option.branches[0].total_s
    assert late_s <= prefill.WORK_WEIGHT * option.branches[0].compute_s, "not for long to save little"
    if option.best.kind == "wait":
        assert option.best.ready_s >= ready_s


def test_branches_are_what_the_papers_say() -> None:
    one = facts(local_tokens=1024, queue_s=0.5, transfer=TransferCost(0.0, 10_000.0))
    option = prefill.price(request(4096, pool_tokens=3072), one)
    local, fetch = option.branches
    assert local.total_s == pytest.approx(0.5 + COST.seconds(4096, 1024))
    # 2048 tokens at 10,000 a second take 0.2 s, which the queue hides.
    assert fetch.total_s == pytest.approx(0.5 + COST.seconds(4096, 3072))
    assert option.best is fetch
    slow = prefill.price(request(4096, pool_tokens=3072), one._replace(transfer=TransferCost(0.0, 10.0)))
    assert slow.best.kind == "local"


def test_other_passports_and_engines_without_pool_fetch_nothing() -> None:
    asked = request(4096, pool_tokens=4096, group=1, awaited=(Awaited(4096, 0.0, "x"),))
    for one in (facts(group=2), facts(group=1, pool=False)):
        assert [branch.kind for branch in prefill.price(asked, one).branches] == ["local"]


def test_what_the_same_instance_computes_is_waited_for_without_transfer() -> None:
    asked = request(4096, awaited=(Awaited(4096, 0.2, "i"),))
    option = prefill.price(asked, facts(queue_s=0.2, pool=False))
    assert (option.best.kind, option.best.fetch_tokens) == ("wait", 0)


# --- the whole choice ---------------------------------------------------------------------------------------------


@st.composite
def clusters(draw: Any) -> list[InstanceFacts]:
    count = draw(st.integers(1, 8))
    return [
        facts(
            f"i{number}",
            role=draw(st.sampled_from(("prefill", "decode", "both"))),
            ready=draw(st.booleans()),
            group=draw(st.integers(0, 2)),
            pool=draw(st.booleans()),
            local_tokens=draw(tokens),
            queue_s=draw(seconds),
            sequences=draw(st.integers(0, 300)),
            sequences_max=draw(st.integers(0, 256)),
            kv_used_tokens=draw(tokens),
            kv_capacity_tokens=draw(st.integers(0, 1_000_000)),
            turnover_s=draw(st.floats(0, 1000)),
        )
        for number in range(count)
    ]


@settings(max_examples=300)
@given(
    clusters(),
    st.integers(1, 200_000),
    tokens,
    st.sets(st.sampled_from([f"i{n}" for n in range(8)])),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1 << 32),
)
def test_every_choice_is_allowed(
    cluster: list[InstanceFacts],
    n: int,
    pool: int,
    exclude: set[str],
    no_prefill: bool,
    refuses: bool,
    seed: int,
) -> None:
    asked = request(n, pool_tokens=pool, exclude=frozenset(exclude), no_prefill=no_prefill)
    choice = plan.choose(asked, cluster, Rules(admission=refuses), random.Random(seed))
    usable = {one.instance_id for one in cluster if one.ready} - exclude
    if not usable:
        assert (choice.admitted, choice.reason) == (False, "no_instance")
        return
    assert choice.decode is not None
    assert choice.branch is not None
    assert choice.decode.facts.instance_id in usable
    assert (choice.prefill is None) != (choice.inline is None)
    assert choice.admitted == (choice.reason == "admitted")
    assert choice.admitted or (refuses and choice.retry_after_s >= RULES.retry_after_min_s)
    assert 0 <= choice.queue_s <= choice.ttft_s
    if any(one.role != "prefill" for one in cluster if one.instance_id in usable):
        assert choice.decode.facts.role != "prefill"
    if choice.prefill is not None:
        assert not no_prefill
        assert choice.prefill.facts.instance_id in usable - {choice.decode.facts.instance_id}
        assert choice.prefill.facts.role == "prefill"
        assert choice.prefill.facts.group == choice.decode.facts.group
        assert choice.prefill.facts.pool
        assert choice.decode.facts.pool


def choose(asked: Request, *cluster: InstanceFacts, rules: Rules = OPEN, seed: int = 0) -> Choice:
    return plan.choose(asked, cluster, rules, random.Random(seed))


def names(choice: Choice) -> tuple[str, str]:
    assert choice.decode is not None
    return choice.prefill.facts.instance_id if choice.prefill else "", choice.decode.facts.instance_id


def test_the_longer_prefix_wins_until_its_queue_is_too_long() -> None:
    d = facts("d", role="decode")
    rich, poor = facts("rich", local_tokens=4000), facts("poor")
    assert names(choose(request(4096), rich, poor, d)) == ("rich", "d")
    assert names(choose(request(4096), rich._replace(queue_s=5.0), poor, d)) == ("poor", "d")


def test_ties_are_broken_at_random_and_repeatably() -> None:
    cluster = [facts(f"p{i}") for i in range(4)] + [facts("d", role="decode")]
    found = [names(choose(request(4096), *cluster, seed=seed))[0] for seed in range(64)]
    assert set(found) == {"p0", "p1", "p2", "p3"}
    assert found == [names(choose(request(4096), *cluster, seed=seed))[0] for seed in range(64)]


def test_only_both_instances_need_no_prefill_leg() -> None:
    assert names(choose(request(50_000), facts("a", role="both"), facts("b", role="both", queue_s=9))) == (
        "",
        "a",
    )


def test_short_rests_are_computed_on_decode_and_long_ones_are_not() -> None:
    p, d = facts("p"), facts("d", role="decode", local_tokens=4000)
    assert names(choose(request(4096), p, d)) == ("", "d")
    assert names(choose(request(9000), p, d)) == ("p", "d")
    never = Rules(admission=False, inline_tokens_max=0)
    assert names(choose(request(4096), p, d, rules=never)) == ("p", "d")
    assert names(choose(request(4096, no_prefill=True), p, d, rules=never)) == ("", "d")


def test_inlining_does_not_stall_a_busy_decode_batch() -> None:
    slow = PrefillCost(0.0, 0.01, 0.0, 0.0)
    p, d = facts("p"), facts("d", role="decode", prefill=slow, local_tokens=3900, sequences=8)
    assert names(choose(request(4096, tbt_slo_s=0.5), p, d)) == ("p", "d")


def test_without_an_instance_of_the_right_role_another_one_serves() -> None:
    assert names(choose(request(4096), facts("p"))) == ("", "p")
    assert names(choose(request(4096), facts("d", role="decode"))) == ("", "d")


def test_decode_within_the_promise_goes_first() -> None:
    asked = request(4096, tbt_slo_s=0.1)
    full = facts("full", role="decode", sequences=200, local_tokens=4096)
    free = facts("free", role="decode", sequences=2)
    assert names(choose(asked, facts("p"), full, free)) == ("p", "free")


def test_the_decode_leg_that_runs_is_kept() -> None:
    d1, d2 = facts("d1", role="decode"), facts("d2", role="decode", sequences=30)
    assert names(choose(request(4096, keep_decode="d2"), facts("p"), d1, d2))[1] == "d2"
    assert names(choose(request(4096, keep_decode="gone"), facts("p"), d1, d2))[1] == "d1"


@given(st.floats(0, 1000), st.floats(0, 1000), st.integers(0, 500), tokens)
def test_later_means_fewer_of_those_running_now(one: float, other: float, sequences: int, kv: int) -> None:
    d = facts(role="decode", sequences=sequences, kv_used_tokens=kv, turnover_s=20.0)
    sooner, later = sorted((one, other))
    asked = request(1000)
    early = decode.price(asked, d, sooner, inline=False)
    assert decode.price(asked, d, later, inline=False).tbt_s <= early.tbt_s


def test_a_full_decode_instance_makes_wait() -> None:
    d = facts(role="decode", sequences=4, sequences_max=4, turnover_s=8.0)
    assert decode.price(request(100), d, 0.0, inline=False).wait_s == pytest.approx(2.0)
    tight = facts(role="decode", sequences=4, kv_used_tokens=1000, kv_capacity_tokens=1100, turnover_s=10.0)
    waits = decode.price(request(100, output_tokens=100), tight, 0.0, inline=False).wait_s
    assert waits == pytest.approx(1.0)


# --- admission ----------------------------------------------------------------------------------------------------


def option(**fields: Any) -> Any:
    return decode.price(request(100), facts(role="decode", **fields), 0.0, inline=True)


def test_refusals_name_their_reason_and_when_to_come_back() -> None:
    asked = request(100, ttft_slo_s=1.0, tbt_slo_s=0.1)
    assert admission.refusal(asked, RULES, 0.9, 0.5, option()) == ("", 0.0)
    assert admission.refusal(asked, RULES, 3.0, 2.5, option()) == ("ttft", 2.0)
    reason, wait_s = admission.refusal(asked, RULES, 0.5, 0.0, option(sequences=200, turnover_s=100.0))
    assert (reason, wait_s) == ("tbt", 0.5)
    full = option(sequences=8, sequences_max=8, turnover_s=80.0)
    reason, wait_s = admission.refusal(asked, RULES, 11.0, 0.0, full)
    assert (reason, wait_s) == ("capacity", 9.0)
    assert admission.refusal(asked, OPEN, 99.0, 98.0, full) == ("", 0.0)


def test_what_waiting_cannot_mend_is_no_reason_unless_asked_for() -> None:
    asked = request(100, ttft_slo_s=1.0, tbt_slo_s=0.001)
    assert admission.refusal(asked, RULES, 5.0, 0.0, option()) == ("", 0.0)
    strict = request(100, ttft_slo_s=1.0, ttft_strict=True)
    assert admission.refusal(strict, RULES, 5.0, 0.0, option())[0] == "ttft"
    strict = request(100, tbt_slo_s=0.001, tbt_strict=True)
    assert admission.refusal(strict, RULES, 0.5, 0.0, option())[0] == "tbt"


def test_on_a_slow_machine_a_queue_alone_is_no_reason() -> None:
    """An idle instance would take 40 s: with something before it that is no worse a time to come."""
    asked = request(100, ttft_slo_s=30.0, tbt_slo_s=1.0)
    assert admission.refusal(asked, RULES, 45.0, 5.0, option()) == ("", 0.0)
    assert admission.refusal(asked, RULES, 100.0, 60.0, option()) == ("ttft", 20.0)
    slow = DecodeCost(1.5, 0.01, 0.0)
    assert admission.refusal(asked, RULES, 1.0, 0.0, option(sequences=3, decode=slow)) == ("", 0.0)
    crowd = option(sequences=200, decode=slow)
    assert admission.refusal(asked, RULES, 1.0, 0.0, crowd)[0] == "tbt"
    named = request(100, tbt_slo_s=1.0, tbt_strict=True)
    assert admission.refusal(named, RULES, 1.0, 0.0, option(sequences=3, decode=slow))[0] == "tbt"


@given(st.floats(0, 100), st.floats(0, 100), st.integers(-10, 10), st.integers(-10, 10))
def test_the_more_important_request_is_never_refused_alone(
    ttft_s: float, queue_s: float, one: int, other: int
) -> None:
    low, high = sorted((one, other))
    less = admission.refusal(request(100, priority=low), RULES, ttft_s, queue_s, option())
    more = admission.refusal(request(100, priority=high), RULES, ttft_s, queue_s, option())
    assert not more[0] or less[0]
