"""A whole pool on real verbs: master, two store nodes and the SDK, in the test machine, on two rails.

One machine for all, because starting it is most of the time. What must hold whatever happens: within the
deadline each block is right or absent, never wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rdma.vm import interpreter
from tests.rdma.vm.machine import Machine

pytestmark = pytest.mark.timeout(700)
MakeMachine = Callable[..., Machine]
GUEST = Path(__file__).resolve().parent / "guest"
BLOCKS, COPIED, AGAIN, BLOCK_BYTES = 32, 8, 16, 1 << 20
DEADLINE_S = 30.0
Acts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def said(vm: MakeMachine, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each act of the play said, in order; some are played more than once."""
    share = tmp_path_factory.mktemp("share")
    (share / "pool.py").write_text((GUEST / "pool.py").read_text())
    machine = vm(net="wire", rails=2, python=True, memory_mib=2048, share=share)
    ended = machine.run(f"{interpreter.COMMAND} pool.py", timeout_s=600)
    logs = "".join(f"\n{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(share.glob("*.log")))
    assert ended.ok, ended.output[-6000:] + logs
    said = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    said += [
        {"act": f"log of {node}", "text": (share / f"{node}.log").read_text()} for node in ("b0 again", "b1")
    ]
    return said


@pytest.fixture(scope="module")
def acts(said: list[dict[str, Any]]) -> Acts:
    """The last of each act."""
    return {act["act"]: act for act in said}


def test_blocks_go_and_come_over_both_rails(acts: Acts) -> None:
    put, got = acts["put"], acts["get"]
    assert put["right"] == BLOCKS + COPIED
    assert put["rdma_bytes"] == (BLOCKS + 2 * COPIED) * BLOCK_BYTES and put["tcp_bytes"] < BLOCK_BYTES
    assert got["right"] == BLOCKS + COPIED and got["rdma_bytes"] == (BLOCKS + COPIED) * BLOCK_BYTES
    # The client's ends carry what is put, the nodes' ends what is got; each rail its fair part. Emulated
    # processors make the driver repeat some packets.
    for act, ends in ((put, ("va0", "va1")), (got, ("vb0", "vb1"))):
        total, crossed = act["rdma_bytes"], [act["rails"][end] for end in ends]
        assert sum(crossed) >= total and min(crossed) > total * 0.2, act


def test_nothing_is_ever_wrong_or_late(said: list[dict[str, Any]]) -> None:
    assert all(act.get("wrong", 0) == 0 for act in said)
    assert all(act.get("took_s", 0) < DEADLINE_S for act in said if act["act"] != "start")
    # Readers take turns at a block's copies: a damaged one may be found, and is then left out, at the next read only.
    damaged = {"an arena is truncated", "an arena is truncated, afterwards"}
    late = {"a node is killed": COPIED}
    assert all(
        act.get("miss_checksum", 0) <= late.get(act["act"], 0) for act in said if act["act"] not in damaged
    )


def test_the_map_tells_which_rails_are_up(acts: Acts) -> None:
    assert acts["start"]["rails"] == ["rxb0:1", "rxb1:1"]
    assert acts["one rail goes down, in the map"]["rails"] == ["rxb1:1"]
    assert acts["both are down, in the map"]["rails"] == []


def test_a_rail_that_goes_down_leaves_the_other(acts: Acts) -> None:
    struck, after = acts["one rail goes down"], acts["one rail goes down, afterwards"]
    assert struck["struck"] and struck["right"] + struck["unavailable"] == BLOCKS, struck
    assert after["right"] == BLOCKS and after["rdma_bytes"] == BLOCKS * BLOCK_BYTES, after
    assert after["rails"]["vb0"] < BLOCK_BYTES < after["rails"]["vb1"], after


def test_with_no_rail_left_tcp_carries_on_and_rdma_comes_back(acts: Acts) -> None:
    struck, after = acts["both are down"], acts["both are down, afterwards"]
    assert struck["struck"] and struck["right"] + struck["unavailable"] == BLOCKS, struck
    assert struck["tcp_bytes"] > 0, struck
    assert after["right"] == BLOCKS and after["tcp_bytes"] >= BLOCKS * BLOCK_BYTES, after
    again = acts["both are up again"]
    assert again["right"] == BLOCKS and again["rdma_bytes"] > 0, again


def test_a_file_is_an_arena_and_costs_its_blocks_when_it_is_truncated(acts: Acts) -> None:
    # all that went and came before went over RDMA: half of it to and from the file
    assert "tmpfs /dev/shm/arena, 134217728 bytes" in acts["log of b1"]["text"]
    assert "RDMA devices reach /dev/shm/arena by pages" in acts["log of b1"]["text"]
    struck, after = acts["an arena is truncated"], acts["an arena is truncated, afterwards"]
    assert struck["struck"] and struck["right"] >= COPIED, struck
    # What a device had pinned before the end is still right; the rest is missed: by its checksum, or not found any more
    # because a read found the damage before. Nothing else may happen.
    assert "arena_damaged" in acts["log of b1"]["text"]
    assert after["right"] >= COPIED and after["right"] + after["missed"] == BLOCKS + COPIED, after
    again = acts["memory in its place"]
    assert again["right"] == AGAIN and again["rdma_bytes"] == 3 * AGAIN * BLOCK_BYTES, again


def test_a_node_that_is_killed_costs_its_blocks_only(acts: Acts) -> None:
    struck, after = acts["a node is killed"], acts["the node is gone"]
    assert struck["struck"] and struck["right"] >= COPIED, struck
    assert after["right"] == COPIED and after["rdma_bytes"] > 0, after


def test_memory_that_outlives_its_node_is_registered_again(acts: Acts) -> None:
    struck, after = acts["kept memory, its node is killed"], acts["kept memory, adopted"]
    assert struck["struck"], struck
    assert "node.memory_adopted" in acts["log of b0 again"]["text"]
    assert after["right"] == COPIED and after["rdma_bytes"] == COPIED * BLOCK_BYTES, after
