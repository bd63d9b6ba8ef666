"""Which faults fit a cluster, and in which order they come."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from mooncache.chaos.core.faults import (
    FAULTS,
    Aim,
    FaultEffect,
    Profile,
    aims_of,
    faults_named,
    faults_of,
    fitting,
)
from mooncache.chaos.core.schedule import steps
from mooncache.errors import InvalidArgument
from tests.docs.test_recovery import PAGE, rows_of

PARTS = ("etcd", "master", "node-1", "node-2", "conductor", "gateway", "prefill-1", "decode-1", "decode-2")


def test_every_fault_is_a_row_of_the_contract() -> None:
    rows = {row.name for row in rows_of(PAGE.read_text(encoding="utf-8"))}
    assert {fault.row for fault in FAULTS} <= rows


def test_parts_are_known_by_their_names() -> None:
    assert aims_of("node-12") == (Aim.STORE_NODE,)
    assert aims_of("conductor") == aims_of("conductor-2") == (Aim.CONDUCTOR,)
    assert aims_of("prefill-1") == (Aim.PREFILL_WORKER, Aim.PREFILL_ENGINE)
    assert aims_of("something-else") == ()


def test_profiles_are_choices_of_the_list() -> None:
    assert faults_of(Profile.ALL) == FAULTS
    assert {fault.effect for fault in faults_of(Profile.STOP)} == {FaultEffect.STOP}
    assert 0 < len(faults_of(Profile.QUICK)) < len(FAULTS)
    assert not any(fault.may_fail for fault in faults_of(Profile.QUICK))


def test_an_unknown_fault_is_named() -> None:
    assert [fault.name for fault in faults_named(["stop-master", "kill-master"])] == [
        "stop-master",
        "kill-master",
    ]
    with pytest.raises(InvalidArgument, match="burn-master"):
        faults_named(["burn-master"])


def test_each_fault_comes_once_in_a_round_and_the_seed_repeats_the_order() -> None:
    found = list(islice(steps(FAULTS, PARTS, random.Random(3)), 2 * len(FAULTS)))
    for begin in (0, len(FAULTS)):
        assert {step.fault for step in found[begin : begin + len(FAULTS)]} == set(FAULTS)
    assert all(step.fault.aim in aims_of(step.part) for step in found)
    assert found[: len(FAULTS)] != found[len(FAULTS) :]
    assert found == list(islice(steps(FAULTS, PARTS, random.Random(3)), 2 * len(FAULTS)))


def test_rows_are_those_of_the_cluster() -> None:
    chosen = faults_named(["kill-master", "stop-conductor", "kill-etcd"])
    assert [fault.row for fault in fitting(chosen, PARTS)] == ["M1", "C2", "T1"]
    standbys = ("master-1", "master-2", "conductor", "conductor-2")
    assert [fault.row for fault in fitting(chosen, standbys)] == ["M2", "C5"]


def test_a_cluster_without_prefill_engines_has_fewer_faults() -> None:
    without = [part for part in PARTS if not part.startswith("prefill")]
    assert {fault.aim for fault in fitting(FAULTS, without)}.isdisjoint(
        {Aim.PREFILL_ENGINE, Aim.PREFILL_WORKER}
    )
    with pytest.raises(InvalidArgument, match="no process"):
        steps(faults_named(["kill-prefill-engine"]), without, random.Random())
