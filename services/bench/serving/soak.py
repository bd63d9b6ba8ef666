"""Soak: many concurrent streams for minutes: no request may fail, no pin may leak, no process may grow or get slower.

The pool's memory is small, so that it is written over many times. What happens when processes die under load is the
matter of `mooncache chaos run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp

from mooncache.bench.serving.talk import ChatReply, ask
from mooncache.bench.serving.turns import TurnsOptions, cluster_of, demo_key
from mooncache.bench.ssd_pool import disk_counters
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.pins import pins_held
from mooncache.cluster.processes import ServiceKind
from mooncache.cluster.settings import EngineKind
from mooncache.errors import Internal
from mooncache.reporting.rows import Report, Row, bar_row, p99

Progress = Callable[[str], None]
REQUEST_TIMEOUT_S = 120.0
SETTLE_S = 10.0
CAPACITY_BYTES: Final = 256 << 20
"""Of each store node: what the streams put in five minutes is far more than ten times of it."""
OVERCOMMIT_MIN: Final = 10.0
ENV: Final = {
    "MOONCACHE_GATEWAY_REQUEST_TIMEOUT_S": str(REQUEST_TIMEOUT_S),
    # Full long before the middle of a run, so that what grows afterwards is not a cache.
    "MOONCACHE_HF_KV_CACHE_BYTES": str(128 << 20),
}
SoakSamples = dict[str, list[float]]
"""For each process what was seen of it, in the order of time."""


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """How long, and how much at once."""

    engine: EngineKind = EngineKind.HF
    model: str = ""
    streams: int = 64
    seconds: float = 300.0


@dataclass(slots=True)
class Tally:
    """What the streams saw."""

    ok: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    """In the order in which requests ended."""
    tokens: int = 0
    cached: int = 0
    prompt: int = 0

    def add(self, answer: ChatReply) -> None:
        if answer.error:
            self.failures[answer.error[:160]] += 1
            return
        self.ok += 1
        self.ttft_s.append(answer.ttft_s)
        self.tokens += answer.output_tokens
        self.cached += answer.cached_tokens
        self.prompt += answer.prompt_tokens

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


def run(options: SoakOptions, progress: Progress) -> Report:
    """Start a cluster, load it, and report."""
    report = Report(f"soak: {options.streams} streams, engine {options.engine}")
    start = TurnsOptions(engine=options.engine, model=options.model)
    with cluster_of(start, "soak", ENV, 1, capacity_bytes=CAPACITY_BYTES) as cluster:
        asyncio.run(_soak(cluster, options, report, progress))
    return report


async def _soak(cluster: EmbeddedCluster, options: SoakOptions, report: Report, progress: Progress) -> None:
    tally = Tally()
    memory: SoakSamples = {}
    descriptors: SoakSamples = {}

    def sample() -> None:
        for name, pid in pids_of(cluster).items():
            memory.setdefault(name, []).append(tree_private_bytes(pid) / 1e6)
            descriptors.setdefault(name, []).append(float(tree_descriptors(pid)))

    await _load(cluster, options, tally, options.seconds, progress, sample)
    report.rows += tally_rows(tally, options.seconds)
    report.notes += [f"{count} x {text}" for text, count in tally.failures.most_common(5)]
    # The second half is looked at: before, caches and pools fill up.
    report.rows += flat_rows("private memory", memory, "MB")
    report.rows += flat_rows("open descriptors", descriptors, "")
    overcommit = max(await asyncio.to_thread(overcommits, cluster))
    report.add(bar_row("put into a node, over its memory", overcommit, "x", at_least=OVERCOMMIT_MIN))
    await asyncio.sleep(SETTLE_S)
    report.add(bar_row("pins left after the load", await _pins(cluster), "pins", at_most=0))


def tally_rows(tally: Tally, seconds: float) -> list[Row]:
    """What clients saw in all, and whether first tokens came later at the end than in the middle."""
    rows = [
        Row("requests that ended well", float(tally.ok), "requests"),
        bar_row("requests that failed", float(tally.failed), "requests", at_most=0),
        Row("output tokens per second", tally.tokens / seconds, "1/s"),
        Row("ttft, median", statistics.median(tally.ttft_s or [0.0]) * 1e3, "ms"),
        Row("cached share of prompt tokens", tally.cached / max(1, tally.prompt), "of 1"),
    ]
    for name, of in (("median", statistics.median), ("P99", p99)):
        if quarters := middle_and_end(tally.ttft_s):
            middle, end = (of(part) * 1e3 for part in quarters)
            what = f"ttft, {name}, end against middle"
            rows.append(bar_row(what, end, "ms", against="middle", reference=middle, at_most=1.2))
    return rows


def flat_rows(what: str, samples: SoakSamples, unit: str) -> list[Row]:
    """A row for each process: the median of the last eighth of the run may be 1.1 times that of the fifth at most."""
    rows = []
    for name, values in samples.items():
        if quarters := middle_and_end(values):
            early, late = map(statistics.median, quarters)
            text = f"{what} of {name}, end against middle"
            rows.append(bar_row(text, late, unit, against="middle", reference=early, at_most=1.1))
    return rows


def middle_and_end(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]] | None:
    """The first and the last quarter of the second half; None when there are too few values."""
    half = values[len(values) // 2 :]
    count = max(1, len(half) // 4)
    return (half[:count], half[-count:]) if len(half) >= 2 else None


def overcommits(cluster: EmbeddedCluster) -> list[float]:
    """For each store node how many times its memory was put into it: what is there and what was evicted."""
    found = []
    for name, part in cluster.parts.items():
        if part.service == ServiceKind.STORE_NODE:
            count = disk_counters(cluster, name)
            put = count["store_used_bytes"] + count["store_evicted_bytes"]
            found.append(put / count["store_capacity_bytes"])
    return found


async def _load(
    cluster: EmbeddedCluster,
    options: SoakOptions,
    tally: Tally,
    seconds: float,
    progress: Progress,
    sample: Callable[[], None] | None = None,
) -> None:
    """`streams` clients, each with conversations of a few turns, until the time is over."""
    until_s = time.monotonic() + seconds
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        clients = [
            asyncio.create_task(_client(session, cluster, random.Random(number), tally, until_s))
            for number in range(options.streams)
        ]
        while (left_s := until_s - time.monotonic()) > 0:
            progress(
                f"{options.streams} streams, {left_s:.0f} s left: {tally.ok} ended well, {tally.failed} failed"
            )
            if sample is not None:
                sample()
            await asyncio.sleep(min(5.0, left_s))
        await asyncio.gather(*clients)


async def _client(
    session: aiohttp.ClientSession, cluster: EmbeddedCluster, rng: random.Random, tally: Tally, until_s: float
) -> None:
    key = demo_key(cluster)
    while time.monotonic() < until_s:
        messages = [{"role": "system", "content": "Shared words for all chats. " * 20}]
        for _ in range(rng.randrange(1, 4)):
            if time.monotonic() >= until_s:
                return
            words = " ".join(
                rng.choice(["alpha", "beta", "gamma", "delta", "epsilon"])
                for _ in range(rng.randrange(10, 80))
            )
            messages.append({"role": "user", "content": words})
            body = {
                "model": "bench",
                "messages": messages,
                "max_tokens": rng.randrange(4, 24),
                "temperature": 0,
            }
            answer = await ask(session, cluster.layout.gateway_url, key, body, REQUEST_TIMEOUT_S + 30)
            tally.add(answer)
            if answer.error:
                await asyncio.sleep(0.5)  # a client that is refused does not hammer
                break
            messages.append({"role": "assistant", "content": answer.text})


def pids_of(cluster: EmbeddedCluster) -> dict[str, int]:
    """Process ids of the parts."""
    return {name: part.pid for name, part in cluster.parts.items() if part.pid}


def tree_private_bytes(pid: int) -> int:
    """Private resident memory of a process and all below it (an engine is a child of its worker).

    Shared mappings are left out: the pool's memory would count once for each process that has mapped it.
    """
    total = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text()
        total += int(status.split("RssAnon:")[1].split()[0]) << 10
        total += sum(tree_private_bytes(child) for child in children(pid))
    return total


def tree_descriptors(pid: int) -> int:
    """Open descriptors of a process and all below it."""
    total = 0
    with contextlib.suppress(OSError, ValueError):
        total += sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        total += sum(tree_descriptors(child) for child in children(pid))
    return total


def children(pid: int) -> list[int]:
    """Processes that this one started, by any of its threads. Raises OSError when it has ended."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


async def _pins(cluster: EmbeddedCluster) -> float:
    """Pins that nodes hold while no client reads: none may be left. Raises Internal when a node does not say."""
    total = 0
    for name, part in cluster.parts.items():
        if part.service != ServiceKind.STORE_NODE:
            continue
        pins = await pins_held(part.metrics)
        if pins is None:
            raise Internal(f"{name} does not report how many pins it holds.")
        total += pins
    return float(total)
