"""A live cluster is broken for real: the run finds nothing wrong, and finds what is planted."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncache.chaos.core.faults import faults_named
from mooncache.chaos.core.records import Outcome
from mooncache.chaos.core.verdict import judge
from mooncache.chaos.shell import load
from mooncache.chaos.shell import run as runner
from mooncache.chaos.shell.local_target import LocalTarget
from mooncache.chaos.shell.own_cluster import own_cluster
from mooncache.chaos.shell.run import ChaosOptions
from mooncache.cluster.settings import missing_modules

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing_modules("hf")), reason="needs the small engine: pip install 'mooncache[hf]'"
    ),
]


SECONDS = 180
LIMIT_S = 1200  # with a cluster that needs all of its time after the last fault
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "build" / "chaos-test.html"
# What is late on a machine with other work is no fault that the run made: nothing is given up or refused for that.
PATIENT = {
    "MOONCACHE_WORKER_HANG_TIMEOUT_S": "120",
    "MOONCACHE_CONDUCTOR_SUSPECT_AFTER_S": "20",
    "MOONCACHE_CONDUCTOR_LEASE_S": "60",
    "MOONCACHE_CONDUCTOR_ADMISSION_ENABLED": "false",
}


@pytest.fixture(scope="module")
def state_dir() -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOONCACHE_CLUSTER_HANG_TIMEOUT_S", "120")  # of the supervisor, which is in this process
        with own_cluster(lambda _text: None, PATIENT) as folder:
            yield folder


def chaos(*arguments: str, state_dir: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mooncache.cli", "chaos", *arguments, "--state-dir", str(state_dir)],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.timeout(LIMIT_S + 100)
def test_three_minutes_of_every_fault(state_dir: Path) -> None:
    """The same as `make soak`, for as long as a change can wait.

    What is judged are answers, bytes and whether all comes back, never how soon. Its page stays in build/.
    """
    seed = os.environ.get("MOONCACHE_TEST_CHAOS_SEED") or "16"
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.unlink(missing_ok=True)
    page = ("--report", str(PAGE))
    options = ("--profile", "all", "--yes", "--json", "--duration", f"{SECONDS}s", "--seed", seed)
    done = chaos("run", *options, *page, state_dir=state_dir)
    again = f"MOONCACHE_TEST_CHAOS_SEED={seed} repeats the faults; {PAGE} shows the run"
    assert done.returncode == 0, f"{again}\n{done.stdout}{done.stderr}"
    found = json.loads(done.stdout)
    print(f"seed {seed}: {len(found['faults'])} faults in {found['seconds']:g} s, {found['requests']}")
    assert found["kept"] and set(found["requests"]) <= {"right", "failed"}, again
    assert found["seconds"] >= SECONDS
    assert len({each["name"] for each in found["faults"]}) >= 3, again
    assert found["requests"]["right"] > 0 and found["cached_tokens"] > 0
    assert found["blocks"]["read"] > found["blocks"]["missed"]
    assert "every promise kept" in PAGE.read_text(encoding="utf-8")


def test_chosen_faults_are_all_made(state_dir: Path) -> None:
    faults = ("flip-store-node", "stop-conductor")
    done = chaos("run", *faults, "--yes", "--json", "--duration", "1s", "--seed", "5", state_dir=state_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert {each["name"] for each in found["faults"]} == set(faults)
    assert set(found["requests"]) == {"right"}
    assert sum(each["flipped"] for each in found["faults"]) > 0


def test_a_wrong_answer_is_found(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = load.known_answers

    async def other(*arguments: object) -> list[load.KnownQuestion]:
        questions = await known(*arguments)  # type: ignore[arg-type]
        return [dataclasses.replace(questions[0], expected="what no engine says"), *questions[1:]]

    monkeypatch.setattr(runner, "known_answers", other)
    options = ChaosOptions(faults_named(["stop-master"]), 4.0, 2, 5)
    record = asyncio.run(runner.run(LocalTarget(state_dir), options, lambda _text: None))
    assert any(answer.outcome is Outcome.WRONG for answer in record.answers)
    assert [check.promise for check in judge(record).checks if not check.kept] == ["no wrong token"]


def test_without_consent_nothing_is_broken(state_dir: Path) -> None:
    done = chaos("run", state_dir=state_dir)
    assert done.returncode == 2
    assert "--yes" in done.stderr and "--own" in done.stderr


def test_without_a_cluster_it_says_how_to_get_one(tmp_path: Path) -> None:
    done = chaos("run", "--yes", state_dir=tmp_path)
    assert done.returncode != 0
    assert "mooncache up" in done.stderr


def test_the_list_names_rows_and_profiles(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mooncache.cli", "chaos", "list"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "kill-store-node" in done.stdout and "N1" in done.stdout
