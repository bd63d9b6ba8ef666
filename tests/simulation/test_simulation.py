"""Simulated clusters of the whole control plane: many seeds, the same run for the same seed, and bugs that are found.

Each test is a process of its own, because hashes of strings differ from process to process and runs must not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def simulate(*arguments: str, hash_seed: str = "random") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("seeds", ["1001:1361:4", "1000:1036:4"], ids=["pool", "serving"])
def test_no_invariant_is_broken(seeds: str) -> None:
    ran = simulate("--seeds", seeds)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_seed_is_the_same_run_whatever_hashes_are() -> None:
    first = simulate("--seeds", "2000:2004", "--digests", hash_seed="1")
    second = simulate("--seeds", "2000:2004", "--digests", hash_seed="2")
    digests = [line for line in first.stdout.splitlines() if line.startswith("200")]
    assert len(digests) == len({line.split()[1] for line in digests}) == 4, first.stdout + first.stderr
    assert digests == [line for line in second.stdout.splitlines() if line.startswith("200")]


@pytest.mark.parametrize(
    ("bug", "seed"),
    [("report-gap", 0)],
)
def test_a_planted_bug_is_found_and_its_line_repeats_it(bug: str, seed: int) -> None:
    ran = simulate("--seeds", str(seed), "--planted", bug)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert f"repeat: python -m tests.simulation --seeds {seed} --planted {bug}" in ran.stdout
