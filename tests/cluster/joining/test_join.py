"""Joining over loopback: what a machine gets, and every way in which it is refused. Real TLS, real certificates."""

from __future__ import annotations

import fcntl
import json
import ssl
import stat
import threading
from collections import Counter
from pathlib import Path

import pytest

from mooncache.auth import load_cluster_token
from mooncache.cluster.joining.core.code import JoinCode, make_code, parse_code
from mooncache.cluster.joining.core.invitation import WRONG_CODES_MAX, InvitationState
from mooncache.cluster.joining.inviting import ATTEMPTS_MAX
from mooncache.cluster.joining.joining import JoiningMachine
from mooncache.config import explain, load
from mooncache.errors import (
    ConfigInvalid,
    ConnectionLost,
    InvalidArgument,
    MooncacheError,
    PermissionDenied,
    ProtocolError,
    Unauthenticated,
)
from mooncache.runtime.certificates import check_certificate
from mooncache.runtime.clock import ManualClock
from mooncache.runtime.tls import channel_credentials, http_server_context, server_credentials
from tests.cluster.joining.invited import HOST, OWN, SETTINGS, invitation


def wrong(code: JoinCode) -> JoinCode:
    """A code of the same invitation that is not its code."""
    other = "0" if code.secret[0] != "0" else "1"
    return JoinCode(code.name, other + code.secret[1:])


def join(folder: Path, target: str, code: JoinCode) -> None:
    JoiningMachine(folder, HOST).join(target, code)


