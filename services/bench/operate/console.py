"""The console: how soon a page is seen, whether a long list moves smoothly, what many open pages cost the gateway.

The browser is a real Chromium without a window and without a GPU, so it draws with this machine's processors.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp

from mooncache.bench.gateway.stack import Stack, start_stack
from mooncache.bench.operate.browser import BrowserPage, browsing, find_browser
from mooncache.bench.worker import WorkerError, processor_s, resident_bytes
from mooncache.client.conductor_link import ConductorLink
from mooncache.config import load
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.reporting.rows import Report, bar_row, p99

if TYPE_CHECKING:
    from mooncache.bench.operate.options import OperateBenchOptions

_PAINT_MS: Final = 300.0
_FRAMES_PER_S: Final = 60.0
_VIEWERS_BYTES: Final = 50 * 1000 * 1000
_EVENTS: Final = 3  # that each viewer takes before memory is looked at
_LIMIT_S: Final = 120.0
_REGISTERING: Final = 16  # calls at the same time
_BLOCKS: Final = """
import("/console/static/table.js").then(async ({ table }) => {
  const { el, put } = await import("/console/static/dom.js");
  const { bytes, count } = await import("/console/static/format.js");
  const list = table({
    label: "Blocks", noun: ["block", "blocks"], empty: "", key: (row) => row.id,
    columns: [
      { name: "block", value: (row) => row.id, cell: (row) => el("code", null, row.id) },
      { name: "node", value: (row) => row.node },
      { name: "tier", value: (row) => row.tier, cell: (row) => el("span", { class: "tier dram" }, row.tier) },
      { name: "size", number: true, value: (row) => row.size, cell: (row) => bytes(row.size) },
      { name: "reads", number: true, value: (row) => row.reads, cell: (row) => count(row.reads) },
    ],
  });
  put(document.querySelector("main"), list.node);
  list.show(Array.from({ length: %d }, (_, at) => ({
    id: at.toString(16).padStart(16, "0"), node: `node-${at %% 7}`, tier: "DRAM", size: 1 << 20, reads: at %% 1000,
  })));
  return document.querySelector(".bar [role=status]").textContent;
})
"""
_SCROLL: Final = """
new Promise((done) => {
  const list = document.querySelector(".scroll.tall");
  const times = [];
  let last = performance.now();
  const end = last + %f;
  function step(now) {
    times.push(now - last);
    last = now;
    list.scrollTop = (list.scrollTop + 170) %% (list.scrollHeight - list.clientHeight);
    if (now < end) requestAnimationFrame(step);
    else done(times.slice(1));
  }
  requestAnimationFrame(step);
})
"""


def rows(report: Report, options: OperateBenchOptions, progress: Callable[[str], None]) -> None:
    """Measure, and add the rows. Without Chromium only those of the gateway. Raises WorkerError, MooncacheError."""
    progress("starting conductor and gateway for the console")
    program = find_browser()
    with start_stack() as stack:
        if program is None:
            progress("there is no Chromium (Debian package chromium): its rows are left out")
        else:
            asyncio.run(_browser_rows(program, stack, report, options, progress))
        asyncio.run(_viewer_rows(stack, report, options, progress))


async def _browser_rows(
    program: str, stack: Stack, report: Report, options: OperateBenchOptions, progress: Callable[[str], None]
) -> None:
    url = f"http://127.0.0.1:{stack.gateway.port}/console"
    progress(f"registering {options.console_rows} instances")
    await _register(stack, options.console_rows)
    with tempfile.TemporaryDirectory(prefix="mooncache-bench-", ignore_cleanup_errors=True) as folder:
        async with aiohttp.ClientSession() as http, browsing(program, Path(folder), http) as page:
            await _open(page, url)
            await page.until("document.activeElement?.id === 'key'")
            await page.type(stack.token.text)
            await page.press("Enter")
            await page.until("!document.querySelector('#nav').hidden")
            # This comes first, because instances that do not report are forgotten.
            progress(f"scrolling through {options.console_rows} rows")
            await _open(page, f"{url}#/instances")
            count = f"{options.console_rows:,}"
            await page.until(
                f"document.querySelector('.bar [role=status]')?.textContent.startsWith('{count}')"
            )
            frames: list[float] = await page.value(_SCROLL % (options.console_scroll_s * 1e3))
            progress(f"scrolling through {options.console_blocks} blocks")
            await _open(page, f"{url}#/configuration")  # a page without events
            await page.until("document.querySelector('tbody td') !== null")
            said = await page.value(_BLOCKS % options.console_blocks)
            if said != f"{options.console_blocks:,} blocks":
                raise WorkerError(f"the list of blocks shows {said!r}")
            blocks: list[float] = await page.value(_SCROLL % (options.console_scroll_s * 1e3))
            progress("first paint")
            paints = [await _first_paint(page, f"{url}#/overview") for _ in range(options.console_paints)]
    report.add(
        bar_row("console: first paint, median", statistics.median(paints), "ms", at_most=_PAINT_MS),
        bar_row(
            f"console: frames, list of {options.console_rows} rows",
            1e3 * len(frames) / sum(frames),
            "1/s",
            at_least=0.98 * _FRAMES_PER_S,  # a display's 60 Hz is a little less
        ),
        bar_row("console: slowest of 100 frames", p99(frames), "ms"),
        bar_row(
            f"console: frames, list of {options.console_blocks} blocks",
            1e3 * len(blocks) / sum(blocks),
            "1/s",
            at_least=0.98 * _FRAMES_PER_S,
        ),
        bar_row("console: slowest of 100 frames, blocks", p99(blocks), "ms"),
    )


async def _register(stack: Stack, count: int) -> None:
    """Instances that differ by name alone, beyond those that serve."""
    link = ConductorLink(stack.conductor_target, stack.token.text, load(env={}), listen=False)
    room = asyncio.Semaphore(_REGISTERING)
    first = stack.instances[0]

    async def one(number: int) -> None:
        instance = pb.Instance()
        instance.CopyFrom(first)
        instance.instance_id = f"row-{number:05}"
        async with room:
            request = pb.RegisterInstanceRequest(instance=instance)
            await link.call("RegisterInstance", request, pb.RegisterInstanceResponse, _LIMIT_S)

    try:
        await asyncio.gather(*(one(number) for number in range(count - len(stack.instances))))
    finally:
        await link.close()


async def _open(page: BrowserPage, url: str) -> None:
    """Load the page anew: another fragment alone would not."""
    await page.call("Page.navigate", url="about:blank")
    await page.until("location.href === 'about:blank'")
    await page.call("Page.navigate", url=url)
    await page.until("document.readyState === 'complete'")


async def _first_paint(page: BrowserPage, url: str) -> float:
    await _open(page, url)
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
    return float(await page.until(paint))


async def _viewer_rows(
    stack: Stack, report: Report, options: OperateBenchOptions, progress: Callable[[str], None]
) -> None:
    """Pages of one gateway, as the streams that they are, spread over all topics."""
    progress(f"{options.console_viewers} open pages")
    topics = ("overview", "requests", "pool", "instances")
    headers = {"authorization": f"Bearer {stack.token.text}"}
    url = f"http://127.0.0.1:{stack.gateway.port}/console/live"
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(headers=headers, connector=connector) as http,
        contextlib.AsyncExitStack() as open_,
    ):
        first = await open_.enter_async_context(http.get(url, params={"topic": topics[0]}))
        await _events(first, _EVENTS)
        before = resident_bytes(stack.gateway_pid)
        pages = [
            await open_.enter_async_context(http.get(url, params={"topic": topics[number % len(topics)]}))
            for number in range(options.console_viewers)
        ]
        begun_s, used_s = time.perf_counter(), processor_s(stack.gateway_pid)
        await asyncio.gather(*(_events(page, _EVENTS) for page in pages))
        used_s, took_s = processor_s(stack.gateway_pid) - used_s, time.perf_counter() - begun_s
        grown = resident_bytes(stack.gateway_pid) - before
    name = f"console: memory for {options.console_viewers} open pages"
    report.add(
        bar_row(name, grown / 1e6, "MB", at_most=_VIEWERS_BYTES / 1e6),
        bar_row("console: processor of the gateway meanwhile", 100.0 * used_s / took_s, "%"),
    )


async def _events(page: aiohttp.ClientResponse, count: int) -> None:
    """Read so many events. Raises WorkerError."""
    if page.status != 200:
        raise WorkerError(f"a page of the console was refused: {page.status} {(await page.text())[:200]}")
    try:
        async with asyncio.timeout(_LIMIT_S):
            async for line in page.content:
                count -= line.startswith(b"data: ")
                if not count:
                    return
    except TimeoutError:
        raise WorkerError(f"no event of the console within {_LIMIT_S:g} s") from None
    raise WorkerError("the console ended a stream")
