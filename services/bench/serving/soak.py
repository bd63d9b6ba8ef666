"""Soak: many concurrent streams for minutes: no request may fail, no pin may leak and no process may grow.

What happens when processes die under load is the matter of `mooncache chaos run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from mooncache.bench.serving.talk import ChatReply, ask
from mooncache.bench.serving.turns import TurnsOptions, cluster_of, demo_key
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.pins import pins_held
from mooncache.cluster.processes import ServiceKind
from mooncache.cluster.settings import EngineKind
from mooncache.errors import Internal
from mooncache.reporting.rows import Report, Row, bar_row

Progress = Callable[[str], None]
REQUEST_TIMEOUT_S = 120.0
SETTLE_S = 10.0


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
    env = {
        "MOONCACHE_GATEWAY_REQUEST_TIMEOUT_S": str(REQUEST_TIMEOUT_S),
        # Bounds that are reached within the first half of the run, so that what grows afterwards is not a cache.
        "MOONCACHE_HF_KV_CACHE_BYTES": str(128 << 20),
        "MOONCACHE_CONDUCTOR_DECISION_COUNT_MAX": "1000",
        "MOONCACHE_CONDUCTOR_SEEN_BLOCK_COUNT_MAX": "5000",
    }
    with cluster_of(start, "soak", env, 1) as cluster:
        asyncio.run(_soak(cluster, options, report, progress))
    return report


async def _soak(cluster: EmbeddedCluster, options: SoakOptions, report: Report, progress: Progress) -> None:
    quiet = Tally()
    resident: dict[str, list[int]] = {}

    def sample() -> None:
        for name, pid in pids_of(cluster).items():
            resident.setdefault(name, []).append(tree_private_bytes(pid))

    # Memory is looked at from the second minute on (or the second half): before, caches and pools fill up.
    await _load(cluster, options, quiet, options.seconds, progress, sample)
    _quiet_rows(report, quiet, resident, options)
    await asyncio.sleep(SETTLE_S)
    report.add(bar_row("pins left after the load", await _pins(cluster), "pins", at_most=0))


def _quiet_rows(report: Report, tally: Tally, resident: dict[str, list[int]], options: SoakOptions) -> None:
    report.add(Row("requests that ended well", float(tally.ok), "requests"))
    report.add(bar_row("requests that failed", float(tally.failed), "requests", at_most=0))
    report.add(Row("output tokens per second", tally.tokens / options.seconds, "1/s"))
    report.add(Row("ttft, median", statistics.median(tally.ttft_s or [0.0]) * 1e3, "ms"))
    report.add(Row("cached share of prompt tokens", tally.cached / max(1, tally.prompt), "of 1"))
    report.notes += [f"{count} x {text}" for text, count in tally.failures.most_common(5)]
    for name, samples in resident.items():
        half = samples[len(samples) // 2 :]
        if len(half) >= 2:
            early = statistics.median(half[: max(1, len(half) // 4)])
            late = statistics.median(half[-max(1, len(half) // 4) :])
            report.add(
                bar_row(
                    f"private memory of {name}, end against middle",
                    late / 1e6,
                    "MB",
                    against="middle",
                    reference=early / 1e6,
                    at_most=1.1,
                )
            )


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
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                total += tree_private_bytes(int(child))
    return total


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
