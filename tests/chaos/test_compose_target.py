"""What a run says of containers that it cannot reach. A real engine is in tests/deploy/test_compose.py."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mooncache.chaos.core.containers import read_parts
from mooncache.chaos.core.records import PoolTally
from mooncache.chaos.shell.compose_target import ComposeTarget
from mooncache.chaos.shell.container_load import read_tally, tally_text
from mooncache.errors import (
    ConfigInvalid,
    DeadlineExceeded,
    MooncacheError,
    PermissionDenied,
    ProtocolError,
    Unsupported,
)


def container(service: str, pid: int = 0, **changed: Any) -> dict[str, Any]:
    """A container as `docker inspect` prints it, less what is not read."""
    labels = {
        "com.docker.compose.project": "deploy",
        "com.docker.compose.service": service,
        "com.docker.compose.container-number": "1",
        "com.docker.compose.oneoff": "False",
    }
    found: dict[str, Any] = {
        "Id": f"{service}{'0' * 60}",
        "State": {
            "Status": "running" if pid else "exited",
            "Pid": pid,
            "Health": {"Status": "healthy", "Log": []},
        },
        "Config": {
            "Image": "mooncache:hf",
            "Env": ["MOONCACHE_X_METRICS_PORT=9100", "EQUALS=a=b"],
            "Labels": labels,
        },
        "NetworkSettings": {
            "Ports": {"8000/tcp": [{"HostIp": "0.0.0.0", "HostPort": "8000"}], "9100/tcp": None},
            "Networks": {"deploy_cluster": {"IPAddress": "172.20.0.3" if pid else ""}},
        },
    }
    for name, value in changed.items():
        found["Config"]["Labels"]["com.docker.compose." + name.replace("_", "-")] = value
    return found


def fake_docker(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "docker"
    program.write_text("#!/bin/sh\n" + script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def refused(kind: type[MooncacheError]) -> str:
    with pytest.raises(kind) as found:
        asyncio.run(ComposeTarget.find("deploy"))
    return found.value.message


def test_parts_are_the_lasting_services() -> None:
    rows = [
        container("node-1", 7),
        container("etcd", 8),
        container("token"),
        container("decode", 9, container_number="2"),
        container("gateway", 10, oneoff="True"),
    ]
    parts = read_parts(json.dumps(rows).encode())
    assert [part.name for part in parts] == ["decode-2", "etcd", "node-1"]
    assert parts[2].probe == "172.20.0.3:9100"
    assert parts[2].published == {"8000/tcp": "127.0.0.1:8000"}
    assert parts[2].settings["EQUALS"] == "a=b"
    (ended,) = read_parts(json.dumps([container("master-1")]).encode())
    assert (ended.pid, ended.probe, ended.status) == (0, "", "exited")


@pytest.mark.parametrize("printed", [b"", b"{}", b'[{"Id": 3}]', b"\xff"])
def test_what_is_no_answer_of_inspect_is_refused(printed: bytes) -> None:
    with pytest.raises(ProtocolError, match="docker inspect"):
        read_parts(printed)


def test_what_the_pools_client_saw_comes_out_of_its_container() -> None:
    seen = PoolTally(read=5, missed=1, put=9, wrong=["k came back"], hung=2, errors=Counter(NO_SPACE=3))
    found = PoolTally()
    read_tally(tally_text(seen).encode(), found)
    assert found == seen
    for text in (b"", b"[]", b'{"errors": 3}', b'{"errors": {}, "other": 1}'):
        with pytest.raises(ProtocolError):
            read_tally(text, found)


def test_without_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "docker" in refused(Unsupported)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("permission denied while trying to connect to the Docker daemon socket", PermissionDenied),
        ("Cannot connect to the Docker daemon at unix:///run/docker.sock.", ConfigInvalid),
    ],
)
def test_an_engine_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, kind: type[MooncacheError]
) -> None:
    fake_docker(tmp_path, monkeypatch, f"echo '{said}' >&2; exit 1")
    assert said in refused(kind)


def test_an_engine_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_docker(tmp_path, monkeypatch, "exec sleep 600")
    monkeypatch.setattr("mooncache.chaos.shell.docker_command.CALL_S", 0.2)
    assert "docker ps" in refused(DeadlineExceeded)


def test_a_project_that_is_not_there_and_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_docker(tmp_path, monkeypatch, 'case "$*" in *--format*) echo shop; echo shop; echo mail ;; esac')
    assert "mail, shop" in refused(ConfigInvalid)


def inspecting(folder: Path, monkeypatch: pytest.MonkeyPatch, *rows: dict[str, Any]) -> None:
    (folder / "inspected").write_text(json.dumps(rows))
    fake_docker(
        folder, monkeypatch, f'case "$1" in ps) echo abc ;; inspect) cat "{folder}/inspected" ;; esac'
    )


def test_a_process_id_of_another_machine_is_never_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number means a process here, this test's own, which is in no such container."""
    inspecting(tmp_path, monkeypatch, container("gateway", os.getpid()))
    assert f"Process {os.getpid()} of gateway is not on this machine" in refused(ConfigInvalid)


def test_a_gateway_that_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = container("gateway")
    row["NetworkSettings"]["Ports"] = {"8000/tcp": None}
    inspecting(tmp_path, monkeypatch, row)
    assert "published" in refused(ConfigInvalid)
