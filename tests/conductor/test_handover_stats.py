"""Blocks that a prefill leg computed and that do not reach the decode leg: the conductor hears of it and learns."""

from __future__ import annotations

import random
from pathlib import Path

from mooncache.conductor.core import outcome
from mooncache.conductor.core.decisions import (
    Decision,
    PoolAnswer,
    PoolState,
    SchedulerSettings,
    SchedulingRequest,
)
from mooncache.conductor.core.handover_stats import AWAY_FIRST_S, AWAY_MAX_S, HandoverStats
from mooncache.conductor.core.progress import LegReport, Phase, ProgressReport
from mooncache.conductor.core.records import DecisionState
from mooncache.conductor.core.registry import InstanceInfo, InstanceState
from mooncache.conductor.core.scheduler import Scheduler
from mooncache.kvcache.block_index import native_index
from mooncache.kvcache.leg_hint import CacheReport, LegRole
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conductor.support import Conductor, chain, pair, scheduler_settings, serve

BLOCKS = 200
MISS = CacheReport(asked_tokens=3200, outcome="miss")
TIMEOUT = CacheReport(asked_tokens=3200, outcome="timeout")
HIT = CacheReport(asked_tokens=3200, hit_tokens=3200, outcome="hit")


def prefill(ended_ms: float = 0.0) -> LegReport:
    return LegReport(LegRole.PREFILL, "p", sent_ms=1.0, ended_ms=ended_ms, cache=MISS)


def decode(cache: CacheReport) -> LegReport:
    return LegReport(LegRole.DECODE, "d", cache=cache)


