"""What `make test` does with tests that fail: few of them have a second run, alone, and are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "pytest_twice.sh"
PASSES_LATER = """
import os, pathlib
def test_later():
    seen = pathlib.Path("seen")
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    assert seen.exists() and alone, seen.write_text("")
def test_at_once():
    pathlib.Path("runs").open("a").write("x")
"""


def run(folder: Path, tests: str) -> tuple[int, str]:
    (folder / "test_some.py").write_text(tests)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [SCRIPT, "log", "again", sys.executable, "-p", "xdist.plugin", "-n", "1", "test_some.py"],
        cwd=folder,
        env=outside | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # plugins of the project would only be slow
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (folder / "log").read_text() in done.stdout
    return done.returncode, done.stdout


def test_what_passes_only_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "again").write_text("of a run before")
    code, output = run(tmp_path, PASSES_LATER)
    assert code == 0, output
    assert (tmp_path / "again").read_text() == "test_some.py::test_later\n"
    assert output.endswith("passed only in a second run, alone; mend them:\ntest_some.py::test_later\n")
    assert (tmp_path / "runs").read_text() == "x", "the second run has no other tests"


@pytest.mark.parametrize(
    ("tests", "code", "runs"),
    [
        ("def test_right(): pass\n", 0, 1),
        ("def test_wrong(): assert False\n", 1, 2),
        ("\n".join(f"def test_{i}(): assert False" for i in range(6)), 1, 1),
        ("import nothing_like_that\n", 2, 2),
        ("", 5, 1),
    ],
    ids=["right", "wrong twice", "too many", "not collected", "none"],
)
def test_nothing_else_is_forgiven(tmp_path: Path, tests: str, code: int, runs: int) -> None:
    (tmp_path / "again").write_text("of a run before")
    found, output = run(tmp_path, tests)
    assert (found, output.count("== a second run")) == (code, runs - 1), output
    assert not (tmp_path / "again").exists()
