"""Limits on requests of tenants and keys: their file, and a gateway that has them in force while it runs."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mooncache.accounts import limit_store
from mooncache.accounts.core.api_key import id_of
from mooncache.accounts.core.request_limits import LIMIT_NAMES, PRIORITY_MAX, HolderLimits
from mooncache.accounts.database import AccountsPlace
from mooncache.accounts.limit_store import FILE_NAME, LimitStore, all_limits, change_limits, limits_stamp_of
from mooncache.cli.app import run as cli
from mooncache.errors import ConfigInvalid, InvalidArgument, LimitExceeded
from mooncache.gateway.core.holders import holder_of, of_key, split_holder
from mooncache.gateway.core.rate_limit import RateLimit
from tests.conditions import until
from tests.gateway.stand_in import MODEL, Bench, FakeEngine, good, running

KEY = "0123456789abcdef"
CONTEXT = 4096
Answer = tuple[int, dict[str, Any]]


def test_limits_are_kept(place: AccountsPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_store, "ROWS_MAX", 2)
    before = limits_stamp_of(place)
    assert (before is None) == isinstance(place, Path)
    of_tenant, of_key_alone = HolderLimits(60.5, 7, 3, 9, 0.25, -4), HolderLimits(priority=4)
    with LimitStore(place, create=True) as store:
        store.set("moon", "", of_tenant)
        store.set("moon", KEY, of_key_alone)
        with pytest.raises(LimitExceeded, match="which is the most"):
            store.set("sun", "", of_tenant)
        store.set("moon", "", HolderLimits(requests_under_way=1))
        for tenant, key_id, limits in (
            ("MOON", "", of_tenant),
            ("moon", "token", of_tenant),
            ("moon", "", HolderLimits(-1)),
            ("moon", "", HolderLimits(float("nan"))),
            ("moon", "", HolderLimits(requests_under_way=10**9)),
            ("moon", "", HolderLimits(priority=5)),
            ("moon", "", HolderLimits(priority=-5)),
        ):
            with pytest.raises(InvalidArgument):
                store.set(tenant, key_id, limits)
    stamp = limits_stamp_of(place)
    assert stamp != before
    with LimitStore(place) as store:
        assert store.all() == {("moon", ""): HolderLimits(requests_under_way=1), ("moon", KEY): of_key_alone}
        store.set("moon", "", HolderLimits())
        assert list(store.all()) == [("moon", KEY)], "without limits there is no row"
    assert limits_stamp_of(place) != stamp


def test_changes_at_the_same_time_are_all_kept(place: AccountsPlace) -> None:
    """Each changes a limit of its own, over and over; none takes another one's back."""
    rounds, begin = PRIORITY_MAX, Barrier(len(LIMIT_NAMES))
    with LimitStore(place, create=True) as store:
        store.set("moon", KEY, HolderLimits(tokens_under_way=5))

    def change(name: str) -> HolderLimits:
        begin.wait()
        for amount in range(1, rounds + 1):
            found = change_limits(place, "moon", "", {name: amount})
            assert getattr(found, name) == amount
        return found

    with ThreadPoolExecutor(len(LIMIT_NAMES)) as pool:
        answers = list(pool.map(change, LIMIT_NAMES))
    whole = HolderLimits(*(rounds for _ in LIMIT_NAMES))
    assert whole in answers, "whoever was last has all"
    assert all_limits(place) == {("moon", ""): whole, ("moon", KEY): HolderLimits(tokens_under_way=5)}
    with pytest.raises(InvalidArgument):
        change_limits(place, "moon", "", {"tokens_per_minute": -1})
    assert all_limits(place)["moon", ""] == whole


def test_limits_that_are_none(place: AccountsPlace) -> None:
    with LimitStore(place, create=True) as store:
        store.set("moon", "", HolderLimits(tokens_under_way=5))
        with store._database.transaction():
            store._database.ask("UPDATE request_limit SET tokens_under_way = -3")
        with pytest.raises(ConfigInvalid, match="no limits"):
            store.all()


def test_a_file_of_before_has_no_priorities_and_programs_of_before_go_on(tmp_path: Path) -> None:
    with LimitStore(tmp_path / "accounts", create=True):
        pass
    path = tmp_path / "accounts" / FILE_NAME
    of_before = (
        "INSERT INTO request_limit (tenant, key_id, requests_per_minute, tokens_per_minute, requests_under_way, "
        "tokens_under_way, money_per_month) VALUES (?, ?, 60, 0, 0, 0, 0)"
    )
    made = sqlite3.connect(path)
    made.execute("ALTER TABLE request_limit DROP COLUMN priority")
    made.execute(of_before, ("moon", ""))
    made.commit()
    with LimitStore(tmp_path / "accounts") as store:
        assert store.all() == {("moon", ""): HolderLimits(requests_per_minute=60)}
        store.set("moon", "", HolderLimits(requests_per_minute=60, priority=2))
    made.execute(of_before, ("sun", ""))
    made.commit()
    made.close()
    with LimitStore(tmp_path / "accounts") as store:
        assert {holder: each.priority for holder, each in store.all().items()} == {
            ("moon", ""): 2,
            ("sun", ""): 0,
        }


def test_a_holder_is_a_tenant_or_its_key() -> None:
    assert split_holder(holder_of("moon", KEY)) == ("moon", KEY)
    assert split_holder("moon") == ("moon", "")
    assert of_key("moon") == "" and "key" in of_key(holder_of("moon", KEY))