class Clockwork:
    """A scheduler with a prefill and a decode instance, and requests one after the other."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        self.core = Scheduler(settings or scheduler_settings(), random.Random(1), native_index)
        for name, role in (("p", "prefill"), ("d", "decode")):
            info = InstanceInfo(name, 1, role, "m", group=1, kv_bytes_per_token=1024, max_sequences=64)
            self.core.register(info, InstanceState.READY, 0.0)
        self.now_s = 0.0
        self.count = 0

    def schedule(self) -> Decision:
        self.count += 1
        request = SchedulingRequest(
            f"r{self.count}", "m", BLOCKS * 16 + 5, "t", chain(f"k{self.count}", BLOCKS), group=1
        )
        return self.core.schedule(request, PoolAnswer(PoolState.OK), self.now_s, 0.0)

    def tell(self, decision: Decision, phase: Phase, *legs: LegReport) -> outcome.Learned:
        report = ProgressReport(phase, output_tokens=8, legs=legs)
        return self.core.report_progress(decision.decision_id, report, self.now_s)

    def serve(self, *, landed: bool, prefill_s: float = 0.2) -> Decision:
        """One request with both legs; when its blocks do not land, the decode leg waits as long as it was told."""
        decision = self.schedule()
        assert decision.prefill == "p"
        self.now_s += prefill_s
        self.tell(decision, Phase.PREFILLED, prefill(prefill_s * 1e3))
        self.now_s += 0.05 if landed else max(0.0, decision.wait_s - prefill_s) + 0.1
        self.tell(decision, Phase.FIRST_TOKEN)
        self.now_s += 0.5
        self.tell(decision, Phase.FINISHED, decode(HIT if landed else TIMEOUT))
        return decision


def test_waits_shrink_to_what_was_observed() -> None:
    work = Clockwork()
    first = work.serve(landed=True)
    assert first.wait_s > 30, "the speed of the engine is not known"
    for _ in range(20):
        last = work.serve(landed=True)
    assert last.wait_s < 1.5, "prefills of 0.2 s whose blocks come within 0.05 s"
    assert last.handover_s < 0.5


def test_a_pair_whose_blocks_do_not_come_is_left_alone() -> None:
    work = Clockwork()
    for _ in range(5):
        work.serve(landed=True)
    missed = work.serve(landed=False)
    assert missed.record.observed["handover"] == outcome.HandoverResult.MISSED
    inline = work.schedule()
    assert (inline.prefill, inline.decode, inline.avoided) == ("", "d", True)
    work.core.close(inline.decision_id, DecisionState.FINISHED, work.now_s)
    work.now_s += AWAY_FIRST_S + 1
    work.serve(landed=False)
    work.now_s += AWAY_FIRST_S + 1
    assert work.schedule().avoided, "twice as long the second time"
    work.now_s += AWAY_FIRST_S
    assert work.serve(landed=True).record.observed["handover"] == outcome.HandoverResult.LANDED
    assert not work.schedule().avoided
    work.core.check()


def test_it_is_known_before_a_long_answer_has_ended() -> None:
    work = Clockwork()
    for _ in range(5):
        work.serve(landed=True)
    decision = work.schedule()
    work.now_s += 0.2
    work.tell(decision, Phase.PREFILLED, prefill())
    work.now_s += decision.wait_s
    assert work.tell(decision, Phase.FIRST_TOKEN).handover == outcome.HandoverResult.MISSED
    assert work.schedule().avoided


def test_the_margin_for_unknown_engines_ends_although_nothing_is_learnt_of_their_speed() -> None:
    """Of prompts with several sequences no speed is learnt; each prefill leg that ends well counts all the same."""
    work = Clockwork()
    for _ in range(4):
        decision = work.serve(landed=True, prefill_s=7200.0)  # too long to be believed
    assert work.core.models.of("m").prefill(InstanceInfo("p", 1, "prefill", "m")).count == 0
    assert decision.wait_s < 30


def test_blocks_get_the_configured_time_at_least() -> None:
    work = Clockwork(scheduler_settings(handover_margin_s=60.0))
    for _ in range(5):
        decision = work.serve(landed=True)
        assert decision.handover_s == 60.0
    work = Clockwork()
    for _ in range(5):
        decision = work.serve(landed=True)
    assert decision.handover_s < 1.0


def test_a_restarted_engine_is_tried_again() -> None:
    handover_stats = HandoverStats(scheduler_settings().handover_margin_s)
    assert handover_stats.failed("p", "d", 0.0) == AWAY_FIRST_S
    assert handover_stats.avoids("p", "d", 1.0)
    assert not handover_stats.avoids("p", "e", 1.0)
    handover_stats.forget("p")
    assert not handover_stats.avoids("p", "d", 1.0)
    now_s = 0.0
    for _ in range(40):
        now_s += handover_stats.failed("p", "d", now_s)
    assert handover_stats.failed("p", "d", now_s) == AWAY_MAX_S


def test_what_is_handed_over_has_a_price_of_its_own() -> None:
    """It lies on the decode instance's host mostly; what a prefill leg fetches may lie anywhere."""
    work = Clockwork()

    def rates() -> tuple[float, float]:
        book = work.core.models.of("m").book
        fleet = book.view(work.now_s)
        row = book.row("d")
        return float(fleet.handover_tokens_per_s[row]), float(fleet.fetch_tokens_per_s[row])

    def load(size_bytes: int, load_ms: float, *, handover: bool) -> None:
        cache = CacheReport(3200, 3200, 0, 3200, size_bytes, load_ms=load_ms, outcome="hit")
        decision = work.schedule()
        legs = [LegReport(LegRole.PREFILL, "p", 1.0, 200.0, cache=MISS if handover else cache)]
        work.now_s += 0.2
        work.tell(decision, Phase.PREFILLED, *legs)
        legs.append(LegReport(LegRole.DECODE, "d", cache=cache if handover else HIT))
        work.tell(decision, Phase.FINISHED, *legs)

    before = rates()
    for _ in range(5):
        load(100 << 20, 1000.0, handover=False)
    slow = rates()
    assert slow[0] == slow[1] < before[1], (
        "as long as nothing was handed over, it is believed to be like a fetch"
    )
    for _ in range(5):
        load(100 << 20, 10.0, handover=True)
    fast = rates()
    assert fast[0] > 20 * slow[0] and fast[1] == slow[1]


def test_missing_blocks_are_counted_under_their_name(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        plan = await c.schedule("r1", chain("a", 100))
        assert 0 < plan.decode.handover_ms < plan.decode.wait_ms
        miss = pb.CacheReport(asked_tokens=3200, outcome=pb.CACHE_OUTCOME_MISS)
        leg = pb.LegReport(role=pb.LEG_ROLE_PREFILL, instance_id="p", sent_ms=1.0, ended_ms=20.0, cache=miss)
        await c.progress(plan.decision_id, pb.REQUEST_PHASE_PREFILLED, leg)
        timeout = pb.CacheReport(asked_tokens=3200, outcome=pb.CACHE_OUTCOME_TIMEOUT)
        late = pb.LegReport(role=pb.LEG_ROLE_DECODE, instance_id="d", cache=timeout)
        await c.progress(plan.decision_id, pb.REQUEST_PHASE_FINISHED, late, output_tokens=3)
        assert (await c.schedule("r2", chain("b", 100))).prefill.instance_id == ""
        page = c.service.metrics.render()
        assert b'mooncache_conductor_handovers_total{outcome="missed"} 1.0' in page
        assert b"mooncache_conductor_handovers_avoided_total 1.0" in page

    serve(tmp_path, scenario)
