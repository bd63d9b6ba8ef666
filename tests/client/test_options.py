"""Where a client finds its cluster and its token, and what it says when it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mooncache.auth import create_cluster_token, parse_token, tenant_token
from mooncache.client.options import ClientOptions, new_native
from mooncache.client.state_dir import read_cluster_file, remove_cluster_file, write_cluster_file
from mooncache.errors import ConfigInvalid, InvalidArgument, Unauthenticated


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOONCACHE_STATE_DIR", str(tmp_path))
    for name in (
        "MOONCACHE_CLUSTER_MASTER_TARGETS",
        "MOONCACHE_CLUSTER_TOKEN_FILE",
        "MOONCACHE_CLIENT_TOKEN",
    ):
        monkeypatch.delenv(name, raising=False)
    create_cluster_token(tmp_path / "cluster.token")
    return tmp_path


def test_the_running_cluster_is_found(folder: Path) -> None:
    write_cluster_file(folder, {"master_targets": ["127.0.0.1:7711"], "pid": 1})
    options = ClientOptions.gather()
    assert options.targets == ("127.0.0.1:7711",)
    assert options.tenant == "default"
    remove_cluster_file(folder, 2)
    assert read_cluster_file(folder) is not None, "another process's file stays"
    remove_cluster_file(folder, 1)
    with pytest.raises(ConfigInvalid, match="mooncache up"):
        ClientOptions.gather()


def test_the_environment_is_obeyed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCACHE_CLUSTER_MASTER_TARGETS", "a:1,b:2")
    assert ClientOptions.gather().targets == ("a:1", "b:2")
    assert ClientOptions.gather(master="c:3").targets == ("c:3",)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"master_targets": 7}', json.dumps({"pid": 1})])
def test_a_damaged_cluster_file_is_named(folder: Path, text: str) -> None:
    (folder / "cluster.json").write_text(text)
    with pytest.raises(ConfigInvalid, match=r"cluster\.json"):
        ClientOptions.gather()


def test_tenants_come_from_tokens(folder: Path) -> None:
    cluster = parse_token((folder / "cluster.token").read_text())
    team = tenant_token(cluster, "team-a")
    own = ClientOptions.gather(nodes=["127.0.0.1:1"], token=team.text)
    derived = ClientOptions.gather(nodes=["127.0.0.1:1"], tenant="team-a")
    assert own.tenant == derived.tenant == "team-a"
    assert own.key == derived.key
    assert derived.token == team.text, "acting as a tenant must not show the cluster's secret to anybody"
    with pytest.raises(InvalidArgument, match="cannot act as"):
        ClientOptions.gather(nodes=["127.0.0.1:1"], token=team.text, tenant="team-b")
    assert team.text not in repr(own)
    assert own.key.hex() not in repr(own)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"master": "a:1", "nodes": ["b:1"]}, "not both"),
        ({"nodes": "a:1"}, "Wrap it"),
        ({"nodes": []}, "1 to"),
        ({"nodes": ["nowhere"]}, "host:port"),
        ({"nodes": ["unix:relative"]}, "absolute"),
        ({"nodes": ["a:1"], "token": "x", "token_file": "y"}, "not both"),
        ({"nodes": ["a:1"], "lanes_per_node": 0}, "lanes_per_node"),
        ({"nodes": ["a:1"], "timeout_s": 0}, "timeout_s"),
        ({"nodes": ["a:1"], "timeout_s": "soon"}, "timeout_s"),
        ({"nodes": ["a:1"], "tls_cert": "c"}, "belong together"),
        ({"nodes": ["a:1"], "tls_ca": "/nowhere/ca.pem"}, "tls_ca"),
        ({"master": "a"}, "host:port"),
    ],
)
def test_arguments_are_refused_with_a_sentence(folder: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        ClientOptions.gather(**arguments)


def test_the_native_core_hears_when_unused_connections_are_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: dict[str, Any] = {}
    monkeypatch.setattr("mooncache._native.Client", heard.update)
    monkeypatch.setenv("MOONCACHE_CLIENT_IDLE_TIMEOUT_S", "90")
    new_native(ClientOptions.gather(nodes=["a:1"]))
    assert heard["idle_timeout_s"] == 90.0


def test_the_native_core_hears_what_bounds_the_load_of_a_sick_node(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: dict[str, Any] = {}
    monkeypatch.setattr("mooncache._native.Client", heard.update)
    monkeypatch.setenv("MOONCACHE_CLIENT_HEDGE_PERCENT", "0")
    new_native(ClientOptions.gather(nodes=["a:1"]))
    assert (heard["hedge_percent"], heard["hedge_max_s"], heard["slow_start_s"]) == (0, 0.25, 2.0)
    monkeypatch.setenv("MOONCACHE_CLIENT_HEDGE_MIN_S", "1")
    with pytest.raises(ConfigInvalid, match="hedge_min_s"):
        ClientOptions.gather(nodes=["a:1"])


def test_token_files_are_checked(folder: Path) -> None:
    (folder / "cluster.token").chmod(0o644)
    with pytest.raises(ConfigInvalid, match="chmod 600"):
        ClientOptions.gather(nodes=["a:1"])
    with pytest.raises(ConfigInvalid, match="no token file"):
        ClientOptions.gather(nodes=["a:1"], token_file=str(folder / "missing"))
    with pytest.raises(Unauthenticated) as caught:
        ClientOptions.gather(nodes=["a:1"], token="mcc1.deadbeef-secret")
    assert "deadbeef" not in str(caught.value)
