"""The CLI against a cluster that `mooncache up` started as its own process."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mooncache.cluster.processes import processes_of_run
from tests.processes import end_with_parent, freeze

START_S = 120.0


def environment(folder: Path) -> dict[str, str]:
    base = {key: value for key, value in os.environ.items() if not key.startswith("MOONCACHE_")}
    return {**base, "MOONCACHE_STATE_DIR": str(folder), "COLUMNS": "200"}


@dataclass
class Up:
    """A running `mooncache up --json` and what it announced."""

    process: subprocess.Popen[bytes]
    folder: Path
    announced: dict[str, Any]

    def run(self, *arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-m", "mooncache.cli", *arguments],
            env=environment(self.folder),
            input=data,
            capture_output=True,
            timeout=60,
            check=False,
        )

    def json(self, *arguments: str, expect: int = 0) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == expect, done.stdout + done.stderr
        return json.loads(done.stdout)


def read_document(process: subprocess.Popen[bytes], timeout_s: float = START_S) -> dict[str, Any]:
    """The next JSON document on the process's output, within a bounded time."""
    assert process.stdout is not None
    text, deadline_s = b"", time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if not select.select([process.stdout], [], [], 1.0)[0]:
            continue
        data = os.read(process.stdout.fileno(), 65_536)
        assert data, f"the process ended: {process.poll()}, {text!r}"
        text += data
        try:
            return dict(json.loads(text))
        except json.JSONDecodeError:
            continue
    process.kill()
    raise AssertionError(f"no document: {text!r}")


def start(folder: Path, *arguments: str) -> Up:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "mooncache.cli",
            "up",
            "--json",
            "--engine",
            "none",
            "--master-port",
            "0",
            "--capacity",
            "32MiB",
            *arguments,
        ],
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=end_with_parent,  # noqa: PLW1509
    )
    return Up(process, folder, read_document(process))


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = start(tmp_path_factory.mktemp("up"))
    yield running
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(60) == 0
    assert running.process.stdout is not None
    running.process.stdout.close()
    for node in running.announced["nodes"]:
        assert not Path(f"/proc/{node['pid']}").exists()
    assert not (running.folder / "cluster.json").exists()


def test_what_up_announces(up: Up) -> None:
    assert set(up.announced) == {"master_targets", "state_dir", "token_file", "pid", "master_pid", "nodes"}
    assert [set(node) for node in up.announced["nodes"]] == [
        {"node_id", "pid", "grpc_target", "tcp", "unix_path", "capacity_bytes", "ssd_bytes"}
    ] * 2
    token = Path(up.announced["token_file"])
    assert token.stat().st_mode & 0o777 == 0o600
    secret = token.read_text().strip().split(".")[1]
    for log in (up.folder / "logs").iterdir():
        text = log.read_text()
        assert secret not in text
        assert all("event" in json.loads(line) for line in text.splitlines())


def test_put_get_stat_ls_rm(up: Up) -> None:
    put = up.json("put", "greeting", "hello")
    assert put == {
        "key": "greeting",
        "size_bytes": 5,
        "created": True,
        "node_id": put["node_id"],
        "code": "OK",
    }
    assert up.json("put", "greeting", "hello")["created"] is False
    got = up.json("get", "greeting")
    assert got == {
        "key": "greeting",
        "found": True,
        "size_bytes": 5,
        "value_base64": base64.b64encode(b"hello").decode(),
    }
    assert up.run("get", "greeting").stdout == b"hello"
    stat = up.json("stat", "greeting")
    described = {"size_bytes", "crc32c", "tier", "pins", "hits", "age_s", "node_ids", "tiers", "origin"}
    assert set(stat) == {"key", "found"} | described
    assert (len(stat["node_ids"]), stat["tiers"]) == (1, [stat["tier"]])
    assert f"{stat['node_ids'][0]} (dram)" in up.run("stat", "greeting").stdout.decode()
    blocks = up.json("ls")["blocks"]
    assert [set(block) for block in blocks] == [{"key", "size_bytes", "tier", "hits", "node_id"}]
    assert up.run("get", blocks[0]["key"]).stdout == b"hello"
    assert up.json("pin", "greeting", "--ttl", "1min") == {"results": [{"key": "greeting", "code": 0}]}
    assert up.json("unpin", "greeting") == {"results": [{"key": "greeting", "code": 0}]}
    assert up.json("rm", "greeting", "missing", expect=1)["results"][1] == {"key": "missing", "code": 200}
    assert up.json("get", "greeting", expect=1) == {"key": "greeting", "found": False}
    assert up.run("get", "greeting").returncode == 1
    assert up.run("stat", "greeting").returncode == 1
    assert up.json("ls") == {"blocks": []}


