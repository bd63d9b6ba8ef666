"""A tenant in the console and at /v1/usage: it sees its own usage, and nothing of others whatever it tries."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.cli.app import run as cli
from mooncache.gateway.core.console_session import (
    COOKIE,
    KEY_DIGITS,
    TenantKey,
    begin,
    cookie_value,
    session_of,
    tenant_key_of,
)
from mooncache.gateway.core.recent_requests import RecentRequest, RecentRequests
from tests.conditions import until
from tests.gateway.stand_in import MODEL, Bench
from tests.gateway.test_console import HOSTILE, served, sign_in
from tests.gateway.test_usage import ask, used

PRICES = "[cost]\ncurrency = 'EUR'\n[[cost.tokens]]\ninput_per_million = 1e6\noutput_per_million = 0.0\n"


async def enter(bench: Bench, http: aiohttp.ClientSession, key: str) -> dict[str, str]:
    """The cookie of who signed in with a key."""
    headers = {"authorization": f"Bearer {key}"}
    async with http.post(bench.url + "/console/session", headers=headers) as response:
        assert response.status == 200, await response.text()
        return {"cookie": response.headers["set-cookie"].split(";")[0]}


async def get(bench: Bench, http: aiohttp.ClientSession, path: str, headers: Any) -> tuple[int, Any]:
    async with http.get(bench.url + path, headers=headers) as response:
        return response.status, json.loads(await response.text())


@pytest.mark.parametrize(
    "query",
    ["", "?tenant=bob", "?tenant=bob&tenant=alice", "?by=tenant&who=cluster", "?tenant=%27%20OR%201=1"],
)
async def test_a_tenant_sees_its_own(tmp_path: Path, http: aiohttp.ClientSession, query: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES)
    async with served(tmp_path / "state", gateway__price_file=path) as (bench, _):
        for tenant in ("alice", "bob", "bob"):
            assert await ask(bench, http, tenant) == 200
        await used(bench)
        cookie = await enter(bench, http, bench.key("alice"))
        status, said = await get(bench, http, "/console/session", cookie)
        assert (said["tenant"], said["who"], said["policies"]) == ("alice", "tenant alice", [])
        status, found = await get(bench, http, f"/console/usage{query}", cookie)
        assert status == 200 and "bob" not in json.dumps(found)
        assert (found["tenant"], found["currency"]) == ("alice", "EUR")
        (row,) = found["rows"]
        assert (row["key_id"], row["requests"], row["cost"]) == ("token", 1, 40.0)
        assert len(found["requests"]) == 1 and found["requests"][0]["code"] == "OK"
        assert found["limits"]["requests_open_max"] == 1024
        operator = {"cookie": await sign_in(bench, http)}
        _, all_of_it = await get(bench, http, f"/console/usage{query}", operator)
        assert {each["tenant"]: each["requests"] for each in all_of_it["rows"]} == {"alice": 1, "bob": 2}


async def test_everything_else_is_refused(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with served(tmp_path) as (bench, answers):
        cookie = await enter(bench, http, bench.key())
        for path in (
            *(f"/console/live?topic={topic}" for topic in ("overview", "requests", "pool", "instances")),
            "/console/decision?id=d-1",
            "/console/decision?id=r-1&policy=local",
        ):
            status, said = await get(bench, http, path, cookie)
            assert status == 403 and "own usage alone" in said["error"]["message"], path
        assert not answers.asked
        # A cookie is nobody's but the console's, and no cookie makes a tenant another one or an operator.
        assert (await get(bench, http, "/v1/models", cookie))[0] == 401
        value = cookie["cookie"].partition("=")[2]
        mine, other = TenantKey("alice", "token").who, TenantKey("bob", "token").who
        for forged in (other, "cluster", "0" * KEY_DIGITS, TenantKey("", "token").who):
            headers = {"cookie": f"{COOKIE}={value.replace(mine, forged)}"}
            assert (await get(bench, http, "/console/usage", headers))[0] == 401, forged


async def test_the_end_of_a_key_is_the_end_of_its_session(
    tmp_path: Path, http: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ("--state-dir", str(tmp_path / "state"))
    keys: dict[str, str] = {}
    for scope in ("usage", "inference"):
        assert cli(["key", "create", "--tenant", "alice", "--scope", scope, *state]) == 0
        keys[scope] = capsys.readouterr().out.strip()
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    digest = hashlib.sha256(b"sk-file").hexdigest()
    path.write_text(f'[[key]]\nsha256 = "{digest}"\ntenant = "alice"\n')
    async with served(tmp_path / "state", gateway__keys_file=path) as (bench, _):
        made, in_file = await enter(bench, http, keys["usage"]), await enter(bench, http, "sk-file")
        for cookie in (made, in_file):
            assert (await get(bench, http, "/console/usage", cookie))[1]["tenant"] == "alice"
        headers = {"authorization": f"Bearer {keys['inference']}"}
        async with http.post(bench.url + "/console/session", headers=headers) as response:
            assert response.status == 403 and "scope usage" in (await response.json())["error"]["message"]
        assert (await get(bench, http, "/v1/usage", headers))[0] == 403
        assert cli(["key", "revoke", keys["usage"].split(".")[1], *state]) == 0
        path.write_text(f'[[key]]\nsha256 = "{digest}"\ntenant = "bob"\n')
        for cookie in (made, in_file):

            async def is_out(cookie: dict[str, str] = cookie) -> bool:
                return (await get(bench, http, "/console/usage", cookie))[0] == 401

            await until(is_out)


async def test_usage_over_the_api(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with served(tmp_path) as (bench, _):
        for tenant in ("alice", "bob"):
            assert await ask(bench, http, tenant) == 200
        await used(bench)
        status, found = await get(bench, http, "/v1/usage?by=model,key&tenant=bob", bench.auth("alice"))
        assert (status, found["tenant"], found["currency"]) == (200, "alice", None)
        (row,) = found["data"]
        assert (row["model"], row["key_id"], row["input_tokens"], row["requests"]) == (MODEL, "token", 40, 1)
        assert (await get(bench, http, "/v1/usage?until=3600", bench.auth("alice")))[1]["data"] == []
        for query in ("by=tenant", "since=-1", "since=x", "until=" + "9" * 40, "by=", "since="):
            assert (await get(bench, http, f"/v1/usage?{query}", bench.auth()))[0] == 400, query
        assert (await get(bench, http, "/v1/usage", {}))[0] == 401


@given(st.text(max_size=60), st.text(max_size=20))
def test_any_name_is_a_tenant_or_opens_nothing(tenant: str, key_id: str) -> None:
    key = b"k" * 32
    who = TenantKey(tenant, key_id).who if tenant.isascii() and key_id.isascii() else tenant
    found = session_of(key, f"{COOKIE}={cookie_value(key, begin(who, 1000.0))}", 1001.0)
    if found is not None and found.who.startswith("t"):
        assert tenant_key_of(found.who) == TenantKey(tenant, key_id)


def test_the_tenant_heard_of_longest_ago_is_forgotten() -> None:
    recent = RecentRequests(tenants_max=2, requests_max=2)
    for number, tenant in enumerate("aabaac"):
        recent.add(tenant, RecentRequest(str(number), "k", "m", "online", 0.0, 0.0, HOSTILE, 0, 0, 0))
    assert [each.request_id for each in recent.of("a")] == ["4", "3"]
    assert recent.of("b") == [] and len(recent.of("c")) == 1
