"""`mooncache up` with engines as a user meets it: its printed lines work, the commands know it, nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncache.cluster.processes import processes_of_run
from mooncache.cluster.settings import missing_modules
from tests.cli.test_cluster import Up, environment, read_document
from tests.processes import end_with_parent, freeze

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        bool(missing_modules("hf")), reason="needs the small engine: pip install 'mooncache[hf]'"
    ),
]
SMALL = [
    "--engine",
    "hf",
    "--port",
    "0",
    "--conductor-port",
    "0",
    "--master-port",
    "0",
    "--capacity",
    "128MiB",
]


def environ(folder: Path) -> dict[str, str]:
    return {
        **environment(folder),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def run_id(folder: Path) -> str:
    return str(json.loads((folder / "cluster.json").read_text())["run_id"])


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    process = subprocess.Popen(
        [sys.executable, "-m", "mooncache.cli", "up", "--json", *SMALL],
        env=environ(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=end_with_parent,  # noqa: PLW1509
    )
    running = Up(process, folder, read_document(process, 180))
    run = run_id(folder)
    yield running
    process.send_signal(signal.SIGINT)
    assert process.wait(40) == 0
    assert process.stdout is not None
    process.stdout.close()
    assert not processes_of_run(run)
    assert not (folder / "cluster.json").exists()


def test_the_document(up: Up) -> None:
    serving = up.announced["serving"]
    assert set(serving) == {
        "base_url",
        "gateway_pid",
        "conductor_target",
        "conductor_pid",
        "conductors",
        "api_key_file",
        "tenant",
        "model",
        "ca_file",
        "random_weights",
        "instances",
    }
    assert serving["random_weights"] is True
    assert [item["instance_id"] for item in serving["instances"]] == ["prefill-1", "decode-1"]


def test_the_printed_curl_line_works(up: Up) -> None:
    from mooncache.cli.announce import curl_line

    done = subprocess.run(
        ["sh", "-c", curl_line(up.announced["serving"])], capture_output=True, timeout=60, check=True
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant", done.stdout


def test_the_printed_python_lines_work(up: Up, capsys: pytest.CaptureFixture[str]) -> None:
    from mooncache.cli.announce import python_lines

    exec(compile(python_lines(up.announced["serving"]), "printed", "exec"), {})
    assert "completion_tokens=" in capsys.readouterr().out


def test_status_knows_what_serves(up: Up) -> None:
    serving = up.json("status")["serving"]
    assert serving["gateway"]["reason"] == ""
    conductor = serving["conductor"]
    assert conductor["reason"] == ""
    assert (conductor["policy"], conductor["roles"]) == ("mooncache", {"decode": 1, "prefill": 1})
    rows = {row["instance_id"]: row for row in serving["instances"]}
    assert {name: row["state"] for name, row in rows.items()} == {"decode-1": "ready", "prefill-1": "ready"}
    human = up.run("status").stdout.decode()
    for word in (
        "gateway",
        "conductor",
        "prefill-1",
        "decode-1",
        "node-1",
        "leading since",
        "policy mooncache",
        "roles now",
    ):
        assert word in human
    assert not re.search(r"\d{15}", human), "nobody reads such numbers"


def test_top(up: Up) -> None:
    document = up.json("top", "--once", "--interval", "200ms")
    assert set(document) == {
        "interval_s",
        "gateway_url",
        "gateway",
        "gateway_count",
        "conductor",
        "instances",
        "members",
        "master",
        "nodes",
        "problems",
    }
    assert document["gateway"]["requests_total"] >= 1
    assert document["nodes"][0]["block_count"] >= 0
    assert document["problems"] == []
    human = up.run("top", "--once", "--interval", "200ms").stdout.decode()
    for word in ("requests/s", "from cache", "prefill-1", "KV", "node-1"):
        assert word in human


def test_the_doctor_finds_that_engines_make_the_gateways_keys(up: Up) -> None:
    checks = up.json("doctor")["checks"]
    said = {(one["check"], one["subject"]): (one["status"], one["why"]) for one in checks}
    for engine in ("prefill-1", "decode-1"):
        status, why = said["hash agreement", engine]
        assert (status, "block keys are equal" in why) == ("pass", True), why
        assert said["engines", engine][0] == "pass"
        status, why = said["read back", engine]
        assert (status, "its answer is equal" in why) == ("pass", True), why
    assert said["gateway", "here"][0] == "pass"


def test_an_instance_is_drained_and_taken_back(up: Up) -> None:
    assert up.json("instance", "drain", "prefill-1")["instance_id"] == "prefill-1"
    rows: dict[str, Any] = {}
    for _ in range(100):
        rows = {row["instance_id"]: row for row in up.json("status")["serving"]["instances"]}
        if rows["prefill-1"]["state"] == "draining":
            break
    assert rows["prefill-1"]["state"] == "draining"
    up.json("instance", "undrain", "prefill-1")
    assert up.json("instance", "role", "prefill-1", "both")["role"] == "both"
    assert up.json("instance", "role", "prefill-1", "prefill")["role"] == "prefill"
    assert up.json("instance", "drain", "nobody", expect=1)["error"]["name"] == "INSTANCE_UNKNOWN"


def test_the_doctor_finds_that_no_block_is_read_back(up: Up) -> None:
    """The last test of the fixture: the supervisor kills the node when it has been silent for long."""
    (node,) = up.announced["nodes"]
    freeze(node["pid"])
    checks = up.json("doctor", expect=1)["checks"]
    found = {one["subject"]: one for one in checks if one["check"] == "read back"}
    assert set(found) == {"decode-1", "prefill-1"}
    for one in found.values():
        assert one["status"] == "fail" and one["fix"].startswith("mend what `store nodes`"), one


def test_detached_and_down(tmp_path: Path) -> None:
    def run(*arguments: str, limit_s: float = 180) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mooncache.cli", *arguments],
            env=environ(tmp_path),
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    done = run("up", "--detach", *SMALL, "--prefill", "0", "--ssd", "64MiB")
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SSD 64.0 MiB" in done.stdout
        assert sum(file.stat().st_size for file in (tmp_path / "ssd" / "node-1").iterdir()) >= 32 << 20
        assert "down` stops everything" in done.stdout
        assert "random weights" in done.stdout
        found = run_id(tmp_path)
        assert processes_of_run(found)
    finally:
        down = run("down", "--json")
    assert json.loads(down.stdout)["stopped"] is True
    assert json.loads(down.stdout)["killed"] == []
    assert not processes_of_run(found)
    nothing = run("down")
    assert nothing.returncode == 1
    assert "no cluster runs" in nothing.stdout


@pytest.mark.deep
def test_down_cleans_up_after_a_killed_up(tmp_path: Path) -> None:
    """The parent dies by SIGKILL: its services end by themselves, and `down` makes sure of the rest.

    Without engines: test_cluster.py. An engine whose worker was killed: tests/worker/test_no_orphans.py.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "mooncache.cli", "up", "--json", *SMALL, "--prefill", "0"],
        env=environ(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=end_with_parent,  # noqa: PLW1509
    )
    with contextlib.closing(process.stdout):  # type: ignore[type-var]
        read_document(process, 180)
        found = run_id(tmp_path)
        process.kill()
        process.wait(60)
    done = subprocess.run(
        [sys.executable, "-m", "mooncache.cli", "down", "--json"],
        env=environ(tmp_path),
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout)["stopped"] is True
    assert not processes_of_run(found)
    assert not (tmp_path / "cluster.json").exists()
