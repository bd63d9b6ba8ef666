"""The console for everyone: axe on each page in light and dark, and what can be done with the keyboard alone."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import mooncache
from mooncache.accounts.core.api_key import KeyScope
from mooncache.accounts.key_store import create_key
from mooncache.bench.operate.browser import BrowserPage, browsing, find_browser
from mooncache.client.conductor_link import ConductorLink
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import ConductorUnavailable
from tests.conductor.support import BLOCK, chain
from tests.gateway.axe import PACKAGE, Axe
from tests.gateway.test_console import served
from tests.gateway.test_console_acts import scene
from tests.gateway.test_console_browser import enter, fill, meter
from tests.gateway.test_console_doctor import REPORT, runs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None or find_browser() is None,
    reason="needs axe-core-python (extra dev) and Chromium (Debian package chromium)",
)
SCHEMES = ("light", "dark")


@pytest.fixture
async def page(tmp_path: Path, http: aiohttp.ClientSession) -> AsyncIterator[BrowserPage]:
    program = find_browser()
    assert program is not None
    async with browsing(program, tmp_path / "browser", http) as found:
        yield found


class Look:
    """Looks at one page after another as people with either scheme see it; `wrong` is what axe says of them."""

    def __init__(self, page: BrowserPage, axe: Axe, folder: Path) -> None:
        self._page, self._axe, self._folder = page, axe, folder
        self.wrong: list[str] = []

    async def at(self, name: str) -> None:
        """The page as it is now."""
        for scheme in SCHEMES:
            media = [
                {"name": "prefers-color-scheme", "value": scheme},
                {"name": "prefers-reduced-motion", "value": "reduce"},
            ]
            await self._page.call("Emulation.setEmulatedMedia", features=media)
            self.wrong += [f"{name}, {scheme}: {each}" for each in await self._axe.violations()]
            await self._page.picture(self._folder / f"{name}-{scheme}.png")

    async def go(self, name: str, ready: str) -> None:
        """Open a page by its address and look at it once `ready` is in the document."""
        await self._page.value(f"location.hash = '#/{name}'")
        await self._page.until(f"document.querySelector({ready!r}) !== null")
        await self.at(name.replace("/", "-"))

    async def dialog(self, name: str) -> None:
        """Open the dialog of the first row, look at it and close it."""
        await self._page.until("document.querySelector('td button.act') !== null")
        await self._page.value("document.querySelector('td button.act').click()")
        await self._page.until("document.querySelector('dialog[open]') !== null")
        await self.at(name)
        await self._page.press("Escape")
        await self._page.until("!document.querySelector('dialog')")


async def test_pages_of_requests_and_tenants(page: BrowserPage, tmp_path: Path) -> None:
    async with served(tmp_path / "state") as (bench, answers):
        fill(bench, answers)
        meter(bench)
        place = bench.gateway.config.cluster.accounts_place
        assert isinstance(place, Path)
        create_key(place, "alice", [KeyScope.USAGE], created_s=1000, created_by="a test", name="ci")
        await page.call("Page.navigate", url=f"{bench.url}/console")
        await page.until("document.activeElement?.id === 'key'")
        look = Look(page, await Axe.loaded(page), tmp_path)
        await look.at("signin")
        await page.type(bench.gateway.token.text)
        await page.press("Enter")
        await look.go("overview", ".tile .value")
        await look.go("requests", "tbody tr.opens")
        await look.go("request/d-3", ".lane .span")
        await look.go("instances", "tbody td .badge")
        await look.go("tenants", "tbody a.name")
        await look.go("tenant/alice", "td button.act")
        await look.dialog("revoke")
        for button, name in ((".heading button.main", "make"), (".panel .heading button", "limits")):
            await page.until("!document.querySelector('dialog')")
            await page.value(f"document.querySelector('{button}').click()")
            await look.at(name)
            if name == "make":
                await page.type("ci-2")
                await page.press("Enter")
                await page.until("document.querySelector('dialog input.secret')?.value")
                await look.at("made")
            await page.press("Escape")
        await look.go("configuration", "tbody td")
        bench.gateway.state.require_console().doctor = runs(f"print({REPORT!r})")
        await look.go("doctor", ".heading button.main")
        await page.value("document.querySelector('.heading button.main').click()")
        await page.until("document.querySelector('.findings li') !== null")
        await look.at("doctor-results")
        await page.value("document.querySelector('#leave').click()")
        await page.until("document.activeElement?.id === 'key'")
        await page.type(bench.key("alice"))
        await page.press("Enter")
        await look.go("usage", ".plot")
        assert not look.wrong, "\n".join(look.wrong)
        assert not page.complaints


async def test_pages_of_the_pool(
    pool: EmbeddedCluster,
    page: BrowserPage,
    tmp_path: Path,
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def gone(*_: Any) -> Any:
        raise ConductorUnavailable("The conductor does not answer.")

    async with scene(pool, tmp_path, http) as found:
        hot, now_s = found.conductor.service.state.hot, found.conductor.service.state.clock.now_s()
        for name in ("a", "b"):
            hot.use("m", chain(name, 9, parent="root", shared=2), 9, BLOCK, now_s, ("host-1",), "alice")
        with mooncache.connect(**pool.client_settings(), tenant="alice") as client:
            client.put(b"a" * 32, b"kv" * 100_000)
        await enter(page, found.gateway.url, found.gateway.token.text)
        await page.until("!document.querySelector('#nav').hidden")
        look = Look(page, await Axe.loaded(page), tmp_path)
        await look.go("overview", "[aria-label=Incidents]")
        await look.go("pool", "[aria-label='Tenants in the pool'] td .meter")
        await look.dialog("drain")
        await look.go("instances", "td button.act")
        await look.dialog("instance")
        await look.go("prefixes", "td button.act")
        await look.dialog("prefix")
        await look.go("network", ".matrix td")
        with monkeypatch.context() as patched:
            patched.setattr(ConductorLink, "call", gone)
            await look.go("overview", "[aria-label=Incidents] tbody td .badge")
        await page.until("document.querySelector('.note.bad') === null")
        await look.at("overview-ended")
        assert not look.wrong, "\n".join(look.wrong)
        assert not page.complaints


async def load_again(page: BrowserPage) -> None:
    """A new document, in which Tab begins at the top."""
    await page.value("(() => { window.old = true; location.reload(); })()")
    await page.until("!window.old && document.querySelector('.tile .value') !== null")


async def test_the_keyboard_alone(page: BrowserPage, tmp_path: Path) -> None:
    async with served(tmp_path / "state") as (bench, answers):
        fill(bench, answers)
        await enter(page, bench.url, bench.gateway.token.text)
        await page.until("document.querySelector('.tile .value') !== null")
        here = "document.activeElement"
        await load_again(page)
        await page.press("Tab")
        assert await page.value(f"{here}.className") == "skip"
        await page.press("Enter")
        assert await page.value(f"{here}.id") == "main"
        await load_again(page)
        seen: list[str] = []
        while "Requests" not in seen and len(seen) < 8:
            await page.press("Tab")
            seen.append(await page.value(f"{here}.textContent.trim()"))
            outline = await page.value(f"getComputedStyle({here}).outlineStyle")
            assert outline != "none", f"what has the focus is not to be seen: {seen[-1]}"
        await page.press("Enter")
        await page.until("document.querySelectorAll('tbody tr.opens').length === 5")
        assert (
            await page.value(f"{here}.textContent") == "Requests"
        )  # the link keeps the focus, though it was drawn anew
        region = f"{here}.getAttribute('role') === 'region'"
        for _ in range(40):
            await page.press("Tab")
            if await page.value(region):
                break
        assert await page.value(region), "the list is not to be reached"
        await page.press("ArrowDown")
        await page.press("ArrowDown")
        await page.press("Enter")
        await page.until("location.hash.startsWith('#/request/')")
        await page.until("document.querySelectorAll('.lane .span').length === 3")
        await page.press("Escape")
        await page.until("location.hash === '#/requests'")
        assert not page.complaints
