"""What a conductor that runs for months must not do: drift, leak, follow what cannot be, forget what failed."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mooncache import errors
from mooncache.conductor.background import replicate_prefixes
from mooncache.conductor.core.decisions import PoolAnswer, SchedulingRequest
from mooncache.conductor.core.fleet_book import Assignment, InstanceShape
from mooncache.conductor.core.hot_prefixes import HotPrefixes, Speed
from mooncache.conductor.core.policy.fleet import PREFILL
from mooncache.conductor.core.policy.types import Branch, Choice, Request, TransferCost
from mooncache.conductor.core.progress import LegReport, Phase, ProgressReport
from mooncache.conductor.core.registry import Instance, InstanceInfo, InstanceState
from mooncache.conductor.core.scheduler import Scheduler
from mooncache.conductor.shell.instruments import ConductorMetrics
from mooncache.conductor.state import native_index
from mooncache.kvcache.instance_load import InstanceLoad
from mooncache.kvcache.leg_hint import CacheReport, LegRole
from mooncache.runtime.metrics import Metrics
from tests.conductor.fleets import Row, choose, pair
from tests.conductor.support import BLOCK, chain, scheduler_settings

NOTHING = np.zeros(2, dtype=np.int64)


def assignment(name: str, output_tokens: float = 100.0, **choice: object) -> Assignment:
    asked = Request(prompt_tokens=1000, local=NOTHING, output_tokens=output_tokens, sequences=3)
    made = Choice(True, "admitted", prefill=0, decode=1, compute_s=0.1, ttft_s=0.1, tbt_s=0.05)
    return Assignment(name, replace(made, **choice), asked)  # type: ignore[arg-type]


def test_an_idle_instance_holds_exactly_nothing() -> None:
    book, rng = pair(), random.Random(1)
    for number in range(50):
        book.assign(assignment(str(number), rng.uniform(1, 5000)), 0.0)
        book.first_token(str(number), 1.0)
    for number in rng.sample(range(50), 50):
        book.ended(str(number), 2.0)
    seen = book.view(2.0)
    for column in (seen.sequences, seen.kv_tokens, seen.batch_sequences, seen.batch_kv_tokens, seen.queue_s):
        assert column.tolist() == [0.0, 0.0], "rounding is left over: an idle instance looks used"


def test_a_prompt_beyond_the_memory_waits_for_what_runs_there_not_for_ever() -> None:
    rows = (Row("d", role="both", sequences=1, kv_tokens=1e-9, kv_capacity_tokens=1000, stay_s=10.0),)
    assert choose(rows, 4096).wait_s <= 10.0


def test_a_late_end_of_a_fetch_does_not_free_the_links_of_whom_comes_after() -> None:
    book = pair()
    book.add("e", InstanceShape(role=PREFILL, transfer=TransferCost(0.0, 900.0)))
    book.assign(assignment("1", prefill=2, branch=Branch.FETCH, fetch_tokens=10), 0.0)
    book.remove("e")
    assert book.add("f", InstanceShape(role=PREFILL, transfer=TransferCost(0.0, 900.0))) == 2
    book.assign(assignment("2", prefill=2, branch=Branch.FETCH, fetch_tokens=10), 0.0)
    book.started("1", 1.0)
    assert book.view(1.0).fetch_tokens_per_s[2] == 450.0, "the newcomer's fetch is still there"


# --- copies of hot prefixes ---------------------------------------------------------------------------------------


def test_prompts_of_one_block_do_not_fill_the_memory() -> None:
    hot = HotPrefixes(1e6)
    for number in range(20_000):
        hot.use("m", number.to_bytes(32, "little"), 1, BLOCK, 0.0)
    hot.check()
    assert len(hot) <= 10_000, "keys are counted in bytes, but what is around them is not"


def test_all_orders_of_a_plan_that_could_not_be_given_are_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = {"m": Speed(tokens_per_s=5.0, bytes_per_token=1, block_tokens=BLOCK)}
    monkeypatch.setattr(replicate_prefixes, "speeds", lambda _state: slow)
    hot, asked = HotPrefixes(1e9), []

    async def order(keys: bytes, copies: int, near: list[str], tenant: str, *, term: int) -> str:
        asked.append(keys)
        raise errors.MasterUnavailable("gone")

    for name in "abc":
        for _ in range(100):
            hot.use("m", chain(name, 1), 1, BLOCK, 0.0)
    clock = SimpleNamespace(now_s=lambda: 0.0)
    state: Any = SimpleNamespace(
        copies=SimpleNamespace(order=order),
        leads=True,
        leadership=SimpleNamespace(term=1),
        section=SimpleNamespace(replicate_bytes_per_s=1e9),
        pool=SimpleNamespace(connected=True, node_count=8, nodes_on=lambda _hosts: []),
        hot=hot,
        clock=clock,
        instruments=ConductorMetrics(Metrics("conductor")),
    )
    asyncio.run(replicate_prefixes.run_once(state))
    assert len(asked) == 1, "a master that does not answer is not asked again and again"
    assert len(hot.plan(slow, 8, 1.0)) == 3


def test_an_order_is_never_larger_than_a_master_takes() -> None:
    hot = HotPrefixes(1e12)
    for _ in range(300):
        hot.use("m", bytes(32 * 262_144), 262_144, BLOCK, 0.0)
    for order in hot.plan({"m": Speed(1.0, 1, BLOCK)}, 1000, 0.0):
        assert order.copies <= 64
        assert len(order.keys) <= 32 * 65_536


def test_blocks_beyond_the_whole_budget_do_not_hold_up_those_of_other_models() -> None:
    hot = HotPrefixes(1000.0)
    for _ in range(300):
        hot.use("huge", chain("a", 1), 1, BLOCK, 0.0)
        hot.use("m", chain("b", 1), 1, BLOCK, 0.0)
        hot.use("huge", chain("a", 1), 1, BLOCK, 0.0)
    speeds = {"huge": Speed(1.0, 1 << 30, BLOCK), "m": Speed(1.0, 1, BLOCK)}
    assert [order.model for order in hot.plan(speeds, 8, 0.0)] == ["m"]


# --- snapshots ----------------------------------------------------------------------------------------------------


def crowd(core: Scheduler, count: int) -> None:
    for number in range(count):
        core.register(InstanceInfo(f"i{number}", 1, "both", "m", group=5), InstanceState.READY, 0.0)


def request(number: int, keys: bytes = b"", **more: Any) -> SchedulingRequest:
    return SchedulingRequest(f"r{number}", "m", **{"prompt_tokens": 640, "keys": keys, "group": 5, **more})


def test_what_settles_beside_the_event_loop_touches_no_snapshots() -> None:
    """A duty packs candidates in a thread while decisions pack others: only the event loop counts their bytes."""
    core = Scheduler(scheduler_settings(snapshot_bytes_max=60_000), random.Random(1), native_index)
    crowd(core, 40)
    record = core.schedule(request(1), PoolAnswer(), 0.0, 0.0).record
    packed = core.pack_candidates(record)
    assert packed and record.candidates and record.policy_view is None
    assert (len(core.snapshots), core.snapshots.size_bytes) == (0, 0)
    core.snapshots.keep(record.decision_id, packed)
    assert core.snapshots.find(record.decision_id) is not None


# --- instances come, change and go --------------------------------------------------------------------------------


def test_an_instance_that_is_gone_leaves_no_cost_models_behind() -> None:
    core = Scheduler(scheduler_settings(suspect_after_s=1, lease_s=2), random.Random(1), native_index)
    info = InstanceInfo("a", 1, "both", "m", group=5, kv_bytes_per_token=1000)
    core.register(info, InstanceState.READY, 0.0)
    decision = core.schedule(request(1), PoolAnswer(), 0.0, 0.0)
    core.expire(10.0)
    leg = LegReport(LegRole.DECODE, "a", cache=CacheReport(loaded_bytes=1 << 20, load_ms=10.0))
    report = ProgressReport(Phase.FINISHED, elapsed_s=1.0, output_tokens=5, legs=(leg,))
    core.report_progress(decision.decision_id, report, 11.0)
    assert "a" not in core.models.of("m").transfers


def test_an_engine_that_was_started_again_has_nothing_of_others() -> None:
    core = Scheduler(scheduler_settings(), random.Random(1), native_index)
    info = InstanceInfo("a", 1, "both", "m", group=5, kv_capacity_tokens=1000)
    engine: Instance = core.register(info, InstanceState.READY, 0.0)
    for now_s in (0.1, 0.2, 0.3):
        core.report(engine, InstanceState.READY, InstanceLoad(running=9, waiting=9, kv_usage=1.0), "", now_s)
    assert core.models.of("m").book.view(0.3).sequences.tolist() == [18.0]
    core.register(replace(info, incarnation=2), InstanceState.READY, 0.4)
    seen = core.models.of("m").book.view(0.4)
    assert [seen.sequences[0], seen.kv_tokens[0], seen.queue_s[0]] == [0.0, 0.0, 0.0]


def test_an_instance_with_larger_blocks_does_not_hold_more_than_the_prompt() -> None:
    core = Scheduler(scheduler_settings(), random.Random(1), native_index)
    engine = core.register(
        InstanceInfo("a", 1, "both", "m", group=5, block_tokens=64), InstanceState.READY, 0.0
    )
    keys = chain("x", 40)
    core.cache.apply(engine, full=True, stored=keys, removed=b"", sequence=1, keys_max=100)
    decision = core.schedule(request(1, keys), PoolAnswer(), 0.0, 0.0)
    assert decision.computed_tokens >= 0
    assert core.models.of("m").book.view(0.0).queue_tokens[0] >= 0


def test_an_engine_that_was_started_again_generates_nothing_of_before() -> None:
    """Its gateway may have died with it: then nobody tells of the end."""
    core = Scheduler(scheduler_settings(), random.Random(1), native_index)
    info = InstanceInfo("a", 1, "both", "m", group=5)
    engine = core.register(info, InstanceState.READY, 0.0)
    decision = core.schedule(request(1), PoolAnswer(), 0.0, 0.0)
    core.register(info, InstanceState.READY, 0.1)
    assert core.assigned(engine) == 1, "the same engine told again who it is"
    core.register(replace(info, incarnation=2), InstanceState.READY, 0.2)
    assert core.assigned(engine) == 0
    assert decision.record.state == "lost"
    assert not core.report_progress(decision.decision_id, ProgressReport(Phase.FAILED, 1.0), 0.3).known
    core.check()
