"""Tokens: files that only the owner can read, derivation, and refusals that give nothing away."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from mooncache import auth
from mooncache.errors import ConfigInvalid, InvalidArgument, Unauthenticated

CLUSTER = auth.Token("default", admin=True, key=bytes(range(32)))


def test_created_file_is_private_and_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "state" / "cluster.token"
    os.umask(os.umask(0))
    token, created = auth.load_or_create_cluster_token(path)
    again, created_again = auth.load_or_create_cluster_token(path)
    assert (created, created_again) == (True, False)
    assert token == again
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0
    assert path.read_text() == f"mcc1.{token.key.hex()}\n"
    assert [entry.name for entry in path.parent.iterdir()] == ["cluster.token"]
    with pytest.raises(FileExistsError):
        auth.create_cluster_token(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_files_that_others_may_read_are_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "t"
    auth.create_cluster_token(path)
    path.chmod(mode)
    with pytest.raises(ConfigInvalid, match="chmod 600"):
        auth.load_cluster_token(path)


@pytest.mark.parametrize(
    "text", ["", "mcc1.", "mcc1." + "g" * 64, "mcc1." + "a" * 63, "x" * 100_000, "mct1.t." + "a" * 64]
)
def test_malformed_files_are_refused_without_showing_them(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigInvalid) as caught:
        auth.load_cluster_token(path)
    assert "aaaa" not in caught.value.message
    with pytest.raises(ConfigInvalid, match="does not exist"):
        auth.load_cluster_token(tmp_path / "absent")
    with pytest.raises(ConfigInvalid, match="regular"):
        auth.load_cluster_token(tmp_path)


def test_derivation_is_the_agreed_one() -> None:
    token = auth.tenant_token(CLUSTER, "team-a")
    expected = blake3(b"mooncache tenant v1\0team-a", key=CLUSTER.key).digest()
    assert token.text == f"mct1.team-a.{expected.hex()}"
    assert auth.parse_token(token.text) == token
    assert token.tenant_key == expected
    assert CLUSTER.tenant_key == blake3(b"mooncache tenant v1\0default", key=CLUSTER.key).digest()
    assert auth.tenant_id("team-a") == int.from_bytes(blake3(b"team-a").digest()[:8], "little")


def test_who_is_who() -> None:
    check = auth.Authenticator(CLUSTER)
    assert check.identify(f"Bearer {CLUSTER.text}") == auth.Identity("default", admin=True)
    tenant = auth.tenant_token(CLUSTER, "t")
    assert check.identify(f"bearer {tenant.text}") == auth.Identity("t", admin=False)
    with pytest.raises(InvalidArgument):
        auth.tenant_token(tenant, "u")
    with pytest.raises(ConfigInvalid):
        auth.Authenticator(tenant)


@pytest.mark.parametrize("change", ["tenant", "key", "scheme", "other cluster", "empty"])
def test_wrong_tokens_are_refused_without_showing_them(change: str) -> None:
    tenant = auth.tenant_token(CLUSTER, "t").text
    presented = {
        "tenant": "Bearer " + tenant.replace(".t.", ".u."),
        "key": "Bearer " + tenant[:-1] + ("0" if tenant[-1] != "0" else "1"),
        "scheme": f"Basic {tenant}",
        "other cluster": "Bearer mcc1." + "ab" * 32,
        "empty": "",
    }[change]
    with pytest.raises(Unauthenticated) as caught:
        auth.Authenticator(CLUSTER).identify(presented)
    assert presented[20:] == "" or presented[20:] not in caught.value.message


@given(st.text(max_size=300))
def test_no_text_breaks_the_check(text: str) -> None:
    with pytest.raises(Unauthenticated):
        auth.Authenticator(CLUSTER).identify(text)
    with pytest.raises(Unauthenticated):
        auth.parse_token(text)


def test_secrets_do_not_show() -> None:
    assert CLUSTER.key.hex() not in repr(CLUSTER)
    assert repr(CLUSTER.key)[2:-1] not in repr(CLUSTER)


@pytest.mark.parametrize("name", ["", "A", "a b", ".a", "-a", "a" * 64, "ä", "a\n", "a/b"])
def test_wrong_tenant_names(name: str) -> None:
    with pytest.raises(InvalidArgument):
        auth.check_tenant_name(name)


def test_a_new_cluster_token_means_new_salts() -> None:
    """So after a change of the token no request finds what was computed before."""
    old, new = (auth.Token("default", admin=True, key=bytes([number]) * 32) for number in (1, 2))
    for salt in (auth.public_salt, lambda token: auth.cache_salt(token, "team-a")):
        assert salt(old) == salt(auth.Token("default", admin=True, key=old.key))
        assert salt(old) != salt(new)