def made(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert cli(["key", "create", "--tenant", "moon", "--state-dir", str(folder)]) == 0
    return capsys.readouterr().out.strip()


def limit(folder: Path, *words: str) -> int:
    return cli([*words, "--state-dir", str(folder)])


async def ask(bench: Bench, http: aiohttp.ClientSession, key: str, max_tokens: int | None = 8) -> Answer:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    said = {} if max_tokens is None else {"max_tokens": max_tokens}
    headers = {"authorization": f"Bearer {key}"}
    async with http.post(bench.url + "/v1/chat/completions", json=body | said, headers=headers) as response:
        return response.status, json.loads(await response.text())


def test_commands_say_what_is_in_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key_id = id_of(made(tmp_path, capsys))
    assert limit(tmp_path, "key", "limit", key_id, "--requests-per-minute", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["requests"]["requests_per_minute"] == 2
    assert limit(tmp_path, "key", "limit", key_id, "--tokens-under-way", "9") == 0
    assert "requests_per_minute 2, tokens_under_way 9" in capsys.readouterr().out, "what is not named stays"
    assert limit(tmp_path, "key", "ls", "--json") == 0
    (listed,) = json.loads(capsys.readouterr().out)["keys"]
    assert listed["requests"]["requests_per_minute"] == 2 and listed["requests"]["tokens_under_way"] == 9
    assert limit(tmp_path, "tenant", "set", "moon", "--tokens-under-way", "500", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "tenant": "moon",
        "requests": {
            "requests_per_minute": 0,
            "tokens_per_minute": 0,
            "requests_under_way": 0,
            "tokens_under_way": 500,
            "money_per_month": 0,
            "priority": 0,
        },
    }
    assert limit(tmp_path, "tenant", "set", "moon", "--priority", "-2") == 0
    assert "tokens_under_way 500, priority -2" in capsys.readouterr().out
    for wrong in (
        ("key", "limit", key_id),
        ("key", "limit", "f" * 16, "--tokens-under-way", "9"),
        ("tenant", "set", "moon"),
        ("tenant", "set", "MOON", "--tokens-under-way", "9"),
        ("tenant", "set", "moon", "--tokens-under-way", "-9"),
        ("tenant", "set", "moon", "--priority", "5"),
    ):
        assert limit(tmp_path, *wrong) != 0, wrong


async def test_a_key_has_limits_beside_its_tenants(
    tmp_path: Path, http: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        keyring = bench.gateway.state.keyring
        first, second = made(tmp_path, capsys), made(tmp_path, capsys)
        assert limit(tmp_path, "key", "limit", id_of(first), "--requests-per-minute", "2") == 0
        assert limit(tmp_path, "tenant", "set", "moon", "--requests-per-minute", "3") == 0
        both = {3.0, 2.0}
        await until(
            lambda: {each.requests_per_minute for each in keyring.limits_of("moon", id_of(first))} == both
        )
        await until(lambda: keyring.end_of(id_of(second)) is None)
        answers = [await ask(bench, http, first) for _ in range(3)]
        assert [status for status, _ in answers] == [200, 200, 429]
        assert "requests per minute with this API key" in answers[2][1]["error"]["message"]
        answers = [await ask(bench, http, second) for _ in range(2)]
        assert [status for status, _ in answers] == [200, 429], (
            "what its key refused has cost the tenant nothing"
        )
        assert "key" not in answers[1][1]["error"]["message"]
        assert limit(tmp_path, "tenant", "set", "moon", "--requests-per-minute", "0") == 0
        await until(lambda: not keyring.limits_of("moon", "")[0].requests_per_minute)
        assert (await ask(bench, http, second))[0] == 200
        state = bench.gateway.state
        assert not state.tenant_counts
        (tmp_path / "accounts" / FILE_NAME).write_bytes(b"damaged")
        with pytest.raises(ConfigInvalid):
            keyring.refresh()
        assert keyring.limits_of("moon", id_of(first))[1].requests_per_minute == 2, "they stay in force"


async def test_tokens_under_way_of_a_tenant(
    tmp_path: Path, http: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    released = asyncio.Event()

    async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await released.wait()
        return await good(engine, request, body)

    engine = FakeEngine("e", behave=slow)
    settings: dict[str, Any] = {"max_model_tokens": CONTEXT}
    async with running(
        tmp_path, [engine], instance=settings, gateway__tenant_token_count_max=CONTEXT // 2
    ) as bench:
        state, kind = bench.gateway.state, RateLimit.TOKENS_UNDER_WAY
        async with asyncio.TaskGroup() as group:
            small = group.create_task(ask(bench, http, bench.key("moon")))
            await until(lambda: 8 < state.limiter.under_way("moon", kind) < 100)
            whole = group.create_task(ask(bench, http, bench.key("moon"), None))
            await until(lambda: state.limiter.under_way("moon", kind) > CONTEXT - 100)
            status, answer = await ask(bench, http, bench.key("moon"), 1)
            assert (status, answer["error"]["code"]) == (429, "too_many_requests")
            assert f"{CONTEXT // 2} tokens of your requests may be under way" in answer["error"]["message"]
            other = group.create_task(ask(bench, http, bench.key("sun")))
            await until(lambda: state.limiter.under_way("sun", kind) > 0)
            assert limit(tmp_path, "tenant", "set", "moon", "--tokens-under-way", str(CONTEXT * 2)) == 0
            await until(lambda: state.keyring.limits_of("moon", "")[0].tokens_under_way == CONTEXT * 2)
            raised = group.create_task(ask(bench, http, bench.key("moon"), 1))
            await until(lambda: state.tenant_counts.get("moon") == 3)
            released.set()
        assert [task.result()[0] for task in (small, whole, other, raised)] == [200] * 4
        assert (await ask(bench, http, bench.key("moon"), None))[0] == 200
        await until(lambda: not state.tenant_counts)
        assert state.limiter.under_way("moon", kind) == 0
        state.limiter.check()