def test_a_machine_gets_all_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "b"
    with invitation(tmp_path / "a") as first:
        result = JoiningMachine(mine, HOST, ["b.example"]).join(
            first.target, parse_code(first.server.code.text)
        )
        ended = first.end()
    assert (ended.invitation.state, ended.invitation.joined, ended.confirmed) == (
        InvitationState.USED,
        HOST,
        True,
    )
    assert result.names == (HOST, "b.example")
    assert {path.name for path in mine.iterdir()} == {"cluster.toml", "cluster.token", "tls", "up.lock"}
    files = [mine / "cluster.toml", mine / "cluster.token", *(mine / "tls").iterdir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((mine / "tls").stat().st_mode) == 0o700
    assert load_cluster_token(mine / "cluster.token") == load_cluster_token(tmp_path / "a" / "cluster.token")
    for name in (HOST, "b.example", "localhost"):
        check_certificate(mine / "tls" / "ca.pem", mine / "tls" / "cert.pem", name)
    with pytest.raises(ConfigInvalid, match="verify refused"):
        check_certificate(mine / "tls" / "ca.pem", mine / "tls" / "cert.pem", OWN)

    monkeypatch.setenv("MOONCACHE_STATE_DIR", str(mine))
    config = load()
    assert config.joined
    assert config.cluster.master_targets == (f"{OWN}:7700", "10.0.0.4:7700")
    assert config.cluster.conductor_target == f"{OWN}:7800"
    assert (config.worker.engine, config.worker.model_name, config.hf.block_tokens) == ("hf", "moon", 16)
    assert {config.store_node.host, config.store_node.data_host, config.worker.engine_host} == {HOST}
    sources = {row.name: row.source for row in explain(config)}
    assert sources["tls.enabled"] == str(mine / "cluster.toml")
    assert config.tls.require_client_cert
    assert server_credentials(config.tls)
    assert channel_credentials(config.tls)
    assert http_server_context(config.tls)


def test_the_private_key_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte that the joining machine sends is looked at."""
    sent: list[bytes] = []
    send = ssl.SSLSocket.sendall

    def record(self: ssl.SSLSocket, data: bytes, flags: int = 0) -> None:
        sent.append(bytes(data))
        send(self, data, flags)

    monkeypatch.setattr(ssl.SSLSocket, "sendall", record)
    with invitation(tmp_path / "a") as first:
        join(tmp_path / "b", first.target, first.server.code)
    key = (tmp_path / "b" / "tls" / "key.pem").read_text()
    everything = b"".join(sent).decode("latin-1")
    assert len(sent) == 2
    assert "PRIVATE" not in everything
    assert key.splitlines()[1] not in everything
    assert first.server.code.secret not in everything
    assert not [path for path in (tmp_path / "a").rglob("*") if path.is_file() and key in path.read_text()]


def test_wrong_codes_block_the_invitation(tmp_path: Path) -> None:
    with invitation(tmp_path / "a") as first:
        for count in range(1, WRONG_CODES_MAX + 1):
            with pytest.raises(Unauthenticated, match="does not know this code"):
                join(tmp_path / "b", first.target, wrong(first.server.code))
            assert first.server.invitation.wrong_count == count
        assert first.end().invitation.state is InvitationState.BLOCKED
        with pytest.raises(ConnectionLost, match="No invitation is open"):
            join(tmp_path / "b", first.target, first.server.code)
    assert list((tmp_path / "b").iterdir()) == [tmp_path / "b" / "up.lock"]


def test_guesses_of_other_codes_end_it_too(tmp_path: Path) -> None:
    with invitation(tmp_path / "a") as first:
        for number in range(ATTEMPTS_MAX):
            with pytest.raises(MooncacheError):
                join(tmp_path / "b", first.target, make_code(number.to_bytes(12, "big")))
        assert first.end().invitation.state is InvitationState.BLOCKED
        assert first.server.invitation.wrong_count == 0


def test_a_code_is_good_once(tmp_path: Path) -> None:
    """Two machines try at the same moment."""
    outcomes: Counter[str] = Counter()

    def attempt(name: str) -> None:
        try:
            join(tmp_path / name, first.target, first.server.code)
            outcomes["joined"] += 1
        except (PermissionDenied, ConnectionLost):
            outcomes["refused"] += 1

    with invitation(tmp_path / "a") as first:
        threads = [threading.Thread(target=attempt, args=(name,)) for name in ("b", "c")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert outcomes == {"joined": 1, "refused": 1}
    assert len(list(tmp_path.glob("?/tls"))) == 1
    with (
        invitation(tmp_path / "a") as later,
        pytest.raises(PermissionDenied, match="has been used: it works once"),
    ):
        join(tmp_path / "d", later.target, first.server.code)


def test_expired_and_revoked(tmp_path: Path) -> None:
    clock = ManualClock()
    with invitation(tmp_path / "a", 60.0, clock) as first:
        clock.advance(61.0)
        assert first.end().invitation.state is InvitationState.EXPIRED
    with invitation(tmp_path / "a", 60.0, clock) as second:
        assert (tmp_path / "a" / "invitations" / f"{second.server.code.name}.json").exists()
        (tmp_path / "a" / "invitations" / f"{second.server.code.name}.revoked").touch()
        assert second.end().invitation.state is InvitationState.REVOKED
        with pytest.raises(ConnectionLost, match="the code may have been used, have expired or been revoked"):
            join(tmp_path / "b", second.target, second.server.code)
    with invitation(tmp_path / "a", 60.0, clock) as third:
        with pytest.raises(PermissionDenied, match="has expired"):
            join(tmp_path / "b", third.target, first.server.code)
        with pytest.raises(PermissionDenied, match="has been revoked"):
            join(tmp_path / "b", third.target, second.server.code)
        join(tmp_path / "b", third.target, third.server.code)


def test_names_that_are_the_first_machines_own(tmp_path: Path) -> None:
    with invitation(tmp_path / "a") as first:
        with pytest.raises(PermissionDenied, match="refuses the names"):
            JoiningMachine(tmp_path / "b", HOST, [OWN]).join(first.target, first.server.code)
        assert first.server.invitation.state is InvitationState.OPEN
        assert first.server.invitation.wrong_count == 0
        join(tmp_path / "b", first.target, first.server.code)


@pytest.mark.parametrize("name", ["a b", "*.example", "x,IP:10.0.0.5", "a\nb", "DNS:x", ""])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="neither an address nor the name"):
        JoiningMachine(tmp_path / "b", HOST, [name])


def test_a_machine_that_has_a_cluster(tmp_path: Path) -> None:
    mine = tmp_path / "b"
    with invitation(tmp_path / "a") as first:
        join(mine, first.target, first.server.code)
    key = (mine / "tls" / "key.pem").read_bytes()
    with invitation(tmp_path / "c") as other:
        with pytest.raises(ConfigInvalid, match="belongs to a cluster already"):
            join(mine, other.target, other.server.code)
        with (mine / "up.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(ConfigInvalid, match="A cluster is running"):
                JoiningMachine(mine, HOST, replace=True).join(other.target, other.server.code)
        assert other.server.invitation.state is InvitationState.OPEN, "the code was not spent on it"
        JoiningMachine(mine, HOST, replace=True).join(other.target, other.server.code)
    assert (mine / "tls" / "key.pem").read_bytes() != key
    assert load_cluster_token(mine / "cluster.token") == load_cluster_token(tmp_path / "c" / "cluster.token")


def test_no_certificate_can_be_made(tmp_path: Path) -> None:
    with invitation(tmp_path / "a") as first:
        (tmp_path / "a" / "authority" / "ca.key").unlink()
        with pytest.raises(PermissionDenied, match="could not make the certificate"):
            join(tmp_path / "b", first.target, first.server.code)
        ended = first.end()
    assert "openssl x509 refused" in ended.trouble
    assert not ended.confirmed
    assert not (tmp_path / "b" / "cluster.toml").exists()


def test_records_hold_no_secret(tmp_path: Path) -> None:
    with invitation(tmp_path / "a") as first:
        path = tmp_path / "a" / "invitations" / f"{first.server.code.name}.json"
        record = path.read_text()
        assert json.loads(record)["state"] == "open"
        assert first.server.code.secret not in record
        assert first.server.code.secret not in repr(first.server.code)
        assert first.server.code.text[5:] not in record


def test_settings_that_one_machine_does_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "worker.engine", "hf")
    monkeypatch.setitem(SETTINGS, "client.token", "x")
    with (
        invitation(tmp_path / "a") as first,
        pytest.raises(ProtocolError, match=r"'client\.token', which this one does not take"),
    ):
        join(tmp_path / "b", first.target, first.server.code)
    assert not (tmp_path / "b" / "cluster.token").exists()
