"""`mooncache doctor` on this host before a cluster runs, and against a pool in which something is really wrong."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncache.auth import create_cluster_token, load_cluster_token, tenant_token
from mooncache.cli.app import run
from mooncache.runtime.certificates import make_certificates
from tests.certificates import expired_certificate
from tests.cli.test_cluster import Up, start
from tests.conditions import wait_until
from tests.processes import freeze

NODES = ("node-1", "node-2", "node-3")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the doctor in this process, with no cluster: returns its exit code and its trouble by check."""
    monkeypatch.setenv("MOONCACHE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("MOONCACHE_STORE_NODE_CAPACITY_BYTES", "64MiB")
    for section in ("GATEWAY", "CONDUCTOR", "MASTER"):
        monkeypatch.setenv(f"MOONCACHE_{section}_PORT", "0")

    def examine(*arguments: str, **settings: object) -> tuple[int, dict[str, str]]:
        for name, value in settings.items():
            monkeypatch.setenv(f"MOONCACHE_{name}", str(value))
        code = run(["doctor", "--json", *arguments])
        return code, trouble(json.loads(capsys.readouterr().out))

    return examine


def trouble(document: dict[str, Any]) -> dict[str, str]:
    """Check -> why, of all that failed or is to be looked at."""
    return {one["check"]: one["why"] for one in document["checks"] if one["status"] in {"fail", "warn"}}


def test_a_host_before_its_first_cluster(here: Any) -> None:
    code, found = here()
    assert code == 0
    assert set(found) <= {"descriptors"}, "what this machine may lack; nothing here is broken"


def test_a_port_that_is_taken(here: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, found = here(MASTER_PORT=port)
    assert (code, f"{port} (master.port)" in found["local ports"]) == (0, True)


def test_a_token_that_others_may_read(here: Any, tmp_path: Path) -> None:
    create_cluster_token(tmp_path / "cluster.token")
    (tmp_path / "cluster.token").chmod(0o644)
    code, found = here()
    assert (code, "0644" in found["files"]) == (1, True)


def test_an_expired_certificate(here: Any, tmp_path: Path) -> None:
    (made,) = make_certificates(tmp_path / "tls", ["127.0.0.1"])
    certificate, key = expired_certificate(tmp_path, made)
    code, found = here(
        TLS_ENABLED="true", TLS_CERT_FILE=certificate, TLS_KEY_FILE=key, TLS_CA_FILE=made / "ca.pem"
    )
    assert (code, "expired" in found["certificates"]) == (1, True)


def test_a_disk_that_is_too_small(here: Any) -> None:
    code, found = here(STORE_NODE_SSD_BYTES="900000GiB")
    assert (code, "shall hold" in found["disks"]) == (1, True)


def test_a_master_that_is_not_there(here: Any, tmp_path: Path) -> None:
    create_cluster_token(tmp_path / "cluster.token")
    code, found = here("--master", "127.0.0.1:1")
    assert (code, "127.0.0.1:1" in found["master"]) == (1, True)


def test_settings_that_cannot_be_read(here: Any) -> None:
    code, found = here(MASTER_PORT="many")
    assert (code, "port" in found["token"]) == (1, True)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = start(tmp_path_factory.mktemp("up"), "--nodes", "3")
    yield running
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(60) == 0
    assert running.process.stdout is not None
    running.process.stdout.close()


@pytest.fixture
def doctor(up: Up, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the doctor in this process against the pool: returns its exit code and its document."""
    monkeypatch.setenv("MOONCACHE_STATE_DIR", str(up.folder))

    def look(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = run(["doctor", "--json", *arguments])
        return code, json.loads(capsys.readouterr().out)

    return look


def passes(document: dict[str, Any], check: str) -> set[str]:
    return {one["subject"] for one in document["checks"] if (one["check"], one["status"]) == (check, "pass")}


def test_a_pool_that_is_well(up: Up, doctor: Any) -> None:
    wait_until(lambda: "directory" not in trouble(doctor()[1]), "all nodes have reported")
    code, document = doctor()
    assert (code, set(trouble(document)) <= {"descriptors"}) == (0, True), trouble(document)
    for check in ("here to node", "node to node", "probe block", "clock", "store nodes", "memory"):
        assert passes(document, check) == set(NODES), check
    assert up.json("ls") == {"blocks": []}, "its blocks are removed again"
    assert document["hosts"]["node-1"]["arena"]["size_bytes"] == 32 << 20
    human = up.run("doctor").stdout.decode()
    assert "nothing is wrong" in human or "descriptors" in human


def test_another_clusters_token(doctor: Any, tmp_path: Path) -> None:
    token = tmp_path / "wrong.token"
    token.write_text("mcc1." + "ab" * 32)
    token.chmod(0o600)
    code, document = doctor("--token-file", str(token))
    assert (code, "refuses" in trouble(document)["token"]) == (1, True)


def test_a_tenants_token_sees_less_and_is_no_trouble(up: Up, doctor: Any, tmp_path: Path) -> None:
    token = tmp_path / "tenant.token"
    token.write_text(tenant_token(load_cluster_token(up.folder / "cluster.token"), "alice").text)
    token.chmod(0o600)
    code, document = doctor("--token-file", str(token))
    assert (code, set(trouble(document)) <= {"descriptors"}) == (0, True), trouble(document)
    assert passes(document, "probe block") == set(NODES)


def test_a_stopped_node_is_named_and_holds_nothing_up(up: Up, doctor: Any) -> None:
    """The last test of the fixture: the supervisor kills the node when it has been silent for long."""
    freeze(next(node["pid"] for node in up.announced["nodes"] if node["node_id"] == "node-2"))
    code, document = doctor()
    assert code == 1
    failed = {(one["check"], one["subject"]) for one in document["checks"] if one["status"] == "fail"}
    assert ("here to node", "node-2") in failed
    assert {subject for _, subject in failed} == {"node-2"}
    assert passes(document, "probe block") == {"node-1", "node-3"}
    assert passes(document, "node to node") == {"node-1", "node-3"}
