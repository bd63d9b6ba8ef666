"""What `make test` says at its end of stages that failed."""

from __future__ import annotations

import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "stages.sh"
OUTPUT = """
test_store: FAILED
[  FAILED  ] Tier.Reads (12 ms)
test_base: 8 tests passed
FAILED tests/test_some.py::test_one - assert 1 == 2
make[1]: *** [Makefile:99: native-test] Error 1
"""


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    command = [SCRIPT, "build/log", "bash", "-c", script]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_what_failed_is_said_again_at_the_end(tmp_path: Path) -> None:
    done = run(tmp_path, f"printf '\\0'; echo '{OUTPUT}'; seq 1000; exit 2")
    assert done.returncode == 2
    end = done.stdout.split("== failed\n")[1].splitlines()
    assert "test_store: FAILED" in end
    assert "FAILED tests/test_some.py::test_one - assert 1 == 2" in end
    assert "make[1]: *** [Makefile:99: native-test] Error 1" in end
    assert not [line for line in end if "test_base" in line or line.isdigit()]
    assert "[  FAILED  ] Tier.Reads (12 ms)" in (tmp_path / "build/log").read_text()


def test_what_passed_in_its_second_run_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build/pytest-again").write_text("tests/test_some.py::test_one\n")
    end = run(tmp_path, f"echo '{OUTPUT}'; exit 2").stdout.split("== failed\n")[1]
    assert "test_one" not in end
    assert "test_store: FAILED" in end


def test_a_good_run_says_nothing_more(tmp_path: Path) -> None:
    done = run(tmp_path, "echo fine")
    assert (done.returncode, done.stdout) == (0, "fine\n")
