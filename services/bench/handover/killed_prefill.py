"""A decode leg waits for blocks, and the engine that computes them is killed: when does it compute them itself?

Measured from the signal to the end of the wait, on the request's own time line.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Final

import aiohttp

from mooncache.bench.serving.decisions import cache_reports, decision_of
from mooncache.bench.serving.talk import ask
from mooncache.bench.serving.turns import HANDED_OVER, TurnsOptions, cluster_of, demo_key
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.settings import EngineKind
from mooncache.errors import EngineFailed
from mooncache.reporting.rows import Row, bar_row

_BAR_S: Final = 0.3
_START_S: Final = 300.0
_CALL_S: Final = 120.0
_WORDS: Final = 4000
_ROUNDS: Final = 5
# A part of what prefill takes with so long a prompt: it has begun, and is far from its end.
_KILL_AFTER_S: Final = 0.5
_SETTLE_S: Final = 0.3


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """The slowest of several rounds.

    Raises:
        EngineFailed: a request was not served.
    """
    progress("starting two engines")
    options = TurnsOptions(engine=EngineKind.HF, start_timeout_s=_START_S)
    with cluster_of(options, "killed", HANDED_OVER, prefill=1) as cluster:
        rounds = 1 if quick else _ROUNDS
        found = []
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            found.append(asyncio.run(_killed(cluster, number)))
            cluster.wait_ready(_START_S)
    waits_s = [wait_s for wait_s in found if wait_s is not None]
    if not waits_s:
        raise EngineFailed("Prefill had ended in every round before it was killed.")
    return [
        bar_row("prefill killed: until a waiting decode leg computes", max(waits_s), "s", at_most=_BAR_S),
        Row("rounds in which decode waited when prefill was killed", float(len(waits_s)), ""),
    ]


async def _killed(cluster: EmbeddedCluster, number: int) -> float | None:
    """Seconds from the signal until decode no longer waits; None when it did not wait at that moment."""
    body: dict[str, Any] = {
        "model": "bench",
        "max_tokens": 4,
        "temperature": 0,
        "messages": [
            {"role": "user", "content": " ".join(f"r{number}w{index}" for index in range(_WORDS // 4))}
        ],
    }
    pids = {row["role"]: row["engine_pid"] for row in await asyncio.to_thread(cluster.describe_instances)}
    async with aiohttp.ClientSession() as session:
        sent_s = time.perf_counter()
        call = asyncio.ensure_future(
            ask(session, cluster.layout.gateway_url, demo_key(cluster), body, _CALL_S)
        )
        await asyncio.sleep(_KILL_AFTER_S)
        os.kill(pids["prefill"], signal.SIGKILL)
        killed_s = time.perf_counter() - sent_s
        reply = await call
    if reply.error:
        raise EngineFailed(f"A request failed: {reply.error}")
    await asyncio.sleep(_SETTLE_S)  # the last report of a request follows its answer
    record = await decision_of(cluster, reply.decision)
    cache = cache_reports(record).get("decode")
    sent_ms = next(
        leg["sent_ms"] for event in record["events"] for leg in event["legs"] if leg["leg"] == "decode"
    )
    if cache is None or not cache["waited_ms"]:
        return None
    waited_until_s = (sent_ms + cache["waited_ms"]) / 1e3
    return waited_until_s - killed_s if waited_until_s > killed_s else None
