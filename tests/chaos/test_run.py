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


@pytest.fixture(scope="module")
def state_dir() -> Iterator[Path]:
    with own_cluster(lambda _text: None) as folder:
        yield folder


def chaos(*arguments: str, state_dir: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mooncache.cli", "chaos", *arguments, "--state-dir", str(state_dir)],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_every_promise_is_kept(state_dir: Path, tmp_path: Path) -> None:
    page = tmp_path / "chaos.html"
    faults = ("flip-store-node", "kill-store-node", "stop-conductor")
    done = chaos(
        "run",
        *faults,
        "--yes",
        "--json",
        "--duration",
        "5s",
        "--seed",
        "5",
        "--report",
        str(page),
        state_dir=state_dir,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["kept"] and set(found["requests"]) == {"right"}
    assert {each["name"] for each in found["faults"]} == set(faults)
    assert sum(each["flipped"] for each in found["faults"]) > 0
    assert found["cached_tokens"] > 0
    assert found["blocks"]["read"] > found["blocks"]["missed"]
    assert "every promise kept" in page.read_text(encoding="utf-8")


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
