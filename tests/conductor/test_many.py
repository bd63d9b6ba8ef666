"""The conductor with thousands of requests and instances: nothing is lost because there is much of it."""

from __future__ import annotations

import random

import pytest

from mooncache import errors
from mooncache.conductor.core import outcome
from mooncache.conductor.core.asks import Ask, PoolAnswer, Settings
from mooncache.conductor.core.registry import READY, InstanceInfo
from mooncache.conductor.core.scheduler import Scheduler
from mooncache.conductor.state import native_index


def test_requests_end_when_their_records_are_dropped() -> None:
    core = Scheduler(Settings(decision_count_max=100), random.Random(1), native_index)
    core.register(InstanceInfo("a", 1, "both", "m"), READY, 0.0)
    lengths = core.models.of("m").lengths
    before = lengths.mean("", 0)
    under_way = [core.schedule(Ask(f"r{i}", "m", 100), PoolAnswer(), 1.0, 0.0) for i in range(120)]
    assert len(core.records) == 100
    for decision in under_way:
        core.update(decision.decision_id, outcome.FIRST_TOKEN, 0.1, 1, {}, 2.0)
        assert core.update(decision.decision_id, outcome.FINISHED, 0.2, 10, {}, 3.0).ended
    assert len(core.work) == 0
    book = core.models.of("m").book
    assert book.assigned("a") == 0
    assert float(book.view(3.0).sequences.sum()) == 0, "the policy sees an idle instance again"
    assert abs(lengths.mean("", 0) - 10) < abs(before - 10) / 4, "answers were learnt from all the same"
    with pytest.raises(errors.DecisionUnknown):
        core.update(under_way[0].decision_id, outcome.FINISHED, 0.2, 10, {}, 4.0)
    core.check()
