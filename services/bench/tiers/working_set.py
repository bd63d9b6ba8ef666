"""A working set of twice the memory of the pool: time to the first token with a disk below it over without.

Two clusters with one small engine each run at the same time, one with a tier. Both get the same prompts in the same
order, one after the other: a few documents, chosen at random, whose KV is together twice what the pool has in memory.
The engine's own cache holds four of them. The answers of both have to be the same tokens.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, quantiles
from typing import Final

import aiohttp

from mooncache import tiny_model
from mooncache.bench.serving.talk import ChatReply, ask
from mooncache.bench.serving.turns import demo_key
from mooncache.bench.ssd_pool import disk_counters
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.settings import EngineKind
from mooncache.errors import EngineFailed
from mooncache.reporting.rows import Row, bar_row

_MEAN: Final = 0.6
_P99: Final = 1.0
_START_S: Final = 300.0
_CALL_S: Final = 120.0
_LAYERS, _HIDDEN = 8, 512  # of fp32, every head with KV of its own: 32 KiB for each token
_TOKEN_BYTES: Final = 2 * _LAYERS * _HIDDEN * 4
_DOCUMENT_TOKENS: Final = 1000
_DOCUMENT_LINES: Final = 257  # make so many tokens
_DOCUMENTS: Final = 16
_OWN_DOCUMENTS: Final = 4  # in the engine's own cache, a quarter of which may wait to be saved
_PAUSE_S: Final = 0.05  # a save follows its answer
_SEED: Final = 7


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Mean and P99 of both, and how much of the prompts was not computed.

    Raises:
        EngineFailed: a request was not served, or the two clusters answered with other tokens.
    """
    requests = 24 if quick else 120
    with tempfile.TemporaryDirectory(prefix="mooncache-bench-model-") as folder, ExitStack() as stack:
        progress("a model")
        model = tiny_model.build(Path(folder) / "model", layers=_LAYERS, hidden=_HIDDEN, heads=8, kv_heads=8)
        clusters = {}
        for name, on in (("memory alone", False), ("memory and a disk", True)):
            progress(f"{name}: starting an engine")
            clusters[name] = stack.enter_context(_cluster(str(model), on))
        found = asyncio.run(_ask_both(clusters, requests, progress))
        read = disk_counters(clusters["memory and a disk"])["ssd_reads"]
    return _rows(found, read)


@contextmanager
def _cluster(model: str, on: bool) -> Iterator[EmbeddedCluster]:
    working_set = _DOCUMENTS * _DOCUMENT_TOKENS * _TOKEN_BYTES
    with tempfile.TemporaryDirectory(prefix="mooncache-bench-tiers-") as folder:
        settings = ClusterSettings(
            state_dir=Path(folder),
            engine=EngineKind.HF,
            model=model,
            model_name="bench",
            prefill=0,
            decode=1,
            nodes=1,
            capacity_bytes=working_set // 2,
            ssd_bytes=on * 4 * working_set,
            port=0,
            conductor_port=0,
            gateway_port=0,
            extra_env=(
                ("MOONCACHE_CONDUCTOR_ADMISSION_ENABLED", "false"),
                ("MOONCACHE_HF_KV_CACHE_BYTES", str(_OWN_DOCUMENTS * _DOCUMENT_TOKENS * _TOKEN_BYTES)),
                ("OMP_NUM_THREADS", "1"),
            ),
        )
        cluster = EmbeddedCluster(settings)
        cluster.start(_START_S)
        try:
            yield cluster
        finally:
            cluster.stop()


async def _ask_both(
    clusters: dict[str, EmbeddedCluster], requests: int, progress: Callable[[str], None]
) -> dict[str, list[ChatReply]]:
    """The replies of each cluster; the documents' first time is not among them."""
    chosen = random.Random(_SEED)
    order = [*range(_DOCUMENTS), *(chosen.randrange(_DOCUMENTS) for _ in range(requests))]
    found: dict[str, list[ChatReply]] = {name: [] for name in clusters}
    async with aiohttp.ClientSession() as session:
        for at, document in enumerate(order):
            progress(f"request {at + 1} of {len(order)}")
            texts = set()
            for name, cluster in clusters.items():
                reply = await ask(
                    session, cluster.layout.gateway_url, demo_key(cluster), _body(document), _CALL_S
                )
                if reply.error:
                    raise EngineFailed(f"A request failed: {reply.error}")
                texts.add(reply.text)
                if at >= _DOCUMENTS:
                    found[name].append(reply)
                await asyncio.sleep(_PAUSE_S)
            if len(texts) > 1:
                raise EngineFailed(f"Document {document} was answered in {len(texts)} ways: {sorted(texts)}.")
    return found


def _body(document: int) -> dict[str, object]:
    words = " ".join(f"page {document} {line}" for line in range(_DOCUMENT_LINES))
    return {
        "model": "bench",
        "messages": [{"role": "user", "content": words}],
        "max_tokens": 2,
        "temperature": 0,
    }


@dataclass(frozen=True, slots=True)
class _Times:
    mean_ms: float
    p99_ms: float
    cached: float

    @classmethod
    def of(cls, replies: list[ChatReply]) -> _Times:
        times = [reply.ttft_s * 1e3 for reply in replies]
        cached = sum(reply.cached_tokens for reply in replies) / sum(reply.prompt_tokens for reply in replies)
        return cls(fmean(times), quantiles(times, n=100)[-1], cached)


def _rows(found: dict[str, list[ChatReply]], disk_reads: float) -> list[Row]:
    (without_name, without), (with_name, with_disk) = (
        (name, _Times.of(replies)) for name, replies in found.items()
    )
    tokens = next(iter(found.values()))[0].prompt_tokens
    title = f"{_DOCUMENTS} documents of {tokens} tokens, twice the memory: TTFT"
    return [
        Row(f"{title}, mean, {without_name}", without.mean_ms, "ms"),
        bar_row(
            f"{title}, mean, {with_name}",
            with_disk.mean_ms,
            "ms",
            against=without_name,
            reference=without.mean_ms,
            at_most=_MEAN,
        ),
        Row(f"{title}, P99, {without_name}", without.p99_ms, "ms"),
        bar_row(
            f"{title}, P99, {with_name}",
            with_disk.p99_ms,
            "ms",
            against=without_name,
            reference=without.p99_ms,
            at_most=_P99,
        ),
        Row(f"share of the prompts that was not computed, {without_name}", without.cached, "of 1"),
        Row(f"share of the prompts that was not computed, {with_name}", with_disk.cached, "of 1"),
        Row("blocks that came up from the disk", disk_reads, ""),
    ]
