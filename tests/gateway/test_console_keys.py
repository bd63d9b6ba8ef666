"""Keys and limits of tenants by the gateway's API and on the console: who may, what holds then, what is kept."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.accounts.audit_log import AUDIT_FILE, lines
from mooncache.accounts.core.audit import read_entry
from mooncache.accounts.key_store import FILE_NAME, create_key
from mooncache.bench.operate.browser import browsing, find_browser
from mooncache.cli.app import run as cli
from mooncache.errors import InvalidArgument
from mooncache.gateway.console import keys
from mooncache.gateway.console.keys import created_command, limits_command
from mooncache.gateway.core.console_keys import parse_key, parse_limits
from tests.conditions import until
from tests.gateway.stand_in import Bench
from tests.gateway.test_console import bearer, served, sign_in
from tests.gateway.test_console_browser import enter

ALICE = {"tenant": "alice", "scopes": ["inference"]}


def accounts(bench: Bench) -> Path:
    place = bench.gateway.config.cluster.accounts_place
    assert isinstance(place, Path)
    return place


async def ask(
    bench: Bench,
    http: aiohttp.ClientSession,
    method: str,
    path: str,
    headers: dict[str, str],
    body: Any = None,
) -> tuple[int, Any]:
    more = {} if body is None else {"json": body}
    async with http.request(method, bench.url + path, headers=headers, **more) as response:
        return response.status, json.loads(await response.text())


async def models(bench: Bench, http: aiohttp.ClientSession, key: str) -> tuple[int, Any]:
    return await ask(bench, http, "GET", "/v1/models", {"authorization": f"Bearer {key}"})


async def test_a_key_is_made_shown_once_and_revoked_at_once(
    tmp_path: Path, http: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    async with served(tmp_path / "state") as (bench, _):
        auth, end_s = bearer(bench), int(time.time()) + 3600
        status, made = await ask(
            bench, http, "POST", "/console/keys", auth, {**ALICE, "expires_unix_s": end_s, "name": "ci"}
        )
        assert (status, made["tenant"], made["scopes"], made["audited"]) == (
            200,
            "alice",
            ["inference"],
            True,
        )
        assert (made["state"], made["expires_unix_s"], made["name"]) == ("valid", end_s, "ci")
        assert (await models(bench, http, made["key"]))[0] == 200  # in force when the answer is here
        status, listed = await ask(bench, http, "GET", "/console/keys?tenant=alice", auth)
        assert status == 200 and [each["id"] for each in listed["keys"]] == [made["id"]]
        assert made["key"].split(".")[2] not in json.dumps(listed)
        assert (await ask(bench, http, "GET", "/console/keys", auth))[1] == {"tenants": {"alice": 1}}
        # The command sees the same key, and its limits are those of the same store.
        limit = {"tenant": "alice", "key_id": made["id"], "requests_per_minute": 60}
        status, set_to = await ask(bench, http, "PUT", "/console/limits", auth, limit)
        assert (status, set_to["limits"]["requests_per_minute"]) == (200, 60)
        assert cli(["key", "ls", "--json", "--state-dir", str(tmp_path / "state")]) == 0
        (row,) = json.loads(capsys.readouterr().out)["keys"]
        assert (row["id"], row["requests"]["requests_per_minute"]) == (made["id"], 60)
        assert row["created_by"] == "the cluster token at 127.0.0.1, console"

        status, ended = await ask(bench, http, "DELETE", f"/console/keys/{made['id']}", auth)
        assert (status, ended["state"]) == (200, "revoked")
        status, refused = await models(bench, http, made["key"])
        assert (status, refused["error"]["code"]) == (401, "key_revoked")
        assert (await ask(bench, http, "GET", "/console/keys", auth))[1] == {"tenants": {"alice": 0}}
        entries = [read_entry(line) for line in lines(accounts(bench))]
        secret = made["key"].split(".")[2]
    acts = [each for each in entries if each is not None]
    assert [(each.what, each.result) for each in acts] == [
        ("key create", "OK"),
        ("key limit", "OK"),
        ("key revoke", "OK"),
    ]
    assert acts[0].arguments[:4] == ["--tenant", "alice", "--scope", "inference"]
    assert acts[0].details["key_id"] == made["id"] and acts[2].details["tenant"] == "alice"
    assert {each.who for each in acts} == {"the cluster token at 127.0.0.1"}
    assert secret not in repr(entries)


async def test_limits_of_a_tenant(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with served(tmp_path / "state") as (bench, _):
        auth = bearer(bench)
        for body in (
            {"requests_per_minute": 600},
            {"tokens_under_way": 1000},
            {"requests_per_minute": 0},
            {"priority": -2},
        ):
            assert (await ask(bench, http, "PUT", "/console/limits", auth, {"tenant": "alice", **body}))[
                0
            ] == 200
        limits, _ = bench.gateway.state.keyring.limits_of("alice", "token")
        assert limits.tokens_under_way == 1000 and limits.requests_per_minute == 0
        assert bench.gateway.state.keyring.priority_of("alice", "token") == -2
        _, listed = await ask(bench, http, "GET", "/console/keys?tenant=alice", auth)
        assert listed["limits"]["tokens_under_way"] == 1000 and listed["keys"] == []


async def test_what_is_refused_and_kept(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with served(tmp_path / "state") as (bench, _):
        auth = bearer(bench)
        for method, path, body, status in (
            ("POST", "/console/keys", {**ALICE, "tenant": "../x"}, 400),
            ("POST", "/console/keys", {**ALICE, "expires_unix_s": 1000}, 400),
            ("POST", "/console/keys", {**ALICE, "name": "<b>"}, 400),
            ("POST", "/console/keys", {**ALICE, "scopes": ["king"]}, 400),
            ("DELETE", "/console/keys/0123456789abcdef", None, 404),
            ("DELETE", "/console/keys/..%2f..", None, 404),
            ("PUT", "/console/limits", {"tenant": "alice", "requests_under_way": 10**9}, 400),
            (
                "PUT",
                "/console/limits",
                {"tenant": "alice", "key_id": "0123456789abcdef", "tokens_under_way": 1},
                404,
            ),
            ("GET", "/console/keys?tenant=%3Cb%3E", None, 400),
            ("GET", "/console/keys/0123456789abcdef", None, 405),
        ):
            got = await ask(bench, http, method, path, auth, body)
            assert got[0] == status and got[1]["error"]["message"], (method, path, got)
        place = accounts(bench)
        results = [each.result for line in lines(place) if (each := read_entry(line)) is not None]
        assert results == ["INVALID_ARGUMENT"] * 3 + ["NOT_FOUND", "INVALID_ARGUMENT", "NOT_FOUND"]
        assert (await ask(bench, http, "GET", "/console/keys", auth))[1] == {"tenants": {}}


async def test_a_secret_in_the_wrong_place_is_not_kept(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with served(tmp_path / "state") as (bench, _):
        auth = bearer(bench)
        _, made = await ask(bench, http, "POST", "/console/keys", auth, ALICE)
        key, limit = made["key"], {"requests_per_minute": 1}
        for method, path, body in (
            ("POST", "/console/keys", {**ALICE, "name": key}),
            ("POST", "/console/keys", {**ALICE, "tenant": key}),
            ("PUT", "/console/limits", {**limit, "tenant": bench.key("alice")}),
            ("PUT", "/console/limits", {**limit, "tenant": bench.gateway.token.text, "key_id": made["id"]}),
            ("PUT", "/console/limits", {**limit, "tenant": "alice", "key_id": key.split(".")[2]}),
        ):
            status, refused = await ask(bench, http, method, path, auth, body)
            assert status == 400, (body, refused)
        found = [each for line in lines(accounts(bench)) if (each := read_entry(line)) is not None]
        secrets = [text.split(".")[-1] for text in (key, bench.key("alice"), bench.gateway.token.text)]
    assert [each.result for each in found] == ["OK"] + ["INVALID_ARGUMENT"] * 4
    assert "[redacted]" in found[1].arguments
    assert not [secret for secret in secrets if secret in repr(found)]


async def test_who_may_not(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    digest = hashlib.sha256(b"sk-look").hexdigest()
    path.write_text(f'[[key]]\nsha256 = "{digest}"\ntenant = "ops"\nconsole = true\n')
    async with served(tmp_path / "state", gateway__keys_file=path) as (bench, _):
        async with http.post(bench.url + "/console/session", headers=bench.auth("alice")) as response:
            tenant = {"cookie": response.headers["set-cookie"].split(";")[0]}
        looks = {"authorization": "Bearer sk-look"}
        operator = {"cookie": await sign_in(bench, http)}
        for headers, lists, acts in (
            ({}, 401, 401),
            (tenant, 403, 403),
            (bench.auth("alice"), 403, 403),
            (looks, 200, 403),
            ({**operator, "sec-fetch-site": "cross-site"}, 200, 403),
        ):
            for where in ("/console/keys", "/console/keys?tenant=alice"):
                assert (await ask(bench, http, "GET", where, headers))[0] == lists, headers
            for method, where, body in (
                ("POST", "/console/keys", ALICE),
                ("DELETE", "/console/keys/0123456789abcdef", None),
                ("PUT", "/console/limits", {"tenant": "alice", "requests_per_minute": 1}),
            ):
                assert (await ask(bench, http, method, where, headers, body))[0] == acts, (where, headers)
        headers = {**operator, "content-type": "text/plain"}  # what a form of another site could send
        async with http.post(
            bench.url + "/console/keys", data=json.dumps(ALICE), headers=headers
        ) as response:
            assert response.status == 415
        place = accounts(bench)
        assert not (place / AUDIT_FILE).exists() and not (place / FILE_NAME).exists()


async def test_a_console_that_only_shows_makes_no_key(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with served(tmp_path / "state", gateway__console_acts=False) as (bench, _):
        status, said = await ask(bench, http, "POST", "/console/keys", bearer(bench), ALICE)
        assert status == 403 and "gateway.console_acts" in said["error"]["message"]


@given(
    st.binary(max_size=64)
    | st.sampled_from(
        (
            b"{}",
            b"[" * 3000,
            b'{"tenant": "a"}',
            b'{"tenant": "a", "scopes": []}',
            b'{"tenant": "a", "scopes": ["inference"], "expires_unix_s": -1}',
            b'{"tenant": "a", "scopes": ["inference"], "expires_unix_s": 1e30}',
            b'{"tenant": "a", "scopes": ["inference"], "admin": true}',
            b'{"tenant": "a", "requests_per_minute": -1}',
            b'{"tenant": "a", "tokens_under_way": 1.5}',
            b'{"tenant": "a", "priority": 5}',
            b'{"tenant": "a", "key_id": 7, "tokens_under_way": 1}',
            b'{"tenant": "a", "tokens_under_way": ' + b"9" * 400 + b"}",
            b'{"tenant": "a", "requests_per_minute": ' + b"9" * 400 + b"}",
            b'{"tenant": "a", "money_per_month": 1e400}',
            b'{"tenant": "a", "key_id": "0123456789ABCDEF", "tokens_under_way": 1}',
        )
    )
)
def test_other_bodies_are_refused(body: bytes) -> None:
    for parse in (parse_key, parse_limits):
        with pytest.raises(InvalidArgument):
            parse(body)


def test_acts_are_kept_as_the_command_that_does_the_same() -> None:
    asked = parse_key(
        b'{"tenant": "a", "scopes": ["usage", "inference"], "expires_unix_s": 1801440000, "name": "n"}'
    )
    assert " ".join(created_command(asked)) == (
        "key create --tenant a --scope inference --scope usage --expires 2027-02-01T00:00:00 --name n"
    )
    limits = parse_limits(
        b'{"tenant": "a", "requests_per_minute": 60, "money_per_month": 0.5, "priority": -4}'
    )
    assert " ".join(limits_command(limits)) == (
        "tenant set a --requests-per-minute 60 --money-per-month 0.5 --priority -4"
    )
    limits.key_id = "0123456789abcdef"
    assert limits_command(limits)[:2] == ["key limit", "0123456789abcdef"]


async def test_a_new_key_is_seen_until_it_is_put_away_and_no_longer(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = find_browser()
    if program is None:
        pytest.skip("there is no Chromium on this machine (Debian package chromium)")
    asked, goes_on = threading.Event(), threading.Event()

    def slowly(*arguments: Any, **more: Any) -> Any:
        asked.set()
        goes_on.wait(60)
        return create_key(*arguments, **more)

    monkeypatch.setattr(keys, "create_key", slowly)
    async with (
        served(tmp_path / "state") as (bench, _),
        browsing(program, tmp_path / "browser", http) as page,
    ):
        await enter(page, bench.url, bench.gateway.token.text)
        await page.until("!document.querySelector('#nav').hidden")
        await page.value("location.hash = '#/tenant/alice'")
        await page.until("document.querySelector('.heading button.main') !== null")
        await page.value("document.querySelector('.heading button.main').click()")
        await page.until("document.querySelector('dialog[open] form') !== null")
        await page.press("Enter")
        await until(asked.is_set)
        for _ in range(2):
            await page.press("Escape")
        assert await page.value("document.querySelector('dialog[open] .find button.quiet').disabled")
        goes_on.set()
        secret = "document.querySelector('dialog[open] input.secret')?.value"
        key = await page.until(secret)
        await page.press("1")
        assert await page.value("location.hash") == "#/tenant/alice"
        assert await page.value(secret) == key
        await page.value("document.querySelector('#leave').click()")
        await page.until("document.querySelector('#nav').hidden")
        await page.until("!document.querySelector('dialog')")
        assert not page.complaints


async def test_keys_in_a_browser(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    program = find_browser()
    if program is None:
        pytest.skip("there is no Chromium on this machine (Debian package chromium)")
    async with (
        served(tmp_path / "state") as (bench, _),
        browsing(program, tmp_path / "browser", http) as page,
    ):
        await enter(page, bench.url, bench.gateway.token.text)
        await page.until("!document.querySelector('#nav').hidden")
        await page.press("6")
        await page.until("document.querySelector('input[aria-label=\"Name of another tenant\"]') !== null")
        await page.value("document.querySelector('input[aria-label=\"Name of another tenant\"]').focus()")
        await page.type("alice")
        await page.press("Enter")
        await page.until("location.hash === '#/tenant/alice'")
        await page.until(
            "document.querySelector('td.empty')?.textContent.startsWith('This tenant has no key')"
        )
        await page.value("document.querySelector('.heading button.main').click()")
        await page.until("document.querySelector('dialog[open] form') !== null")
        await page.type("ci")
        await page.picture(tmp_path / "console-key-form.png")
        await page.press("Enter")
        key = await page.until("document.querySelector('dialog input.secret')?.value")
        assert (await models(bench, http, key))[0] == 200
        await page.picture(tmp_path / "console-key-made.png")
        await page.press("Escape")
        await page.until("!document.querySelector('dialog')")
        assert key.split(".")[2] not in await page.value("document.documentElement.outerHTML")
        await page.until(
            "document.querySelector('td code')?.textContent === " + json.dumps(key.split(".")[1])
        )
        await page.picture(tmp_path / "console-keys.png")
        await page.value("document.querySelector('td button.act').focus()")
        await page.press("Enter")
        await page.until("document.activeElement.textContent === 'Close'")  # Enter twice revokes nothing
        await page.value("document.querySelector('dialog .choices button').click()")
        await page.until("document.querySelector('dialog [role=status]')?.textContent.startsWith('Done')")
        assert (await models(bench, http, key))[1]["error"]["code"] == "key_revoked"
        await page.press("Escape")
        await page.until(
            "[...document.querySelectorAll('td .badge')].map((b) => b.textContent)[0] === 'revoked'"
        )
        await page.value("[...document.querySelectorAll('.panel .heading button')][0].click()")
        await page.until("document.querySelector('dialog[open] input[type=number]') !== null")
        await page.value("(() => { document.querySelector('dialog input[type=number]').value = '600'; })()")
        await page.value("document.querySelector('dialog button[type=submit]').click()")
        await page.until("document.querySelector('dialog [role=status]')?.textContent.startsWith('Done')")
        assert bench.gateway.state.keyring.limits_of("alice", "token")[0].requests_per_minute == 600
        kept = read_entry(list(lines(accounts(bench)))[-1])
        assert kept is not None and kept.arguments == ["alice", "--requests-per-minute", "600"], "no other"
        await page.press("Escape")
        await page.until("!document.querySelector('dialog')")
        await page.press("Escape")
        await page.until("location.hash === '#/tenants'")
        await page.until("document.querySelector('tbody a.name')?.textContent === 'alice'")
        assert not page.complaints
