"""`mooncache topology` and `doctor rdma` on real verbs: what they say is what the kernel's devices are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rdma.vm import interpreter
from tests.rdma.vm.machine import Machine

pytestmark = pytest.mark.timeout(700)
MakeMachine = Callable[..., Machine]
GUEST = Path(__file__).resolve().parent / "guest"


@pytest.fixture(scope="module")
def said(vm: MakeMachine, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The documents of: topology; doctor with one device configured and one port down; the port's counters."""
    share = tmp_path_factory.mktemp("share")
    shutil.copy(GUEST / "doctor.py", share)
    machine = vm(net="wire", rails=2, python=True, memory_mib=2048, share=share)
    ended = machine.run(f"{interpreter.COMMAND} doctor.py", timeout_s=600)
    documents = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    assert len(documents) == 3, ended.output[-6000:]
    return documents


def test_every_device_has_the_engines_verdict(said: list[dict[str, Any]]) -> None:
    devices = {device["name"]: device["ports"][0]["verdict"] for device in said[0]["host"]["devices"]}
    assert sorted(devices) == ["rxa0", "rxa1", "rxb0", "rxb1"]
    for verdict in devices.values():
        assert verdict["usable"] and verdict["gid"]["kind"] == "RoCE v2"
        assert verdict["gid_reason"] == "RoCE v2 over IPv4"
    assert len(said[0]["places"][0]["preferred"]) == 4


def test_a_port_that_is_down_or_not_configured_says_so(said: list[dict[str, Any]]) -> None:
    found = {finding["what"]: finding for finding in said[1]["findings"]}
    assert "RoCE v2 over IPv4" in found["rxa0/1"]["found"]
    assert found["rxa1/1"]["grade"] == "warn" and "ip link set va1 up" in found["rxa1/1"]["advice"]
    assert "the configuration names other devices" in found["rxb0/1"]["found"]


def test_the_ports_counters_can_be_read(said: list[dict[str, Any]]) -> None:
    counters = said[2]["counters"]
    assert {"duplicate_request", "out_of_seq_request"} <= set(counters)
    assert all(isinstance(value, int) for value in counters.values())
