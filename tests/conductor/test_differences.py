"""What an engine did otherwise than planned: every kind with its reason, and what is no difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncache.conductor.config import NAME_CHARS_MAX
from mooncache.conductor.core.differences import (
    REASONS,
    Difference,
    DifferenceKind,
    PlannedCache,
    differences,
)
from mooncache.kvcache.leg_hint import CacheOutcome, CacheReport, LegRole
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conductor.support import Conductor, chain, pair, serve

FETCH = PlannedCache(
    prefix_tokens=800, local_tokens=160, pool_tokens=800, usable_tokens=992, block_tokens=16, wait_s=2.0
)


def found(planned: PlannedCache, **cache: object) -> list[tuple[str, float, float, str]]:
    report = CacheReport(**cache)  # type: ignore[arg-type]
    return [
        (each.kind, each.planned, each.actual, each.reason)
        for each in differences(LegRole.PREFILL, planned, report)
    ]


def test_as_planned() -> None:
    assert found(FETCH, hit_tokens=800, local_tokens=160, loaded_tokens=640, outcome="partial") == []
    assert found(FETCH, hit_tokens=800, loaded_tokens=800, waited_ms=2050.0, outcome="partial") == []
    assert found(FETCH, hit_tokens=790, local_tokens=160, loaded_tokens=630) == [], "less than a block"
    whole = PlannedCache(1008, 0, 1008, 992, 16)
    assert found(whole, hit_tokens=992, loaded_tokens=992, outcome="hit") == [], (
        "one token is always computed"
    )


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ("computed_faster", "computed_faster"),
        ("load_cut", "load_cut"),
        ("timeout", "timed_out"),
        ("failed", "load_failed"),
        ("pool_absent", "pool_unreachable"),
        ("off", "cache_off"),
        ("miss", "evicted"),
    ],
)
def test_what_was_expected_in_a_cache_was_computed(outcome: str, reason: str) -> None:
    assert found(FETCH, hit_tokens=160, local_tokens=160, outcome=outcome) == [("computed", 800, 160, reason)]


def test_what_was_to_be_computed_was_loaded() -> None:
    local = PlannedCache(160, 160, 800, 992, 16)  # the pool had 800, computing was priced lower
    assert found(local, hit_tokens=800, local_tokens=160, loaded_tokens=640) == [
        ("loaded", 0, 640, "in_pool")
    ]
    unseen = PlannedCache(160, 160, 0, 992, 16)
    assert found(unseen, hit_tokens=800, local_tokens=160, loaded_tokens=640) == [
        ("loaded", 0, 640, "came_later")
    ]
    assert found(local, hit_tokens=800, local_tokens=800) == [], (
        "the engine's own cache had more: nothing was loaded"
    )
    assert found(FETCH, hit_tokens=800, loaded_tokens=800) == [], (
        "loaded instead of its own: nothing more was taken"
    )


def test_a_wait_that_lasted_longer_than_its_limit() -> None:
    assert found(FETCH, hit_tokens=800, loaded_tokens=640, local_tokens=160, waited_ms=2500.0) == [
        ("waited", 2000.0, 2500.0, "late")
    ]


def test_every_kind_has_known_reasons() -> None:
    """Metrics are there for all of them from the start."""
    assert set(REASONS) == set(DifferenceKind)
    for outcome in CacheOutcome:
        for kind, _, _, reason in found(FETCH, hit_tokens=0, waited_ms=9e9, outcome=outcome):
            assert reason in REASONS[DifferenceKind(kind)]


def test_they_say_in_which_unit_they_count() -> None:
    report = CacheReport(hit_tokens=160, waited_ms=9000.0, outcome="timeout")
    first, second = (each.to_json() for each in differences(LegRole.DECODE, FETCH, report))
    assert first == {
        "leg": "decode",
        "kind": "computed",
        "planned_tokens": 800,
        "actual_tokens": 160,
        "reason": "timed_out",
    }
    assert (second["planned_ms"], second["actual_ms"]) == (2000.0, 9000.0)
    assert isinstance(differences(LegRole.DECODE, FETCH, report)[0], Difference)


def test_both_legs_are_compared_counted_and_recorded(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        plan = await c.schedule("r1", chain("a", 100))
        found = pb.CacheReport(hit_tokens=1600, loaded_tokens=1600, load_ms=3.0, outcome=pb.CACHE_OUTCOME_HIT)
        leg = pb.LegReport(role=pb.LEG_ROLE_PREFILL, instance_id="p", sent_ms=1.0, ended_ms=20.0, cache=found)
        await c.progress(plan.decision_id, pb.REQUEST_PHASE_PREFILLED, leg)
        reason = "100 blocks not loaded: all would take 90 ms, computing 9 ms"
        faster = pb.CacheReport(
            asked_tokens=1600, outcome=pb.CACHE_OUTCOME_COMPUTED_FASTER, reason=reason + " " * 10_000
        )
        late = pb.LegReport(role=pb.LEG_ROLE_DECODE, instance_id="d", cache=faster)
        await c.progress(plan.decision_id, pb.REQUEST_PHASE_FINISHED, late, output_tokens=3)
        assert (await c.record("r1"))["observed"]["differences"] == [
            {
                "leg": "prefill",
                "kind": "loaded",
                "planned_tokens": 0,
                "actual_tokens": 1600,
                "reason": "came_later",
            },
            {
                "leg": "decode",
                "kind": "computed",
                "planned_tokens": 1600,
                "actual_tokens": 0,
                "reason": "computed_faster",
            },
        ]
        said = [leg["cache"]["reason"] for each in (await c.record("r1"))["events"] for leg in each["legs"]]
        assert (said[0], said[1].strip(), len(said[1])) == ("", reason, NAME_CHARS_MAX)
        page = c.service.metrics.render().decode()
        assert "mooncache_conductor_compared_legs_total 2.0" in page
        for leg, kind, reason in (
            ("prefill", "loaded", "came_later"),
            ("decode", "computed", "computed_faster"),
        ):
            labels = f'{{kind="{kind}",leg="{leg}",reason="{reason}"}}'
            assert f"mooncache_conductor_plan_differences_total{labels} 1.0" in page

    serve(tmp_path, scenario)
