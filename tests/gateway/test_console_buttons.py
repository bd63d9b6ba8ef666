"""What operators do on the console, in a real browser: each act by its button, and what the cluster did of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

import mooncache
from mooncache.bench.operate.browser import BrowserPage
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.gateway.console.viewers import Topic
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.client.conftest import make_cluster
from tests.conditions import until
from tests.conductor.support import BLOCK, chain
from tests.gateway.test_console_acts import Scene, scene
from tests.gateway.test_console_browser import enter, page

__all__ = ["page"]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    cluster = make_cluster(tmp_path_factory.mktemp("pool"))
    cluster.start()
    yield cluster
    cluster.stop()


async def signed_in(page: BrowserPage, found: Scene) -> None:
    await enter(page, found.gateway.url, found.gateway.token.text)
    await page.until("!document.querySelector('#nav').hidden")


async def act(page: BrowserPage, row: str, text: str) -> str:
    """Open a row's dialog and press the button with this text, both by Enter; what the dialog says then."""
    selector = f'td button[aria-label="Change {row}"]'
    button = f"document.querySelector({json.dumps(selector)})"
    await page.until(f"{button} !== null")
    await page.value(f"{button}.focus()")
    await page.press("Enter")
    choices = "[...document.querySelectorAll('dialog[open] .choices button')]"
    choice = f"{choices}.find((b) => b.textContent === {json.dumps(text)})"
    await page.until(f"{choice} !== undefined")
    await page.value(f"{choice}.focus()")
    await page.press("Enter")
    said = "document.querySelector('dialog [role=status]')?.textContent"
    await page.until(f"{said}.startsWith('Done')")
    found: str = await page.value(said)
    await page.press("Escape")
    await page.until("!document.querySelector('dialog')")
    return found


async def until_row_is(page: BrowserPage, row: str, word: str) -> None:
    """Wait until the row of this name has a cell with this text."""
    rows = "[...document.querySelectorAll('tbody tr')]"
    cells = f"{rows}.filter((r) => r.dataset.key === {json.dumps(row)}).flatMap((r) => [...r.cells])"
    await page.until(f"{cells}.some((c) => c.textContent === {json.dumps(word)})")


async def test_an_instance_is_drained_and_taken_back_and_gets_another_role(
    pool: EmbeddedCluster, page: BrowserPage, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with scene(pool, tmp_path, http) as found:
        await signed_in(page, found)
        await page.press("4")
        await page.until("document.querySelector('td button.act') !== null")
        await page.value("document.querySelector('td button.act').focus()")
        await page.press("Enter")
        await page.until("document.querySelector('dialog[open] .choices button')?.textContent === 'Drain it'")
        # Enter twice changes nothing.
        assert await page.value("document.activeElement.textContent") == "Close"
        await page.press("Escape")
        await page.until("!document.querySelector('dialog')")
        assert (await found.instance()).state == pb.INSTANCE_STATE_READY

        await act(page, "e", "Drain it")
        assert (await found.instance()).state == pb.INSTANCE_STATE_DRAINING
        await until_row_is(page, "e", "draining")
        await act(page, "e", "Send requests to it again")
        assert (await found.instance()).state == pb.INSTANCE_STATE_READY
        await until_row_is(page, "e", "ready")
        await act(page, "e", "Make its role decode")
        assert (await found.instance()).role == pb.INSTANCE_ROLE_DECODE
        await until_row_is(page, "e", "decode")
        assert [each.what for each in found.entries()] == [
            "instance drain",
            "instance undrain",
            "instance role",
        ]
        assert not page.complaints


async def test_a_node_is_drained_and_taken_back(
    pool: EmbeddedCluster, page: BrowserPage, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with scene(pool, tmp_path, http) as found:
        await signed_in(page, found)
        await page.press("3")
        await page.until("document.querySelectorAll('td button.act').length === 2")
        await page.until(
            "[...document.querySelectorAll('.tile')].some((t) => t.textContent.includes('Copies'))"
        )
        await act(page, "node-1", "Drain it")
        await found.until_node_is("draining")
        await until_row_is(page, "node-1", "draining")
        await page.until(
            "document.querySelector('section[aria-label=Tasks]:not([hidden])')?.textContent.includes('node-1')"
        )
        await act(page, "node-1", "Take it back")
        await found.until_node_is("active")
        await until_row_is(page, "node-1", "active")
        assert [(each.what, each.arguments) for each in found.entries()] == [
            ("drain", ["node-1"]),
            ("drain", ["node-1", "--cancel"]),
        ]
        assert not page.complaints


async def test_a_prefix_is_pinned_copied_and_evicted(
    pool: EmbeddedCluster, page: BrowserPage, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    keys = chain("story", 4)
    blocks = [keys[at : at + 32] for at in range(0, len(keys), 32)]
    with mooncache.connect(**pool.client_settings()) as client:
        client.put_many(blocks, [b"kv" * 100] * 4).raise_for_errors()
        async with scene(pool, tmp_path, http) as found:
            hot, now_s = found.conductor.service.state.hot, found.conductor.service.state.clock.now_s()
            hot.use("m", keys, 4, BLOCK, now_s, ("h",))

            async def all_reported() -> bool:
                return bool((await found.page(Topic.OVERVIEW))["pool"]["blocks"] >= 4)

            await until(all_reported, "the master knows the blocks", every_s=0.05)
            names = {row["first_block"]: row["id"] for row in (await found.page(Topic.PREFIXES))["prefixes"]}
            await signed_in(page, found)
            await page.press("5")
            assert "2 of 2 blocks are pinned" in await act(page, names[2], "Pin it for an hour")
            assert "Task " in await act(page, names[2], "Make another copy")
            await until(
                lambda: [Counter(e.key for e in client.list())[one] for one in blocks] == [1, 1, 2, 2]
            )
            assert "1 of 1 blocks are in the pool no longer" in await act(page, names[0], "Evict it")
            assert client.get(blocks[0]) is None
            assert client.get(blocks[2]) is not None
            assert [(each.what, each.result) for each in found.entries()] == [
                ("prefix pin", "OK"),
                ("prefix copy", "OK"),
                ("prefix evict", "OK"),
            ]
            assert not page.complaints


async def test_the_tree_of_prefixes(
    pool: EmbeddedCluster, page: BrowserPage, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with scene(pool, tmp_path, http) as found:
        await signed_in(page, found)
        hot, now_s = found.conductor.service.state.hot, found.conductor.service.state.clock.now_s()
        for name, times in (("a", 3), ("b", 5)):
            for _ in range(times):
                hot.use("m", chain(name, 9, parent="root", shared=2), 9, BLOCK, now_s, ("host-1",), "alice")
        await page.press("5")
        await page.until("document.querySelectorAll('tbody tr:not(.gap)').length === 8")
        cells = "[...document.querySelectorAll('tbody tr:not(.gap)')].map((r) => r.cells[0].textContent)"
        tree = ["block 1", "└ block 2", *["└ blocks 3 to 4", "└ blocks 5 to 8", "└ block 9"] * 2]
        assert await page.value(cells) == tree
        assert not page.complaints
