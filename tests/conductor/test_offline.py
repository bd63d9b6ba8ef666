"""Offline requests take what is idle: when they are taken, when they give way, and that no online request pays."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mooncache.conductor.core.decisions import Decision, PoolAnswer, SchedulingRequest
from mooncache.conductor.core.policy import find, offline
from mooncache.conductor.core.policy.types import Choice, PrefillCost, Reason, Rules
from mooncache.conductor.core.registry import InstanceInfo, InstanceState
from mooncache.conductor.core.scheduler import Scheduler
from mooncache.conductor.state import native_index
from tests.conductor.fleets import Row, fleet, request
from tests.conductor.support import scheduler_settings

RULES = Rules(inline_tokens_max=512)
BUSY = ((0.0,) * 53 + (9.0,),) * 2  # seconds of computing that were asked for online, by cost
DECODE = Row("d", role="decode", sequences_max=10, kv_capacity_tokens=100_000)
PREFILL = Row("p")


def judged(*rows: Row, prompt_tokens: int = 1000, rules: Rules = RULES, **fields: Any) -> Choice:
    fields = {"offline": True, "demand": BUSY, "tbt_slo_s": 0.1, "ttft_slo_s": 2.0, **fields}
    asked = request(rows, prompt_tokens, **fields)
    return offline.choose(find("mooncache"), asked, fleet(*rows), rules, random.Random(1))


def test_what_is_idle_is_taken() -> None:
    assert judged(PREFILL, DECODE).admitted
    assert judged(PREFILL, DECODE.but(sequences=5.0)).admitted


@pytest.mark.parametrize(
    "rows",
    [
        (PREFILL.but(queue_s=0.05, queue_prompts=1), DECODE),
        (PREFILL, DECODE.but(sequences=8.0)),
        (PREFILL, DECODE.but(sequences=1.0, kv_tokens=79_500.0)),
        (PREFILL, DECODE.but(sequences=70.0, sequences_max=100)),
    ],
    ids=["a prompt waits", "places", "memory for KV", "time of a step"],
)
def test_it_gives_way_where_an_online_request_would_notice(rows: tuple[Row, ...]) -> None:
    found = judged(*rows)
    assert (found.admitted, found.reason) == (False, Reason.OFFLINE)
    assert offline.RETRY_MIN_S <= found.retry_after_s <= offline.RETRY_MAX_S
    assert judged(*rows, offline=False, ttft_slo_s=30.0).admitted, "an online request is taken there"


def test_one_short_prompt_waits_behind_another_and_no_second_one() -> None:
    """So an engine has the next prompt when it ends one: predictions of short ones are mostly the way to the engine."""
    quick = PREFILL.but(prefill=PrefillCost(0.03, 1e-5, 0.0, 0.0))  # 40 ms for 1,000 tokens
    behind_one = quick.but(queue_s=0.04, queue_prompts=1)
    assert judged(behind_one, DECODE).admitted
    assert judged(behind_one, DECODE, ttft_slo_s=0.3).reason is Reason.OFFLINE, (
        "a fifth of the promise is less"
    )
    assert judged(quick.but(queue_s=0.07, queue_prompts=1), DECODE).reason is Reason.OFFLINE
    assert judged(quick.but(queue_s=0.04, queue_prompts=2), DECODE).reason is Reason.OFFLINE
    short = quick.but(prefill=PrefillCost(0.001, 5e-6, 0.0, 0.0))  # 6 ms
    assert judged(short.but(queue_s=0.018, queue_prompts=3), DECODE).admitted
    assert judged(short.but(queue_s=0.021, queue_prompts=3), DECODE).reason is Reason.OFFLINE


def test_another_instance_is_idle_while_the_cheapest_is_busy() -> None:
    held = PREFILL.but(local_tokens=9_000, queue_s=0.3, queue_prompts=1)
    found = judged(held, Row("idle"), DECODE, prompt_tokens=10_000, ttft_slo_s=30.0)
    assert found.admitted and found.prefill == 1


def test_a_long_prompt_runs_while_nothing_is_asked_for_online_and_not_otherwise() -> None:
    assert judged(PREFILL, DECODE, prompt_tokens=20_000).reason is Reason.OFFLINE
    assert judged(PREFILL, DECODE, prompt_tokens=20_000, demand=()).admitted


def test_a_share_of_nothing_takes_none_and_other_policies_are_held_back_as_well() -> None:
    assert not judged(PREFILL, DECODE, rules=Rules(inline_tokens_max=512, offline_share=0.0)).admitted
    rows = (PREFILL.but(queue_s=0.05), DECODE)
    asked = request(rows, 1000, offline=True)
    found = offline.choose(find("least_load"), asked, fleet(*rows), RULES, random.Random(1))
    assert found.reason is Reason.OFFLINE


def scheduler() -> Scheduler:
    core = Scheduler(scheduler_settings(), random.Random(1), native_index)
    core.register(InstanceInfo("i", 1, "both", "m", group=5), InstanceState.READY, 0.0)
    return core


def ask(core: Scheduler, name: str, now_s: float = 0.0, **more: Any) -> Decision:
    asked = SchedulingRequest(name, "m", prompt_tokens=4000, group=5, **more)
    return core.schedule(asked, PoolAnswer(), now_s, 0.0)


def test_online_requests_do_not_pay_for_offline_ones_of_their_tenant() -> None:
    core = scheduler()
    ask(core, "r1", tenant="b")
    core = scheduler()
    assert ask(core, "o1", tenant="a", offline=True).choice.admitted
    assert core.models.of("m").offered_load.total_s == 0.0, "nobody makes room for it"
    ask(core, "r1", tenant="b")
    assert core.shares.share("a", 0.0) == 1.0
    assert core.models.of("m").offered_load.total_s > 0.0


def test_one_that_gave_way_leaves_no_record() -> None:
    core = scheduler()
    ask(core, "r1")
    kept = len(core.records)
    refused = [ask(core, f"o{number}", offline=True) for number in range(5)]
    assert {each.choice.reason for each in refused} == {Reason.OFFLINE}
    assert "Nothing is idle" in refused[0].record.message
    assert len(core.records) == kept
    core.check()
