"""The doctor's sentences about blocks that engines loaded of each other, from facts made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mooncache.cli.doctor.core import read_back
from mooncache.cli.doctor.core.facts import ServingFacts
from mooncache.cli.doctor.core.result import Status
from tests.cli.test_doctor import READY, engines


def read(**change: Any) -> ServingFacts:
    one = {
        "writer": "e1", "reader": "e2", "expected_tokens": 48, "loaded_tokens": 48, "local_tokens": 0,
        "outcome": "hit", "reason": "", "waited_ms": 12.0, "load_ms": 3.0, "first_difference": -1, "error": "",
    } | change  # fmt: skip
    return engines(READY, {"instance_id": "e2"}, agreement=({"model": "m", "read_backs": [one]},))


@pytest.mark.parametrize(
    ("change", "status", "why", "fix"),
    [
        ({}, Status.PASS, "loaded 48 tokens that e1 had saved", ""),
        ({"reader": "e1"}, Status.PASS, "that it had saved itself", ""),
        ({"loaded_tokens": 0, "outcome": "timeout"}, Status.FAIL, "waited 12 ms for the blocks of e1", "e1"),
        ({"loaded_tokens": 0, "outcome": "pool_absent"}, Status.FAIL, "not reach the pool", "master_targets"),
        (
            {"loaded_tokens": 0, "outcome": "failed"},
            Status.FAIL,
            "could not load the blocks of e1",
            "its log",
        ),
        ({"loaded_tokens": 0, "outcome": "miss"}, Status.FAIL, "none of the blocks", "hash agreement"),
        ({"loaded_tokens": 32, "outcome": "partial"}, Status.FAIL, "32 of 48 tokens", "evicted"),
        (
            {"loaded_tokens": 0, "outcome": "computed_faster", "reason": "9 ms"},
            Status.WARN,
            "9 ms",
            "slow path",
        ),
        ({"loaded_tokens": 16, "outcome": "load_cut"}, Status.WARN, "computed what", "node to node"),
        ({"loaded_tokens": 0, "outcome": "off", "reason": "lora"}, Status.WARN, "lora", "vllm-connector"),
        ({"first_difference": 1}, Status.WARN, "number 2 of its answer", "quarantine ls"),
        ({"error": "no time was left"}, Status.WARN, "no time was left", "run it again"),
        ({"outcome": ""}, Status.SKIPPED, "does not say", ""),
        ({"expected_tokens": 0}, Status.SKIPPED, "no complete block", ""),
        (
            {"reader": "e1", "loaded_tokens": 0, "local_tokens": 48},
            Status.SKIPPED,
            "one engine: no other shares its blocks",
            "",
        ),
    ],
)
def test_blocks_read_back_by_engines(change: dict[str, Any], status: Status, why: str, fix: str) -> None:
    (found,) = read_back.read_back(read(**change))
    assert (found.status, why in found.why, fix in found.fix) == (status, True, True), found
    assert bool(found.fix) is (status in {Status.WARN, Status.FAIL})


def test_only_engines_of_the_pool_are_judged_by_it() -> None:
    without = engines({"pool": False}, {"instance_id": "e2"}, agreement=read().agreement)
    old = engines(READY, agreement=({"model": "m"},))
    for serves in (without, old, engines(READY, agreement_error="no gateway")):
        (found,) = read_back.read_back(serves)
        assert found.status is Status.SKIPPED, found
