"""API keys of the operator: their file, and what a gateway does when they are made, misused, and end."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import stat
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from mooncache.accounts import key_store
from mooncache.accounts.core import api_key
from mooncache.accounts.core.api_key import ApiKeyRecord, KeyScope, KeyState
from mooncache.accounts.database import AccountsPlace
from mooncache.accounts.key_store import FILE_NAME, KeyStore, keys_stamp_of
from mooncache.cli.app import run as cli
from mooncache.errors import ConfigInvalid, InvalidArgument, LimitExceeded, NotFound
from mooncache.runtime.logs import redact_text
from tests.conditions import until
from tests.gateway.stand_in import MODEL, Bench, FakeEngine, begin, chunk, running, send

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


def record(number: int = 1, **changes: Any) -> ApiKeyRecord:
    fields: dict[str, Any] = {
        "key_id": f"{number:016x}",
        "tenant": "moon",
        "scopes": frozenset({KeyScope.INFERENCE}),
        "digest": api_key.digest_of(api_key.key_text(number.to_bytes(8, "big"), bytes(32))),
        "created_s": 1_000,
    }
    return ApiKeyRecord(**(fields | changes))


def make_key(folder: Path, capsys: pytest.CaptureFixture[str], *options: str, tenant: str = "moon") -> str:
    """The text of a new key, by the command."""
    capsys.readouterr()
    assert cli(["key", "create", "--tenant", tenant, "--state-dir", str(folder), *options]) == 0
    return capsys.readouterr().out.strip()


def revoke(folder: Path, text: str) -> None:
    assert cli(["key", "revoke", api_key.id_of(text), "--state-dir", str(folder)]) == 0


async def ask(
    bench: Bench, http: aiohttp.ClientSession, key: str, path: str = PATH, body: Any = CHAT
) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"}
    method = "GET" if body is None else "POST"
    async with http.request(method, bench.url + path, json=body, headers=headers) as response:
        return response.status, json.loads(await response.text())


def test_states_and_ends() -> None:
    one = record(expires_s=2_000, revoked_s=1_500)
    assert [one.state(now) for now in (1_499, 1_500, 2_500)] == [
        KeyState.VALID,
        KeyState.REVOKED,
        KeyState.REVOKED,
    ]
    assert record(expires_s=2_000).state(2_000) is KeyState.EXPIRED
    assert (one.end_s, record().end_s) == (1_500, 0)
    for wrong in (
        {"tenant": "A"},
        {"scopes": frozenset()},
        {"name": "a\nb"},
        {"name": "a" * 65},
        {"expires_s": -1},
        {"tokens_per_minute": float("nan")},
        {"digest": b"short"},
    ):
        with pytest.raises(InvalidArgument):
            record(**wrong).check()


@given(st.text(max_size=120) | st.from_regex(r"mca1\.[0-9a-fg]{15,17}\.[0-9a-f]{63,65}", fullmatch=True))
def test_any_text_is_a_key_or_refused(text: str) -> None:
    key_id = api_key.id_of(text)
    assert not api_key.is_text_of(None, text)
    if key_id:
        assert api_key.is_key_id(key_id)
        known = record(key_id=key_id, digest=api_key.digest_of(text))
        assert api_key.is_text_of(known, text)
        assert not api_key.is_text_of(record(key_id=key_id), text)
        assert text[22:] not in redact_text(f"a {text} b")


def test_the_file_is_private_and_has_no_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = make_key(tmp_path, capsys, "--name", "ci", "--expires", "90d", "--scope", "batches")
    path = tmp_path / "accounts" / FILE_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert text.split(".")[2].encode() not in path.read_bytes()
    capsys.readouterr()
    assert cli(["key", "ls", "--state-dir", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr().out
    assert text not in said
    (found,) = json.loads(said)["keys"]
    assert (found["id"], found["tenant"], found["scopes"], found["name"]) == (
        api_key.id_of(text),
        "moon",
        ["batches"],
        "ci",
    )
    assert found["expires_unix_s"] == found["created_unix_s"] + 90 * 86_400
    revoke(tmp_path, text)
    capsys.readouterr()
    assert cli(["key", "ls", "--state-dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["keys"] == []
    assert cli(["key", "ls", "--all", "--state-dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["keys"][0]["state"] == "revoked"
    path.chmod(0o644)
    assert cli(["key", "ls", "--state-dir", str(tmp_path)]) == 2
    assert "chmod 600" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["revoke", "../x"], "is no id"),
        (["revoke", "0" * 16], "There are no keys"),
        (["create", "--tenant", "A b"], "not a tenant name"),
        (["create", "--tenant", "a", "--expires", "2020-01-01"], "not in the future"),
        (["create", "--tenant", "a", "--expires", "2020-13-01"], "is no time"),
        (["create", "--tenant", "a", "--expires", "9999999d"], "hundred years"),
        (["create", "--tenant", "a", "--name", "x" * 65], "at most 64"),
        (["create", "--tenant", "a", "--scope", "everything"], "everything"),
    ],
)
def test_refused_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    if arguments[1] == "../x":
        make_key(tmp_path, capsys)
    assert cli(["key", *arguments, "--state-dir", str(tmp_path)]) in (1, 2)
    assert words in " ".join(capsys.readouterr().err.split())


def test_limits_and_what_is_forgotten(place: AccountsPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_store, "TENANT_KEYS_MAX", 5)
    with KeyStore(place, create=True) as store:
        for number in range(5):
            store.add(record(number, expires_s=2_000 if number == 0 else 0))
        with pytest.raises(LimitExceeded, match="of one tenant"):
            store.add(record(5))
        store.add(record(6, tenant="sun"))
        store.add(record(5, created_s=2_001 + 400 * 86_400))  # the first one is forgotten
        assert f"{0:016x}" not in store.all()
        with pytest.raises(NotFound):
            store.revoke(f"{0:016x}", 5)
        assert store.revoke(f"{1:016x}", 5).revoked_s == 5
        assert store.revoke(f"{1:016x}", 9).revoked_s == 5, "the first time counts"


def test_every_change_changes_the_stamp(place: AccountsPlace) -> None:
    assert (keys_stamp_of(place) is None) == isinstance(place, Path)
    stamps = {keys_stamp_of(place)}
    with KeyStore(place, create=True) as store:
        for number in range(20):  # within one tick of the file system's clock
            store.add(record(number))
            stamps.add(keys_stamp_of(place))
            assert store.all()[f"{number:016x}"] == record(number)
    assert len(stamps) == 21


def test_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.touch(mode=0o600)
    path.write_bytes(os.urandom(5_000))
    with pytest.raises(ConfigInvalid, match="not a database"):
        KeyStore(tmp_path)
    path.unlink()
    with pytest.raises(ConfigInvalid, match="cannot be opened"):
        KeyStore(tmp_path)
    with KeyStore(tmp_path, create=True) as store:
        store.add(record())
        with sqlite3.connect(path) as direct:
            direct.execute("UPDATE api_key SET scopes = 'everything'")
        with pytest.raises(ConfigInvalid, match="no key"):
            store.all()
    with sqlite3.connect(path) as direct:
        direct.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigInvalid, match="newer program"):
        KeyStore(tmp_path)
    with sqlite3.connect(path) as direct:
        direct.execute("PRAGMA application_id = 5")
    with pytest.raises(ConfigInvalid, match="another program"):
        KeyStore(tmp_path)


async def test_a_running_gateway_takes_and_refuses_keys(
    tmp_path: Path, http: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path, [FakeEngine("e")], gateway__batch_dir=tmp_path / "batches") as bench:
        text = make_key(tmp_path, capsys, "--requests-per-minute", "2")
        wrong = text[:-1] + ("0" if text[-1] != "0" else "1")
        loaded = bench.gateway.state.keyring
        await until(lambda: loaded.end_of(api_key.id_of(text)) is None)
        assert [(await ask(bench, http, key))[0] for key in (text, wrong, text, text)] == [200, 401, 200, 429]
        assert bench.conductor.scheduled[0].tenant == "moon"
        status, answer = await ask(bench, http, text, "/v1/files", None)
        assert (status, answer["error"]["code"]) == (403, "missing_scope")
        assert "inference" in answer["error"]["message"] and "batches" in answer["error"]["message"]
        status, _ = await ask(bench, http, text, "/v1/models", None)
        assert status == 200
        other = make_key(tmp_path, capsys, "--scope", "batches", tenant="sun")
        await until(lambda: loaded.end_of(api_key.id_of(other)) is None)
        assert (await ask(bench, http, other, "/v1/files", None))[0] == 200
        assert (await ask(bench, http, other))[0] == 403
        revoke(tmp_path, other)
        await until(lambda: loaded.end_of(api_key.id_of(other)) is not None)
        status, answer = await ask(bench, http, other, "/v1/files", None)
        assert (status, answer["error"]["code"]) == (401, "key_revoked")
        assert (await ask(bench, http, bench.key()))[0] == 200, "tenant tokens need no file"
        (tmp_path / "accounts" / FILE_NAME).write_bytes(b"damaged")
        await until(lambda: keys_stamp_of(tmp_path / "accounts") is not None)
        with pytest.raises(ConfigInvalid):
            loaded.refresh()
        assert loaded.end_of(api_key.id_of(text)) is None, "keys of before stay in force"


def endless(released: asyncio.Event) -> Any:
    async def behave(_engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            await released.wait()
        response = await begin(request)
        await send(response, chunk("one"))
        await released.wait()
        return response

    return behave


@pytest.mark.parametrize("how", ["revoked", "expired"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_key_that_ends_under_way(
    tmp_path: Path, http: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str], how: str, stream: bool
) -> None:
    engine = FakeEngine("e", behave=endless(asyncio.Event()))
    async with running(tmp_path, [engine]) as bench:
        options = ["--expires", "3000s"] if how == "expired" else []
        text, other = make_key(tmp_path, capsys, *options), make_key(tmp_path, capsys)
        keyring = bench.gateway.state.keyring
        await until(lambda: keyring.end_of(api_key.id_of(other)) is None)
        stays = asyncio.create_task(ask(bench, http, other, body={**CHAT, "stream": True}))
        headers = {"authorization": f"Bearer {text}"}
        asking = http.post(bench.url + PATH, json={**CHAT, "stream": stream}, headers=headers)
        sent = asyncio.ensure_future(asking)
        await until(lambda: len(engine.requests) == 2)
        if stream:
            response = await sent
            assert b"one" in await response.content.readany()
        if how == "revoked":
            revoke(tmp_path, text)
        else:
            clock = bench.gateway.clock
            keyring._wall_s = lambda: clock.wall_s() + 4_000
        response = await sent
        said = (await response.read()).decode()
        if stream:
            assert response.status == 200
            last, done = said.strip().split("\n\n")[-2:]
            assert done == "data: [DONE]"
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            assert response.status == 401
            error = json.loads(said)["error"]
        assert error["code"] == f"key_{how}"
        assert error["type"] == "invalid_request_error"
        await asyncio.wait_for(engine.left.wait(), 60)  # the engine does not go on
        await until(lambda: "FAILED" in bench.conductor.phases())
        assert not stays.done(), "requests with other keys go on"
        assert bench.gateway.state.active_count == 1
        stays.cancel()


async def test_a_key_that_leaves_the_key_file_under_way(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    path.write_text(f'[[key]]\nsha256 = "{api_key.digest_of("sk-one").hex()}"\ntenant = "carol"\n')
    engine = FakeEngine("e", behave=endless(asyncio.Event()))
    async with running(tmp_path / "state", [engine], gateway__keys_file=path) as bench:
        headers = {"authorization": "Bearer sk-one"}
        async with http.post(bench.url + PATH, json={**CHAT, "stream": True}, headers=headers) as response:
            assert b"one" in await response.content.readany()
            path.write_text("")
            assert b"key_revoked" in await response.read()


async def test_a_scraper_with_a_key(
    tmp_path: Path, http: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    scraper, other = make_key(tmp_path, capsys, "--scope", "metrics"), make_key(tmp_path, capsys)
    async with running(tmp_path, [FakeEngine("e")], gateway__host="0.0.0.0", tls__insecure=True) as bench:
        url = f"http://127.0.0.1:{bench.gateway.http_port}"
        for key, status in (
            (scraper, 200),
            (other, 403),
            (bench.key(), 403),
            (bench.gateway.token.text, 200),
        ):
            headers = {"authorization": f"Bearer {key}"}
            async with http.get(f"{url}/metrics", headers=headers) as response:
                assert response.status == status
        async with http.post(
            url + PATH, json=CHAT, headers={"authorization": f"Bearer {scraper}"}
        ) as response:
            assert response.status == 403
