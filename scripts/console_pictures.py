"""Takes the pictures of the console in docs/images anew: `make pictures`.

They show a real cluster of this machine with small engines under load: tenants that ask about documents which begin
alike, a price book with made-up prices, and a store node that is killed and started again, which is an incident. It
takes about five minutes and needs Chromium. No picture is changed when one page does not come.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from mooncache.auth import Token, load_cluster_token, tenant_token
from mooncache.bench.operate.browser import BrowserPage, browsing, find_browser
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.settings import EngineKind, missing_modules
from mooncache.prices.example import prices_toml

IMAGES: Final = Path(__file__).resolve().parent.parent / "docs" / "images"
START_S: Final = 300.0
ANSWER_S: Final = 120.0
ASKING: Final = 2  # requests at the same time
TENANTS: Final = ("team-a", "team-b", "team-c")
KILLED: Final = "node-3"
DOWN_S: Final = 20.0  # long enough that the master gives the node up
DOCUMENTS: Final = (0, 0, 0, 1, 0, 1, 2, 0, 3, 1)  # which one each question is about: some are asked for more
DOCUMENT_CHARS: Final = 4000
WIDTH: Final = 1280
HEIGHT: Final = 900
HEIGHT_MAX: Final = 1500
EVENT_BYTES_MAX: Final = 1 << 24


@dataclass
class AskedCluster:
    """A running cluster, and what is needed to ask it."""

    url: str
    model: str
    document_chars: int
    token: Token
    http: aiohttp.ClientSession
    answered: int = 0
    refused: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def bearer(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token.text}"}

    def document(self, number: int) -> str:
        """Documents begin alike, so that their blocks are a tree."""
        head = "You answer questions of a museum about the moon. Be brief and name the paragraph. " * 9
        text = " ".join(
            f"Paragraph {at} of document {number} is about the tides of month {at % 12 + 1}."
            for at in range(200)
        )
        return (head + text)[: self.document_chars]

    async def ask(self, number: int) -> None:
        """One question of a tenant about a document."""
        tenant = TENANTS[(number // 3) % len(TENANTS)] if number % 5 else TENANTS[0]
        body = {
            "model": self.model,
            "stream": True,
            "max_tokens": 24,
            "messages": [
                {"role": "system", "content": self.document(DOCUMENTS[number % len(DOCUMENTS)])},
                {"role": "user", "content": f"Question {number}: which tide is it?"},
            ],
        }
        headers = {"authorization": f"Bearer {tenant_token(self.token, tenant).text}"}
        path = f"{self.url}/v1/chat/completions"
        async with asyncio.timeout(ANSWER_S), self.http.post(path, json=body, headers=headers) as response:
            await response.read()
            if response.status == 200:
                self.answered += 1
            else:
                self.refused += 1

    async def ask_on(self) -> None:
        """Questions until it is over; one that fails while a node is away is no reason to end."""
        numbers = itertools.count()

        async def one_after_another() -> None:
            while not self.over.is_set():
                try:
                    await self.ask(next(numbers))
                except (aiohttp.ClientError, TimeoutError):
                    self.refused += 1

        await asyncio.gather(*(one_after_another() for _ in range(ASKING)))

    async def make_accounts(self) -> None:
        """Keys and limits of a tenant, by the paths that the page uses."""
        keys = (
            {"scopes": ["inference"], "name": "chat"},
            {"scopes": ["inference", "usage"], "name": "reports"},
        )
        for each in keys:
            await self._send("POST", "/console/keys", {"tenant": TENANTS[0], **each})
        limits = {"requests_per_minute": 6000, "tokens_per_minute": 20_000_000, "money_per_month": 500}
        await self._send("PUT", "/console/limits", {"tenant": TENANTS[0], **limits})

    async def _send(self, method: str, path: str, body: dict[str, Any]) -> None:
        async with self.http.request(method, self.url + path, json=body, headers=self.bearer) as response:
            if response.status != 200:
                raise SystemExit(f"{method} {path} was answered {response.status}: {await response.text()}")

    async def richest_request(self) -> str:
        """The decision whose page shows most: legs apart, tokens from the pool, the latest first token."""
        live = f"{self.url}/console/live?topic=requests"
        async with (
            asyncio.timeout(ANSWER_S),
            self.http.get(live, headers=self.bearer, read_bufsize=EVENT_BYTES_MAX) as response,
        ):
            async for line in response.content:
                if line.startswith(b"data: "):
                    rows = json.loads(line.removeprefix(b"data: "))["requests"]
                    break
            else:
                raise SystemExit("the console's stream of requests ended without an event")
        ended = [row for row in rows if row["state"] == "finished" and row["ttft_ms"] is not None]
        if not ended:
            raise SystemExit("no request has finished: see the logs of the engines")

        def worth(row: dict[str, Any]) -> tuple[bool, bool, float]:
            return row["prefill"] not in ("", row["decode"]), bool(row["cached_tokens"]), row["ttft_ms"]

        return str(max(ended, key=worth)["decision_id"])


class PictureAlbum:
    """Opens one page after another and keeps its picture."""

    def __init__(self, page: BrowserPage, folder: Path) -> None:
        self._page, self._folder = page, folder

    async def look(self, name: str, ready: str, *, dark: bool = False) -> None:
        """Take a picture of the page as it is, once `ready` is true, as tall as its content."""
        page = self._page
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        calm = {"name": "prefers-reduced-motion", "value": "reduce"}
        await page.call("Emulation.setEmulatedMedia", features=[scheme, calm])
        await page.until(ready)
        await self._size(HEIGHT)
        tall = int(await page.value("document.documentElement.scrollHeight"))
        await self._size(min(max(HEIGHT, tall), HEIGHT_MAX))
        await page.until(ready)
        await page.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        await page.picture(self._folder / f"console-{name}.png")
        print(f"console-{name}.png", flush=True)

    async def open(self, name: str, address: str, ready: str) -> None:
        """Go to a page by its address and take its picture."""
        await self._page.value(f"location.hash = {json.dumps(f'#/{address}')}")
        await self.look(name, ready)

    async def _size(self, height: int) -> None:
        size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self._page.call("Emulation.setDeviceMetricsOverride", **size)

    async def sign_in(self, key: str) -> None:
        """Type a key into the field, which has the focus."""
        await self._page.until("document.activeElement?.id === 'key'")
        await self._page.type(key)
        await self._page.press("Enter")
        await self._page.until("!document.querySelector('#nav').hidden")

    async def enter(self, asked: AskedCluster) -> None:
        """The page to sign in, then the overview, which stays open."""
        await self._page.call("Page.navigate", url=f"{asked.url}/console")
        await self.look("signin", "document.activeElement?.id === 'key'")
        await self.sign_in(asked.token.text)

    async def take(self, asked: AskedCluster) -> None:
        """All other pages, and at last that of a tenant."""
        page = self._page
        await self._of_requests(asked)
        await self._of_the_pool()
        await self.open("tenants", "tenants", "document.querySelectorAll('tbody a.name').length >= 3")
        await self.open(
            "keys", f"tenant/{TENANTS[0]}", "document.querySelectorAll('td button.act').length >= 2"
        )
        await self.open("configuration", "configuration", "document.querySelector('tbody td') !== null")
        asked.over.set()  # the doctor measures, too
        await page.value("location.hash = '#/doctor'")
        await page.until("document.querySelector('.heading button.main')?.disabled === false")
        await page.value("document.querySelector('.heading button.main').click()")
        await page.until("document.querySelectorAll('.tile').length === 4")
        await self.look("doctor", "document.querySelector('.heading button.main')?.disabled === false")
        await page.value("document.querySelector('#leave').click()")
        await self.sign_in(tenant_token(asked.token, TENANTS[0]).text)
        await self.look("usage", "document.querySelector('.plot .chart') !== null")
        if page.complaints:
            raise SystemExit(f"the browser complained: {page.complaints}")

    async def _of_requests(self, asked: AskedCluster) -> None:
        page = self._page
        incidents = "document.querySelector('[aria-label=Incidents] tbody td') !== null"
        await self.open("overview", "overview", incidents)
        await self.look("overview-dark", incidents, dark=True)
        await self.open("requests", "requests", "document.querySelector('tbody tr.opens') !== null")
        await page.value(f"location.hash = '#/request/{await asked.richest_request()}'")
        await page.until("document.querySelector('.lane .span') !== null")
        choice = "const c = document.getElementById('policy'); c.value = 'least_load';"
        await page.value(f"(() => {{ {choice} c.dispatchEvent(new Event('change')); }})()")
        await self.look("request", "document.querySelector('section:has(#policy) p') !== null")

    async def _of_the_pool(self) -> None:
        page = self._page
        known = "[...document.querySelectorAll('[aria-label=Flows] td')].some((c) => c.textContent.endsWith('B/s'))"
        held = "document.querySelector(\"[aria-label='Tenants in the pool'] td .meter\") !== null"
        await self.open("pool", "pool", f"{known} && {held}")
        await self.open("instances", "instances", "document.querySelectorAll('td button.act').length >= 2")
        await page.value("document.querySelector('td button.act').click()")
        await self.look("act", "document.querySelector('dialog[open]') !== null")
        await page.press("Escape")
        await page.until("!document.querySelector('dialog')")
        await self.open("prefixes", "prefixes", "document.querySelectorAll('td button.act').length >= 3")
        cells = "[...document.querySelectorAll('.matrix td')]"
        ways = f"{cells}.filter((c) => /\\d (µs|ms)$/.test(c.textContent)).length === 6"
        await self.open("network", "network", ways)


@contextlib.contextmanager
def started(folder: Path) -> Iterator[EmbeddedCluster]:
    """A pool of three nodes with disks, a prefill and two decode engines."""
    prices = folder / "prices.toml"
    prices.write_text(prices_toml())
    cluster = EmbeddedCluster(
        ClusterSettings(
            state_dir=folder / "state",
            engine=EngineKind.HF,
            nodes=3,
            decode=2,
            capacity_bytes=64 << 20,
            ssd_bytes=256 << 20,
            port=0,
            conductor_port=0,
            gateway_port=0,
            extra_env=(
                ("OMP_NUM_THREADS", "1"),
                ("MOONCACHE_GATEWAY_PRICE_FILE", str(prices)),
                # Longer prompts are handed over, and what was handed over is loaded, however slow that is.
                ("MOONCACHE_CONDUCTOR_INLINE_TOKENS_MAX", "512"),
                ("MOONCACHE_CONNECTOR_BREAK_EVEN", "false"),
            ),
        )
    )
    cluster.start(START_S)
    try:
        yield cluster
    finally:
        cluster.stop()


@contextlib.asynccontextmanager
async def asking(asked: AskedCluster) -> AsyncIterator[None]:
    """Questions are asked meanwhile."""
    task = asyncio.create_task(asked.ask_on())
    try:
        yield
    finally:
        asked.over.set()
        await task


async def take_all(cluster: EmbeddedCluster, instance: dict[str, Any], folder: Path, load_s: float) -> None:
    """Load the cluster, have an incident, and take the pictures into a folder."""
    async with aiohttp.ClientSession() as http:
        chars = min(DOCUMENT_CHARS, int(instance["max_model_tokens"]) // 2)
        token = load_cluster_token(cluster.token_path)
        asked = AskedCluster(cluster.layout.gateway_url, str(instance["model"]), chars, token, http)
        await asked.make_accounts()
        program = find_browser()
        assert program is not None
        async with asking(asked), browsing(program, folder / "browser", http) as page:
            album = PictureAlbum(page, folder)
            await album.enter(asked)
            print(f"asking for {load_s:g} s", flush=True)
            await asyncio.sleep(load_s / 2)
            await asyncio.to_thread(cluster.kill, KILLED)
            await asyncio.sleep(DOWN_S)  # the open overview sees that it is gone
            await asyncio.to_thread(cluster.restart, KILLED)
            await asyncio.sleep(load_s / 2)
            print(f"{asked.answered} requests were answered, {asked.refused} were not", flush=True)
            await album.take(asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=IMAGES, help="folder of the pictures (default: docs/images)"
    )
    parser.add_argument(
        "--load-s", type=float, default=180.0, help="how long requests are made before (seconds)"
    )
    options = parser.parse_args()
    if find_browser() is None:
        raise SystemExit("there is no Chromium on this machine (Debian package chromium)")
    if missing := missing_modules(EngineKind.HF):
        raise SystemExit(f"the small engine needs {', '.join(missing)}: pip install 'mooncache[hf]'")
    with tempfile.TemporaryDirectory(prefix="mooncache-pictures-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with started(folder) as cluster:
            instance = cluster.describe_instances()[0]
            asyncio.run(take_all(cluster, instance, folder, options.load_s))
        options.out.mkdir(parents=True, exist_ok=True)
        for picture in sorted(folder.glob("console-*.png")):
            shutil.copyfile(picture, options.out / picture.name)


if __name__ == "__main__":
    main()
