"""The console's pages in a real browser: signing in, every page, hostile names, long lists, the keyboard."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from mooncache.accounts.core.usage import UsageCounts, UsageKey, UsagePart, WorkClass, hour_of
from mooncache.accounts.usage_store import UsageStore
from mooncache.bench.operate.browser import BrowserPage, browsing, find_browser
from mooncache.gateway.core.recent_requests import RecentRequest
from mooncache.prices.example import prices_toml
from tests.gateway.stand_in import MODEL, Bench
from tests.gateway.test_console import HOSTILE, Answers, served

CANDIDATE = {
    "instance_id": HOSTILE,
    "role": "both",
    "local_tokens": 0,
    "queue_ms": 1.0,
    "best": "fetch",
    "total_ms": 10.0,
    "branches": [{"kind": "fetch", "fetch_tokens": 640, "prefix_tokens": 640, "total_ms": 10.0}],
}


@pytest.fixture
async def page(tmp_path: Path, http: aiohttp.ClientSession) -> AsyncIterator[BrowserPage]:
    program = find_browser()
    if program is None:
        pytest.skip("there is no Chromium on this machine (Debian package chromium)")
    async with browsing(program, tmp_path / "browser", http) as found:
        yield found


async def enter(page: BrowserPage, url: str, key: str) -> None:
    """Sign in with the keyboard alone; the field has the focus from the beginning."""
    await page.call("Page.navigate", url=f"{url}/console")
    await page.until("document.activeElement?.id === 'key'")
    await page.type(key)
    await page.press("Enter")


def fill(bench: Bench, answers: Answers) -> None:
    """Decisions with all that a page shows of them, with hostile names where names can be hostile; one instance."""
    now_s = bench.gateway.state.clock.wall_s()
    for number, each in enumerate(answers.records):
        each.update(
            made_at_s=now_s - number, tenant=HOSTILE, model=HOSTILE, message=HOSTILE, decode_candidates=[],
            prefill_candidates=[CANDIDATE], inline_candidates=[], candidate_count=1, earlier=[],
            expected={"without_cache_ms": 400.0, "ttft_ms": 100.0, "tbt_ms": 10.0}, expected_output_tokens=7,
            chosen={"prefill": HOSTILE, "decode": "e", "branch": "fetch"},
            spans=[
                {"leg": "prefill", "instance": HOSTILE, "part": "wait", "from_ms": 0.0, "to_ms": 10.0},
                {"leg": "prefill", "instance": HOSTILE, "part": "compute", "from_ms": 10.0, "to_ms": 110.0},
                {"leg": "decode", "instance": "e", "part": "generate", "from_ms": 120.0, "to_ms": 9000.0},
            ],
            what_if={"policy": "local", "known": True, "same": False, "message": HOSTILE, "expected": None},
        )  # fmt: skip
    bench.conductor.set_instances([bench.engines["e"].instance(instance_id=HOSTILE)])


async def test_every_page(page: BrowserPage, tmp_path: Path) -> None:
    async with served(tmp_path / "state") as (bench, answers):
        fill(bench, answers)
        await enter(page, bench.url, "mcc1." + "0" * 64)
        await page.until("document.querySelector('[role=alert]')?.textContent.includes('Incorrect API key')")
        assert await page.value("document.querySelector('#nav').hidden") is True
        # As many errors of the network are in the browser's log as answers were 401; nothing else is.
        page.complaints.clear()

        await enter(page, bench.url, bench.gateway.token.text)
        await page.until(
            "[...document.querySelectorAll('.tile')].some((t) => t.textContent.includes('80 %'))"
        )
        assert await page.value("document.cookie") == ""  # scripts cannot read the session
        await page.until("document.querySelector('.note.bad')?.textContent.includes('Pool')")

        await page.press("4")
        await page.until(
            f"[...document.querySelectorAll('td')].some((t) => t.textContent === {json.dumps(HOSTILE)})"
        )
        await page.press("3")
        await page.until("document.querySelector('h1')?.textContent === 'Pool'")
        await page.press("2")
        await page.until("document.querySelectorAll('tbody tr.opens').length === 5")
        await page.press("/")
        assert await page.value("document.activeElement.type") == "search"
        await page.type("r-3")
        await page.until("document.querySelectorAll('tbody tr.opens').length === 1")
        await page.press("Escape")
        await page.value("document.querySelector('.scroll.tall').focus()")
        await page.press("ArrowDown")
        await page.press("Enter")
        await page.until("document.querySelectorAll('.lane .span').length === 3")
        assert await page.value("location.hash") == "#/request/d-3"
        parts = await page.value("[...document.querySelectorAll('.lane .part')].map((p) => p.textContent)")
        assert parts == ["waiting for blocks", "prefill", "decode"]
        said = await page.value("document.querySelector('main').textContent")
        assert "Another decision" in said
        assert f"→ {HOSTILE}" in said
        assert await page.value("document.querySelectorAll('main img, main script').length") == 0
        assert not page.complaints  # no refusal by the content security policy, no error, no dialog


def meter(bench: Bench) -> None:
    """Usage of two tenants, with hostile names where names can be hostile."""
    rows = {
        UsageKey(hour_of(time.time()), tenant, key_id, HOSTILE, WorkClass.ONLINE): UsageCounts(
            9, 1, 1, 2_000_000, 500_000, 70_000, 900
        )
        for tenant, key_id in (("alice", "token"), ("alice", "0123456789abcdef"), ("bob", "token"))
    }
    with UsageStore(bench.gateway.config.cluster.accounts_place, create=True) as store:
        store.add("w", UsagePart(1, rows), 0)
    recent = RecentRequest(HOSTILE, "token", HOSTILE, "online", time.time(), 900.0, HOSTILE, 40, 8, 3)
    bench.gateway.state.recent.add("alice", recent)
    bench.gateway.state.recent.add("bob", recent._replace(request_id="of-bob"))


async def test_a_tenants_own_page(page: BrowserPage, tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("[cost]\ncurrency = 'EUR'\n[[cost.tokens]]\ninput_per_million = 2.0\n")
    async with served(tmp_path / "state", gateway__price_file=path) as (bench, answers):
        meter(bench)
        await enter(page, bench.url, bench.key("alice"))
        await page.until("document.querySelector('h1')?.textContent === 'Usage'")
        await page.until(
            "[...document.querySelectorAll('.tile')].some((t) => t.textContent.includes('6 EUR'))"
        )
        assert await page.value("[...document.querySelectorAll('#nav a')].map((a) => a.textContent)") == [
            "Usage"
        ]
        for there in ("#/overview", "#/tenants", "#/requests", "#/request/d-1", "#/pool"):
            await page.value(f"location.hash = {json.dumps(there)}")
            await page.until("document.querySelector('h1')?.textContent === 'Usage'")
        await page.until(f"document.querySelector('tbody td .name')?.title === {json.dumps(HOSTILE)}")
        said = await page.value("document.querySelector('main').textContent")
        assert "bob" not in said and "0123456789abcdef" in said and HOSTILE in said
        assert await page.value("document.querySelectorAll('main img, main script').length") == 0
        assert not answers.asked and not page.complaints
        await page.picture(tmp_path / "console-usage.png")


async def test_what_a_tenant_sends_is_text_on_the_page_or_not_there(
    page: BrowserPage, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """Prompts and answers are on no page; ids of requests are, as the gateway took them."""
    async with served(tmp_path / "state") as (bench, _):
        prompt = f"{HOSTILE} in a prompt"
        body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "user": HOSTILE}
        headers = {**bench.auth("alice"), "x-request-id": HOSTILE}
        for model, status in ((MODEL, 200), (HOSTILE, 404)):
            asked = {**body, "model": model}
            async with http.post(bench.url + "/v1/chat/completions", json=asked, headers=headers) as response:
                assert response.status == status
        for key in (bench.key("alice"), bench.gateway.token.text):
            await enter(page, bench.url, key)
            await page.until("!document.querySelector('#nav').hidden")
            for link in range(await page.value("document.querySelectorAll('#nav a').length")):
                await page.value(f"document.querySelectorAll('#nav a')[{link}].click()")
                await page.until(f"document.querySelectorAll('#nav a')[{link}].hasAttribute('aria-current')")
                if key == bench.key("alice"):
                    await page.until("document.querySelectorAll('main tbody tr:not(.gap)').length > 0")
                assert "in a prompt" not in await page.value("document.documentElement.outerHTML")
                assert await page.value("document.querySelectorAll('main img, main script').length") == 0
            await page.value("document.querySelector('#leave').click()")
            await page.until("document.querySelector('#nav').hidden")
        assert not page.complaints


async def test_the_operators_page_of_tenants(page: BrowserPage, tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(prices_toml())
    async with served(tmp_path / "state", gateway__price_file=path) as (bench, _):
        meter(bench)
        await enter(page, bench.url, bench.gateway.token.text)
        await page.until(
            "[...document.querySelectorAll('.tile')].some((t) => t.textContent.includes('Money spent'))"
        )
        await page.picture(tmp_path / "console-money.png")
        await page.press("6")
        await page.until("document.querySelectorAll('tbody tr td .name').length === 2")
        rows = await page.value(
            "[...document.querySelectorAll('tbody tr:not(.gap)')].map((r) => r.textContent)"
        )
        assert "alice" in rows[0] and "bob" in rows[1]
        await page.press("1")
        await page.until("document.querySelector('h1')?.textContent === 'Overview'")
        await page.press("6")
        await page.until("document.querySelectorAll('tbody tr td .name').length === 2")
        await page.picture(tmp_path / "console-tenants.png")
        assert not page.complaints


async def test_the_configuration(page: BrowserPage, tmp_path: Path) -> None:
    async with served(tmp_path / "state", gateway__cors_origins=(HOSTILE,)) as (bench, _):
        await enter(page, bench.url, bench.gateway.token.text)
        await page.until("!document.querySelector('#nav').hidden")
        await page.press("7")
        await page.until("document.querySelectorAll('tbody tr:not(.gap)').length > 20")
        await page.value("document.querySelector('#only-set').click()")
        rows = "[...document.querySelectorAll('tbody tr:not(.gap)')].map((r) => [...r.cells].map((c) => c.textContent))"
        await page.until(f"{rows}.every((r) => r[2] !== 'default')")
        found = {row[0]: row[1:3] for row in await page.value(rows)}
        assert found["gateway.cors_origins"] == [json.dumps([HOSTILE]), "command line"]
        assert "gateway.port" in found and "gateway.host" not in found
        await page.picture(tmp_path / "console-configuration.png")
        assert not page.complaints


async def test_a_thousand_instances_are_a_few_rows(page: BrowserPage, tmp_path: Path) -> None:
    async with served(tmp_path / "state") as (bench, _):
        engine = bench.engines["e"]
        names = [f"e-{number:04}" for number in range(1000)]
        bench.conductor.set_instances([engine.instance(instance_id=name) for name in names])
        await enter(page, bench.url, bench.gateway.token.text)
        await page.until("!document.querySelector('#nav').hidden")
        await page.press("4")
        await page.until("document.querySelector('.bar [role=status]')?.textContent === '1,000 instances'")
        rows = "[...document.querySelectorAll('tbody tr:not(.gap)')].map((r) => r.cells[0].textContent)"
        first = await page.value(rows)
        assert first[0] == "e-0000"
        assert len(first) < 80
        await page.value(
            "(() => { const s = document.querySelector('.scroll.tall'); s.scrollTop = s.scrollHeight; })()"
        )
        await page.until(f"{rows}.includes('e-0999')")
        assert len(await page.value(rows)) < 80
        # In small steps rows that stay in sight are kept; they have to stay in order, and none may be missing.
        for step in (-40, -400, -34, 90, 700, -2000, 1):
            await page.value(f"document.querySelector('.scroll.tall').scrollTop += {step}")
            await page.value(
                "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
            )
            seen = await page.value(rows)
            first_seen = int(seen[0].removeprefix("e-"))
            assert seen == names[first_seen : first_seen + len(seen)]
            top = "document.querySelector('.scroll.tall').getBoundingClientRect()"
            middle = f"document.elementFromPoint({top}.left + 20, {top}.top + {top}.height / 2)"
            assert await page.value(f"{middle}.closest('tr').className") != "gap"
        assert await page.value("document.documentElement.scrollWidth <= innerWidth")
        for theme in ("light", "dark", None):
            await page.value("document.activeElement.blur()")
            await page.press("t")
            assert await page.value("document.documentElement.dataset.theme ?? null") == theme
        assert not page.complaints
