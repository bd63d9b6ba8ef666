"""`invite`, `join` and `up` as commands, and what they refuse before anything starts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncache.auth import create_cluster_token
from mooncache.client.state_dir import write_cluster_file
from mooncache.cluster.joining.first_machine import inviting_machine, turn_tls_on
from mooncache.cluster.layout import ClusterLayout, plan
from mooncache.cluster.ports import PortPicker
from mooncache.cluster.settings import ClusterRole, ClusterSettings
from mooncache.config import load
from mooncache.errors import ConfigInvalid, InvalidArgument
from tests.cli.test_cluster import environment, read_document

OWN = "10.0.0.5"


def first_machine(folder: Path, host: str = OWN, *, tls: bool = True) -> None:
    """A state folder as a running `mooncache up --tls` leaves it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if tls:
        turn_tls_on(folder, host)
    create_cluster_token(folder / "cluster.token")
    ca = str(folder / "authority" / host / "ca.pem") if tls else None
    write_cluster_file(folder, {"master_targets": [f"{host}:7700"], "tls_ca": ca, "pid": os.getpid()})


def cli(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "mooncache.cli", *arguments]
    return subprocess.run(
        command,
        env=environment(folder),
        capture_output=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@contextlib.contextmanager
def invite(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """An invitation that is open, and what it printed; it ends with the test, also where that fails."""
    command = [
        sys.executable,
        "-m",
        "mooncache.cli",
        "invite",
        "--json",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    with subprocess.Popen([*command, *arguments], env=environment(folder), stdout=subprocess.PIPE) as process:
        try:
            yield process, read_document(process)
        finally:
            process.kill()


def test_from_the_code_to_the_cluster(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first_machine(first)
    with invite(first) as (process, document):
        listed = json.loads(cli(first, "invite", "list", "--json").stdout)["invitations"]
        assert [(one["name"], one["state"]) for one in listed] == [(document["name"], "open")]
        assert document["code"] not in json.dumps(listed)
        words = document["command"].split()
        assert words[:2] == ["mooncache", "join"]
        done = cli(second, *words[1:])
        assert done.returncode == 0, done.stderr
        assert document["authority"] in done.stdout.decode()
        ended = read_document(process)
        assert process.wait(60) == 0
        assert (ended["state"], ended["joined"], ended["confirmed"]) == ("used", "127.0.0.1", True)

    again = cli(tmp_path / "c", *words[1:])
    assert again.returncode == 3
    assert b"No invitation is open at" in again.stderr
    refused = cli(second, "up")
    assert refused.returncode == 2
    assert b"belongs to the cluster of 10.0.0.5:7700. Say what it shall do: --role store" in refused.stderr
    explained = json.loads(cli(second, "config", "explain", "--json").stdout)["settings"]
    assert {row["source"] for row in explained if row["name"] == "tls.ca_file"} == {
        str(second / "cluster.toml")
    }


def test_revoked_and_interrupted(tmp_path: Path) -> None:
    first_machine(tmp_path)
    with invite(tmp_path) as (process, document):
        done = cli(tmp_path, "invite", "revoke", document["name"].lower())
        assert (done.returncode, done.stdout) == (0, f"revoked {document['name']}\n".encode())
        assert read_document(process)["state"] == "revoked"
        assert process.wait(60) == 1
    again = cli(tmp_path, "invite", "revoke", document["name"], "--json")
    assert again.returncode == 1
    assert json.loads(again.stdout) == {"name": document["name"], "revoked": False, "state": "revoked"}
    assert cli(tmp_path, "invite", "revoke", "../x").returncode == 1

    with invite(tmp_path) as (other, document):
        other.send_signal(signal.SIGKILL)
        other.wait(60)
    listed = json.loads(cli(tmp_path, "invite", "list", "--json").stdout)["invitations"]
    assert {one["name"]: one["state"] for one in listed}[document["name"]] == "ended"


def test_a_cluster_that_no_machine_can_join(tmp_path: Path) -> None:
    def why(folder: Path, authority: Path | None = None) -> str:
        with pytest.raises(ConfigInvalid) as refused:
            inviting_machine(folder, authority, {})
        return refused.value.message

    assert "No cluster runs in" in why(tmp_path / "none")
    first_machine(tmp_path / "plain", tls=False)
    assert "runs without TLS" in why(tmp_path / "plain")
    assert "`mooncache up --tls --host ADDRESS`" in why(tmp_path / "plain")
    first_machine(tmp_path / "loopback", "127.0.0.1")
    assert "by which no other machine reaches it" in why(tmp_path / "loopback")
    first_machine(tmp_path / "before")
    write_cluster_file(tmp_path / "before", {"master_targets": [f"{OWN}:7700"], "tls_ca": None})
    assert "runs without TLS" in why(tmp_path / "before"), "it was started before TLS was turned on"
    first_machine(tmp_path / "good")
    machine, host = inviting_machine(tmp_path / "good", None, {"worker.model_name": "m"})
    assert (host, machine.settings) == (OWN, {"worker.model_name": "m"})
    assert machine.token not in repr(machine)
    assert "There is no authority's key" in why(tmp_path / "good", tmp_path)


def test_tls_is_turned_on_once(tmp_path: Path) -> None:
    turn_tls_on(tmp_path, OWN)
    text = (tmp_path / "cluster.toml").read_text()
    ca = (tmp_path / "authority" / "ca.pem").read_text()
    turn_tls_on(tmp_path, OWN)
    assert (tmp_path / "cluster.toml").read_text() == text
    turn_tls_on(tmp_path, "10.0.0.9")  # a new address: another certificate of the same authority
    config = load(overrides={"cluster.state_dir": str(tmp_path)})
    assert config.tls.cert_file == tmp_path / "authority" / "10.0.0.9" / "cert.pem"
    assert (tmp_path / "authority" / "ca.pem").read_text() == ca
    assert (tmp_path / "authority" / "10.0.0.9" / "ca.pem").read_text() == ca


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("up", "--role", "store"), b"has joined no cluster"),
        (("up", "--role", "master"), b"--role must be store, engine or gateway"),
        (("join", "10.0.0.5", "--code", "K7QM"), b"That is no code of an invitation"),
        (("join", "10.0.0.5"), b"there is no terminal to ask for it"),
        (("invite", "--valid", "2d"), b"--valid"),
    ],
)
def test_arguments_that_cannot_be(tmp_path: Path, arguments: tuple[str, ...], words: bytes) -> None:
    done = cli(tmp_path, *arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr


def joined_layout(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *roles: ClusterRole, **settings: Any
) -> ClusterLayout:
    """What `up --role` starts on a machine with that cluster.toml."""
    monkeypatch.setenv("MOONCACHE_STATE_DIR", str(folder))
    (folder / "cluster.toml").write_text(
        '[cluster]\nmaster_targets = ["10.0.0.5:7700", "10.0.0.4:7700"]\nconductor_target = "10.0.0.5:7800"\n'
    )
    chosen = ClusterSettings(state_dir=folder, roles=roles, gateway_port=0, **settings)
    with PortPicker(chosen.host) as ports:
        return plan(chosen, load(), folder, folder / "run", "a run", ports)


def test_parts_of_a_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = joined_layout(
        tmp_path,
        monkeypatch,
        *ClusterRole,
        engine="hf",
        prefill=1,
        decode=0,
        model="/srv/m",
        model_name="moon",
    )
    assert list(everything.parts) == ["127.0.0.1-node-1", "gateway", "127.0.0.1-prefill-1"]
    for part in everything.parts.values():
        assert part.env["MOONCACHE_CLUSTER_MASTER_TARGETS"] == "10.0.0.5:7700,10.0.0.4:7700"
        assert part.env["MOONCACHE_CLUSTER_CONDUCTOR_TARGET"] == "10.0.0.5:7800"
        load(env=dict(part.env))
    worker = everything.parts["127.0.0.1-prefill-1"].env
    assert worker["MOONCACHE_WORKER_INSTANCE_ID"] == "127.0.0.1-prefill-1"
    assert (worker["MOONCACHE_WORKER_MODEL"], worker["MOONCACHE_WORKER_MODEL_NAME"]) == ("/srv/m", "moon")
    assert worker["MOONCACHE_WORKER_ENGINE_HOST"] == "127.0.0.1"
    assert everything.parts["gateway"].env["MOONCACHE_GATEWAY_MODEL_FOLDERS"] == "/srv/m"
    assert list(joined_layout(tmp_path, monkeypatch, ClusterRole.STORE).parts) == ["127.0.0.1-node-1"]
    engines = joined_layout(tmp_path, monkeypatch, ClusterRole.ENGINE, engine="hf", prefill=0)
    assert {name: part.env["MOONCACHE_WORKER_ROLE"] for name, part in engines.parts.items()} == {
        "127.0.0.1-decode-1": "both"
    }
    assert engines.gateway_url == ""
    with pytest.raises(InvalidArgument, match="decode must be between 1"):
        ClusterSettings(state_dir=tmp_path, prefill=1, decode=0)
    with pytest.raises(InvalidArgument, match="decode must be between 1"):
        ClusterSettings(state_dir=tmp_path, prefill=0, decode=0, roles=(ClusterRole.ENGINE,))


def test_what_a_machine_was_given_is_read_below_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCACHE_STATE_DIR", str(tmp_path))
    given = tmp_path / "cluster.toml"
    given.write_text("[master]\nport = 1\nlease_s = 9.0\n[gateway]\nport = 2\n")
    own = tmp_path / "own.toml"
    own.write_text("[master]\nport = 11\n")
    monkeypatch.setenv("MOONCACHE_GATEWAY_PORT", "22")
    config = load(own)
    assert (config.master.port, config.master.lease_s, config.gateway.port) == (11, 9.0, 22)
    assert not config.joined
    assert load(own, env={}).master.lease_s == 5.0, "with an environment of its own nothing else is read"
    given.write_text('[cluster]\nstate_dir = "/x"\n')
    with pytest.raises(ConfigInvalid, match="Delete it there"):
        load()
    given.write_text("[mastre]\nport = 1\n")
    with pytest.raises(ConfigInvalid, match="did you mean master"):
        load()