def test_files_and_pipes(up: Up, tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    (tmp_path / "in").write_bytes(data)
    assert up.json("put", "file", "--file", str(tmp_path / "in"), "--replicas", "2")["size_bytes"] == len(
        data
    )
    up.run("get", "file", "--out", str(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == data
    assert up.run("put", "stdin", "--file", "-", data=b"piped").returncode == 0
    assert up.run("get", "stdin").stdout == b"piped"


def test_status(up: Up) -> None:
    status = up.json("status")
    assert set(status) == {"master", "masters", "nodes", "parts", "members", "members_error"}
    assert {row["name"]: row["here"]["part"] for row in status["members"] if row["kind"] == "store node"} == {
        "node-1": "node-1",
        "node-2": "node-2",
    }
    assert status["master"]["leading"] is True
    assert {node["state"] for node in status["nodes"]} == {"active"}
    human = up.run("status")
    assert b"node-1" in human.stdout
    assert b"node-2" in human.stdout


def test_tenants_by_token_file(up: Up, tmp_path: Path) -> None:
    token = tmp_path / "team.token"
    token.write_bytes(up.run("token", "--tenant", "team-a").stdout)
    token.chmod(0o600)
    up.json("put", "mine", "of the team", "--token-file", str(token))
    assert up.run("get", "mine", "--tenant", "team-a").stdout == b"of the team"
    assert up.run("get", "mine").returncode == 1
    refused = up.json("drain", "node-1", "--token-file", str(token), expect=4)
    assert refused["error"]["name"] == "PERMISSION_DENIED"


def test_a_wrong_token(up: Up, tmp_path: Path) -> None:
    token = tmp_path / "wrong.token"
    token.write_text("mcc1." + "ab" * 32)
    token.chmod(0o600)
    for arguments in (["status"], ["get", "x"]):
        error = up.json(*arguments, "--token-file", str(token), expect=4)["error"]
        assert error["name"] == "UNAUTHENTICATED"


def test_drain_and_back(up: Up) -> None:
    started = up.json("drain", "node-2", "--timeout", "60s")
    assert started["state"] == "done"
    assert started["failed_block_count"] == 0
    states = {node["node_id"]: node["state"] for node in up.json("status")["nodes"]}
    assert states == {"node-1": "active", "node-2": "draining"}
    put = up.json("put", "while-draining", "x")
    assert put["node_id"] == "node-1"
    assert up.json("drain", "node-2", "--cancel")["state"] == "cancelled"
    deadline_s = time.monotonic() + 15
    while {node["state"] for node in up.json("status")["nodes"]} != {"active"}:
        assert time.monotonic() < deadline_s
    unknown = up.json("drain", "nobody", expect=1)
    assert unknown["error"]["name"] == "UNKNOWN_NODE"


def test_a_second_cluster_in_the_same_folder_is_refused(up: Up) -> None:
    done = up.run("up", "--engine", "none", "--json")
    assert done.returncode == 2
    assert "already" in json.loads(done.stdout)["error"]["message"]


def test_a_taken_port_is_named(up: Up, tmp_path: Path) -> None:
    port = up.announced["master_targets"][0].rpartition(":")[2]
    done = up.run("up", "--engine", "none", "--json", "--master-port", port, "--state-dir", str(tmp_path))
    assert done.returncode == 2
    assert port in json.loads(done.stdout)["error"]["message"]


def read_news(process: subprocess.Popen[bytes], part: str, last: str) -> list[str]:
    """What `up --json` says of a part, a JSON object a line, until it says `last`."""
    assert process.stdout is not None
    said: list[str] = []
    text, deadline_s = b"", time.monotonic() + START_S
    while last not in said and time.monotonic() < deadline_s:
        if select.select([process.stdout], [], [], 1.0)[0]:
            data = os.read(process.stdout.fileno(), 65_536)
            assert data, f"the process ended: {process.poll()}"
            *lines, text = (text + data).split(b"\n")
            said += [row["news"] for row in map(json.loads, lines) if row["part"] == part]
    return said


def test_a_node_that_refuses_its_configuration_is_a_wrong_configuration(tmp_path: Path) -> None:
    """Not a defect: the node's own sentence, and the exit code for it."""
    (tmp_path / "file").touch()
    arguments = ["--engine", "none", "--master-port", "0", "--shared", str(tmp_path / "file" / "below")]
    done = subprocess.run(
        [sys.executable, "-m", "mooncache.cli", "up", "--json", "--capacity", "32MiB", *arguments],
        env=environment(tmp_path / "state"),
        capture_output=True,
        timeout=START_S,
        check=False,
    )
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["name"]) == (2, "CONFIG_INVALID"), error
    assert error["message"].startswith("node-") and "file/below: Not a directory" in error["message"]


@pytest.mark.parametrize("killed", [False, True])
def test_down_ends_the_process_that_holds_memory(tmp_path: Path, killed: bool) -> None:
    """It ends when it is asked to, also when `mooncache up` was killed: nothing has to be killed."""
    running = start(tmp_path, "--keep-memory", "--nodes", "1")
    try:
        run_id = json.loads((tmp_path / "cluster.json").read_text())["run_id"]
        assert any(b"holder" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_of_run(run_id))
        if killed:
            running.process.kill()
            running.process.wait(30)
        assert running.json("down")["killed"] == []
        assert not processes_of_run(run_id)
    finally:
        running.process.kill()
        running.process.wait(30)
        assert running.process.stdout is not None
        running.process.stdout.close()


def test_a_killed_part_is_started_again_and_said(tmp_path: Path) -> None:
    running = start(tmp_path, "--nodes", "1")
    try:
        before = running.announced["nodes"][0]["pid"]
        os.kill(before, signal.SIGKILL)
        said = read_news(running.process, "node-1", "answers again")
        assert said[0].startswith("ended with signal SIGKILL"), said
        assert said[-1] == "answers again"
        parts = {part["name"]: part for part in running.json("status")["parts"]}
        assert parts["node-1"]["restarts"] == 1
        assert parts["node-1"]["pid"] not in (0, before)
        assert parts["master"]["pid"] == running.announced["master_pid"], "nothing else was touched"
        sentence = "node-1 was started again once; it last ended with signal SIGKILL"
        assert sentence in running.run("status").stdout.decode()
        assert sentence in running.json("top", "--once", "--interval", "100ms")["problems"]
        for _ in range(100):
            if running.run("put", "after", "the end of a node").returncode == 0:
                break
        assert running.run("get", "after").stdout == b"the end of a node"
    finally:
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == 0
        assert running.process.stdout is not None
        running.process.stdout.close()


def test_status_tells_of_the_rest_when_the_master_is_away(tmp_path: Path) -> None:
    running = start(tmp_path, "--nodes", "1")
    try:
        freeze(running.announced["master_pid"])
        done = running.run("status", "--timeout", "2s")
        assert done.returncode == 3
        assert "master" in done.stdout.decode()
        assert {part["name"] for part in running.json("status", "--timeout", "2s", expect=3)["parts"]} == {
            "master",
            "node-1",
        }
    finally:
        os.kill(running.announced["master_pid"], signal.SIGCONT)
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == 0
        assert running.process.stdout is not None
        running.process.stdout.close()


def test_metrics_are_served(up: Up) -> None:
    """Each service tells in its log where its metrics are."""
    import urllib.request

    up.json("put", "metered", "x")
    for log in (up.folder / "logs").iterdir():
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        ready = next(line for line in lines if line["event"] == "service.ready")
        request = urllib.request.Request(f"http://{ready['metrics']}/metrics")
        token = (up.folder / "cluster.token").read_text().strip()
        request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=10) as response:
            text = response.read().decode()
        assert "mooncache_" in text
        if log.name.startswith("node"):
            for name in (
                "mooncache_store_node_store_used_bytes",
                "mooncache_store_node_misses_total",
                "mooncache_store_node_removed_blocks_total",
                "mooncache_store_node_op_duration_seconds_bucket",
                "mooncache_store_node_resident_memory_bytes",
                "mooncache_store_node_registered 1.0",
            ):
                assert name in text, name
