"""scripts/fault_soak.sh runs every native test that draws its faults by the seed, and says which seed fails."""

from __future__ import annotations

import fnmatch
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "fault_soak.sh"
_TEST = re.compile(r"^TEST(?:_F|_P)?\((\w+), (\w+)\)(.*?)^}", re.MULTILINE | re.DOTALL)


def run(program: Path, seeds: int) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), str(program), "1", str(seeds)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def stand_in(folder: Path, text: str) -> Path:
    """A program in the place of the native tests."""
    program = folder / "test_store"
    program.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    program.chmod(0o755)
    return program


def test_every_test_with_a_seed_runs_and_no_pattern_is_empty(tmp_path: Path) -> None:
    seen = tmp_path / "arguments"
    assert run(stand_in(tmp_path, f'echo "$1" >{seen}'), 1).returncode == 0
    patterns = seen.read_text(encoding="utf-8").strip().removeprefix("--gtest_filter=").split(":")
    names, seeded = set(), set()
    for path in sorted((ROOT / "native" / "tests" / "store").glob("*.cpp")):
        for suite, name, body in _TEST.findall(path.read_text(encoding="utf-8")):
            names.add(f"{suite}.{name}")
            if "fault_seed()" in body:
                seeded.add(f"{suite}.{name}")
    assert len(seeded) >= 6
    missed = [name for name in seeded if not any(fnmatch.fnmatch(name, each) for each in patterns)]
    assert not missed, "they draw faults by the seed, and the soak leaves them out"
    empty = [each for each in patterns if not fnmatch.filter(names, each)]
    assert not empty, "no test has such a name"


def test_a_seed_that_fails_is_printed_and_ends_it(tmp_path: Path) -> None:
    ran = run(
        stand_in(tmp_path, 'echo "3 tests from 1 test suite ran."; [ "$MOONCACHE_FAULT_SEED" != 2 ]'), 5
    )
    assert ran.returncode == 1
    assert "storage faults, seed 1: 3 tests from 1 test suite ran" in ran.stdout
    assert "seed 2 fails; to repeat it: MOONCACHE_FAULT_SEED=2" in ran.stdout
    assert "seed 3" not in ran.stdout
