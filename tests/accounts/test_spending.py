"""Money per month: the file of what was spent, and a gateway that refuses once a budget is spent."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mooncache.accounts.core.api_key import id_of
from mooncache.accounts.core.spending import LedgerRow, SpendingPart
from mooncache.accounts.database import AccountsPlace
from mooncache.accounts.months import month_of, next_month_s
from mooncache.accounts.spending_store import FILE_NAME, SpendingStore
from mooncache.errors import ConfigInvalid
from mooncache.gateway.core.rate_limit import RateLimit
from tests.accounts.test_request_limits import ask, limit, made
from tests.conditions import WAIT_S, until
from tests.gateway.stand_in import FakeEngine, good, running
from tests.gateway.test_batches import ended, jsonl, line, serving, submit

NOVEMBER = 202611
PRICES = """[cost]
currency = "EUR"
[[cost.tokens]]
models = "*"
input_per_million = 1e6   # a token costs 1 EUR
cached_per_million = 1e6
output_per_million = 1e6
"""
COST = 43.0  # a good answer: 40 tokens of prompt, 3 of output


@pytest.mark.parametrize(
    ("at", "month", "ends"),
    [
        ("2026-11-01T00:00:00", 202611, "2026-12-01"),
        ("2026-11-30T23:59:59", 202611, "2026-12-01"),
        ("2026-12-31T23:59:59", 202612, "2027-01-01"),
        ("2028-02-29T12:00:00", 202802, "2028-03-01"),
    ],
)
def test_months_are_those_of_utc(at: str, month: int, ends: str) -> None:
    wall_s = datetime.fromisoformat(at).replace(tzinfo=UTC).timestamp()
    assert month_of(wall_s + 0.5) == month
    assert next_month_s(wall_s + 0.5) == datetime.fromisoformat(ends).replace(tzinfo=UTC).timestamp()


def test_each_part_is_added_once(place: AccountsPlace) -> None:
    with SpendingStore(place, create=True) as store:
        ledger = store.ledger()
        first = SpendingPart(1, NOVEMBER, {"moon": LedgerRow(2.5, 1.0), "moon/k": LedgerRow(2.5, 0.0)})
        assert store.add("w", first, 1000)["moon"] == LedgerRow(2.5, 1.0)
        assert store.add("w", first, 1000)["moon"] == LedgerRow(2.5, 1.0), "written again, counted once"
        other = SpendingPart(1, NOVEMBER, {"moon": LedgerRow(4.0, 0.5)})
        assert store.add("v", other, 1000) == {"moon": LedgerRow(6.5, 1.0)}, "what was heard only grows"
        store.add("u", SpendingPart(1, NOVEMBER + 200, {"sun": LedgerRow(1.0, 0.0)}), 1000)
    with SpendingStore(place) as store:
        assert store.ledger() == ledger, "the number stays"
        assert store.of_month(NOVEMBER) == {}, "more than a year ago"
        assert store.of_month(NOVEMBER + 200) == {"sun": LedgerRow(1.0, 0.0)}


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.touch(mode=0o600)
    path.write_bytes(b"damaged" * 1000)
    with pytest.raises(ConfigInvalid):
        SpendingStore(tmp_path)


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES)
    return path


def spent(bench: Any, holder: str = "moon") -> float:
    found: float = bench.gateway.state.limiter.spending.total(holder)
    return found


async def test_a_spent_budget_is_refused_also_after_a_restart(
    tmp_path: Path, http: aiohttp.ClientSession, prices: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"instance": {"max_model_tokens": 4096}, "gateway__price_file": prices}
    assert limit(tmp_path, "tenant", "set", "moon", "--money-per-month", "100") == 0
    async with running(tmp_path, [FakeEngine("e")], **settings) as bench:
        stats = bench.gateway.state.stats
        answers = [(await ask(bench, http, bench.key("moon")))[0] for _ in range(2)]
        assert answers == [200, 200]
        await until(lambda: spent(bench) == 2 * COST)
        await until(lambda: stats.budgets_near._value.get() == 1)
        assert stats.budgets_spent._value.get() == 0
        assert (await ask(bench, http, bench.key("moon")))[0] == 200, "the last one may go beyond"
        status, answer = await ask(bench, http, bench.key("moon"))
        assert (status, answer["error"]["code"]) == (429, "budget_spent")
        assert "The budget of 100 EUR a month is spent. It begins anew at" in answer["error"]["message"]
        assert "-01 00:00 UTC" in answer["error"]["message"]
        assert (await ask(bench, http, bench.key("sun")))[0] == 200
        await until(lambda: stats.budgets_spent._value.get() == 1)
    async with running(tmp_path, [FakeEngine("e")], **settings) as bench:
        assert spent(bench) == 3 * COST
        headers = {"authorization": f"Bearer {bench.key('moon')}"}
        body = {"model": "m", "messages": []}
        assert (await ask(bench, http, bench.key("moon")))[0] == 429
        async with http.post(bench.url + "/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status in (400, 404), "the body is read before"
        assert limit(tmp_path, "tenant", "set", "moon", "--money-per-month", "200") == 0
        keyring = bench.gateway.state.keyring
        await until(lambda: keyring.budgets == {"moon": 200.0})
        assert (await ask(bench, http, bench.key("moon")))[0] == 200, "a budget that was raised"
        assert limit(tmp_path, "tenant", "set", "moon", "--money-per-month", "150") == 0
        await until(lambda: keyring.budgets == {"moon": 150.0})
        assert (await ask(bench, http, bench.key("moon")))[0] == 429, "and lowered"


async def test_a_key_has_a_budget_of_its_own_and_requests_under_way_count(
    tmp_path: Path, http: aiohttp.ClientSession, prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    released = asyncio.Event()

    async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await released.wait()
        return await good(engine, request, body)

    key, other = made(tmp_path, capsys), made(tmp_path, capsys)
    assert limit(tmp_path, "key", "limit", id_of(key), "--money-per-month", "50") == 0
    async with running(tmp_path, [FakeEngine("e", behave=slow)], gateway__price_file=prices) as bench:
        limiter = bench.gateway.state.limiter
        holder = f"moon/{id_of(key)}"
        async with asyncio.TaskGroup() as group:
            first = group.create_task(ask(bench, http, key, 1000))
            await until(lambda: limiter.under_way(holder, RateLimit.MONEY) > 1000)
            status, answer = await ask(bench, http, key)
            assert (status, answer["error"]["code"]) == (429, "too_many_requests")
            assert "with this API key leaves no room beside your requests" in answer["error"]["message"]
            released.set()
        assert first.result()[0] == 200
        await until(lambda: spent(bench, holder) == COST)
        assert limiter.under_way(holder, RateLimit.MONEY) == pytest.approx(COST), "all that is new to others"
        assert [(await ask(bench, http, key))[0] for _ in range(2)] == [200, 429]
        assert (await ask(bench, http, other))[0] == 200, "the tenant has no budget"
        await until(lambda: spent(bench) == 3 * COST)


async def test_a_month_begins_at_nothing(tmp_path: Path, http: aiohttp.ClientSession, prices: Path) -> None:
    assert limit(tmp_path, "tenant", "set", "moon", "--money-per-month", "10") == 0
    async with running(tmp_path, [FakeEngine("e")], gateway__price_file=prices) as bench:
        state = bench.gateway.state
        assert state.spending is not None
        month = state.limiter.spending.month
        state.limiter.begin_month(month - 1, {"moon": LedgerRow(99.0, 0.0)})  # as it was in the month before
        async with asyncio.timeout(WAIT_S):  # the duty looks every second, so it may have been faster
            while (await ask(bench, http, bench.key("moon")))[0] != 200:
                await state.spending.flush()
        assert state.limiter.spending.month == month == month_of(state.clock.wall_s())
        await until(lambda: spent(bench) == COST)


async def test_lines_of_a_batch_fail_once_a_budget_is_spent(tmp_path: Path, prices: Path) -> None:
    assert limit(tmp_path, "tenant", "set", "alice", "--money-per-month", "60") == 0
    lines = jsonl(*(line(str(number)) for number in range(6)))
    async with serving(tmp_path, gateway__price_file=prices) as (bench, client):
        batch = await ended(client, (await submit(client, lines)).id)
        assert batch.request_counts is not None
        assert batch.request_counts.completed < 6 and batch.request_counts.failed > 0
        assert batch.error_file_id is not None
        errors = (await client.files.content(batch.error_file_id)).text.splitlines()
        codes = {json.loads(each)["response"]["body"]["error"]["code"] for each in errors}
        assert codes == {"budget_spent"}
        assert spent(bench, "alice") == pytest.approx(COST * batch.request_counts.completed)
