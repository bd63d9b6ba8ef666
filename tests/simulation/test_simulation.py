"""Simulated clusters of the whole control plane: many seeds, the same run for the same seed, and bugs that are found.

Each test is a process of its own, because hashes of strings differ from process to process and runs must not.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.faults import FAULTS, OF_SERVING_FAULTS
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.world import World

ROOT = Path(__file__).parents[2]
SIMULATED_S = 900
"""A minute and a half, where nothing else runs."""


def simulate(*arguments: str, hash_seed: str = "random") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SIMULATED_S, check=False
    )


@pytest.mark.timeout(SIMULATED_S)
@pytest.mark.parametrize("seeds", ["1001:1361:2", "1016:1036"], ids=["pool", "serving"])
def test_no_invariant_is_broken(seeds: str) -> None:
    ran = simulate("--seeds", seeds, "--coverage")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = {name: cells for name, cells in map(table_row, ran.stdout.splitlines()) if name in FAULTS}
    assert set(rows) == set(FAULTS), "every fault has a row"
    if seeds == "1001:1361:2":
        unmet = {name for name, cells in rows.items() if not any(map(int, cells))}
        assert unmet == OF_SERVING_FAULTS, "seeds of the pool meet all the others"


def table_row(line: str) -> tuple[str, list[str]]:
    """The first cell of a table's row, and the others."""
    name, *cells = [cell.strip() for cell in line.strip("| ").split("|")]
    return name, cells


def test_a_fault_that_finds_nothing_to_hit_is_not_counted() -> None:
    loop = Scheduler(2001)

    async def scenario() -> None:
        world = World(2001, loop)
        world.shape.disks = False
        world.gone.add("node-0")  # one host for each seed
        for kind in ("lying_disk", "lose_node", "stop_leader", "unrenewed"):
            assert not await FAULTS[kind][1](world, random.Random(1)), kind

    loop.run_until_complete(scenario())
    loop.close()


def test_a_stopped_process_goes_on_later_and_a_killed_one_not_even_ends() -> None:
    loop, ran = Scheduler(1), []

    async def work(name: str) -> None:
        try:
            while True:
                await asyncio.sleep(1.0)
                ran.append((name, loop.time()))
        finally:
            ran.append((name, -1.0))

    async def scenario() -> None:
        stopped, killed = Process(loop, "stopped"), Process(loop, "killed")
        for process in (stopped, killed):
            process.spawn(work(process.name))
        await asyncio.sleep(1.5)
        stopped.stop()
        killed.kill()
        await asyncio.sleep(2.0)
        stopped.go_on()
        await asyncio.sleep(0.5)
        assert sorted(ran) == [("killed", 1.0), ("stopped", 1.0), ("stopped", 3.5)]
        assert stopped.stopped_s == 2.0

    loop.run_until_complete(scenario())
    loop.run_until_complete(loop.end())
    loop.close()


def test_a_cancelled_call_never_runs_and_one_that_fails_stops_nothing() -> None:
    loop, ran = Scheduler(1), []

    async def scenario() -> None:
        loop.call_soon(ran.append, "soon").cancel()
        loop.call_later(1.0, ran.append, "later").cancel()
        loop.call_later(1.0, lambda: 1 / 0)
        timer = loop.call_at(2.0, ran.append, "at")
        await asyncio.sleep(3.0)
        assert ran == ["at"]
        assert timer.when() == 2.0
        assert not timer.cancelled()

    loop.run_until_complete(scenario())
    loop.close()


def test_a_seed_is_the_same_run_whatever_hashes_are() -> None:
    first = simulate("--seeds", "2000:2004", "--digests", hash_seed="1")
    second = simulate("--seeds", "2000:2004", "--digests", hash_seed="2")
    digests = [line for line in first.stdout.splitlines() if line.startswith("200")]
    assert len(digests) == len({line.split()[1] for line in digests}) == 4, first.stdout + first.stderr
    assert digests == [line for line in second.stdout.splitlines() if line.startswith("200")]


@pytest.mark.parametrize(
    ("bug", "seed"),
    [
        ("report-not-repeated", 2),
        ("no-sweep", 3),
        ("lease-from-answer", 31),
        ("dead-nodes-listed", 18),
        ("life-not-checked", 1),
        ("full-report-cut-short", 2),
        ("etcd-takes-ended-leases", 49),
    ],
)
def test_a_planted_bug_is_found_and_its_line_repeats_it(bug: str, seed: int) -> None:
    ran = simulate("--seeds", str(seed), "--planted", bug)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert f"repeat: python -m tests.simulation --seeds {seed} --planted {bug}" in ran.stdout
