"""What another policy would have done: from the record of small fleets, from bounded snapshots of large ones."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from mooncache.conductor.core.decisions import PoolAnswer, SchedulingRequest
from mooncache.conductor.core.policy import NAMES
from mooncache.conductor.core.policy.mooncache import Mooncache
from mooncache.conductor.core.registry import InstanceInfo, InstanceState
from mooncache.conductor.core.scheduler import Scheduler
from mooncache.conductor.core.snapshot import take
from mooncache.conductor.core.what_if import other_choice
from mooncache.conductor.state import native_index
from tests.conductor.fleets import OPEN, Row, fleet, request
from tests.conductor.support import scheduler_settings
from tests.conductor.test_policy import asks, clusters


def decided(instances: int, **limits: Any) -> tuple[Scheduler, Any]:
    core = Scheduler(scheduler_settings(rules=OPEN, **limits), random.Random(1), native_index)
    for number in range(instances):
        role = "decode" if number % 2 else "prefill"
        core.register(InstanceInfo(f"{role}-{number}", 1, role, "m", group=1), InstanceState.READY, 0.0)
    decision = core.schedule(
        SchedulingRequest("r", "m", 4000, keys=bytes(32 * 200), group=1), PoolAnswer(), 0.0, 0.0
    )
    core.keep_candidates(decision.record)
    return core, decision


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("instances", [4, 80])
def test_every_policy_can_be_asked(name: str, instances: int) -> None:
    core, decision = decided(instances)
    found = other_choice(decision.record, core.snapshots, OPEN, name, random.Random(2))
    assert found["known"]
    assert found["admitted"]
    assert found["chosen"]["prefill"].startswith("prefill-")
    assert found["expected"]["ttft_ms"] > 0
    again = other_choice(decision.record, core.snapshots, OPEN, name, random.Random(2))
    assert again == found, "the same answer every time"


def test_it_says_when_the_snapshot_is_gone() -> None:
    core, decision = decided(80, snapshot_bytes_max=0)
    found = other_choice(decision.record, core.snapshots, OPEN, "algorithm1", random.Random(2))
    assert not found["known"]
    assert "no longer kept" in found["message"]
    record = json.loads(decision.record.to_json(OPEN))
    assert len(record["prefill_candidates"]) == 16, "the best candidates are kept in any case"
    assert record["candidate_count"] == 40


def test_snapshots_are_bounded() -> None:
    core, decision = decided(80, snapshot_bytes_max=20_000)
    for number in range(50):
        core.keep_candidates(
            core.schedule(SchedulingRequest(f"r{number}", "m", 4000), PoolAnswer(), 0.0, 0.0).record
        )
        assert core.snapshots.size_bytes <= 20_000
    assert 0 < len(core.snapshots) < 50
    assert core.snapshots.find(decision.decision_id) is None, "the oldest go first"


@settings(max_examples=50)
@given(clusters(), asks)
def test_a_snapshot_has_the_costs_of_the_moment(rows: tuple[Row, ...], fields: dict[str, Any]) -> None:
    asked, seen = request(rows, 4096, **fields), fleet(*rows)
    choice = Mooncache().choose(asked, seen, OPEN, random.Random(1))
    if choice.scores is None:
        return
    kept = take(seen, asked, choice.total_s, np.arange(len(rows)))
    again = Mooncache().choose(kept.policy_request(), kept.fleet(), OPEN, random.Random(1))
    if fields["exclude"]:
        return  # who was excluded is not among the candidates of a record
    assert again.scores is not None
    finite = choice.scores < np.inf
    assert (finite == (again.scores < np.inf)).all()
    assert again.scores[finite] == pytest.approx(choice.scores[finite], rel=1e-3, abs=1e-3)
