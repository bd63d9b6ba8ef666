"""Our stores keep every promise that can be tried on them, and the command says what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncache.conformance.store_promises import STORE_PROMISES
from tests.client.conftest import make_cluster

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
FILES = "tests.conformance.stores:FileStore"


def conformance(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mooncache.cli", "conformance", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A pool that no run may break."""
    with make_cluster(tmp_path_factory.mktemp("pool")) as cluster:
        yield cluster.state_dir


def test_the_pool_keeps_every_promise(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = conformance(
        *("--store", "pool", "--set", "capacity=12MiB", "--seed", "7", "--json", "--report", str(page))
    )
    found = json.loads(done.stdout)
    verdicts = {each["name"]: (each["verdict"], each["seen"]) for each in found["promises"]}
    assert set(verdicts) == {promise.name for promise in STORE_PROMISES}
    left = {name: told for name, told in verdicts.items() if told[0] != "pass"}
    assert set(left) == {"truncated"} and left["truncated"][0] == "not applicable", left
    assert (done.returncode, found["kept"], found["seed"]) == (0, True, 7)
    assert "conforms" in page.read_text(encoding="utf-8")


def test_what_disks_hold_keeps_its_promises() -> None:
    """Blocks on disks whose files are damaged while no node runs."""
    pool = ("--set", "ssd=64MiB", "--set", "capacity=12MiB", "--set", "nodes=1")
    promises = ("--only", "flipped-bits", "--only", "truncated")
    done = conformance("--store", "pool", *pool, *promises, "--seed", "2", "--json")
    found = {each["name"]: each for each in json.loads(done.stdout)["promises"]}
    assert {name: each["verdict"] for name, each in found.items()} == {
        "flipped-bits": "pass",
        "truncated": "pass",
    }, found
    assert "after it 0 read" not in found["flipped-bits"]["seen"], "nothing is read from the disk"


def test_the_drop_in_keeps_what_can_be_tried_on_a_running_pool(running: Path) -> None:
    done = conformance("--store", "mooncake-store", "--set", f"state_dir={running}", "--json")
    found = json.loads(done.stdout)
    outcomes = {each["name"]: each["verdict"] for each in found["promises"]}
    assert done.returncode == 0, found
    assert {name for name, outcome in outcomes.items() if outcome != "pass"} == {
        *("unfinished", "eviction", "too-large", "stopped-node", "killed-node", "flipped-bits", "truncated")
    }
    assert all("left as it is" in each["seen"] for each in found["promises"] if each["name"] == "killed-node")


def test_a_class_of_the_users_is_tried(tmp_path: Path) -> None:
    done = conformance("--store", FILES, "--set", f"folder={tmp_path}", "--only", "identity", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass near-keys" in done.stdout and "--seed 3" in done.stdout


def test_a_broken_promise_is_the_exit_code(tmp_path: Path) -> None:
    lies = "tests.conformance.stores:CutsLongKeys"
    page = tmp_path / "page.html"
    done = conformance(
        *(
            "--store",
            lies,
            "--set",
            f"folder={tmp_path / 'store'}",
            "--only",
            "identity",
            "--report",
            str(page),
        )
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL odd-keys" in done.stdout and "A promise was broken" in done.stdout
    assert "does not conform" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "--store"),
        (("--store", "nothing"), "package.module:Class"),
        (("--store", "pool", "--set", "nodes"), "name=value"),
        (("--store", "pool", "--set", "colour=red"), "no setting"),
        (("--store", "pool", "--rounds", "0"), "--rounds"),
    ],
)
def test_wrong_arguments_are_explained(arguments: tuple[str, ...], why: str) -> None:
    done = conformance(*arguments)
    assert done.returncode == 2
    assert why in done.stderr
