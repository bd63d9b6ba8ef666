"""Requests whose decode engine is stopped (SIGSTOP) before their first token: how long until another engine answers?

Two engines that do everything, one of them stopped, and requests sent at once: about half of them go to the stopped
one, because the stop is not noticed yet. Each has to be answered by the other one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
from collections.abc import Callable
from typing import Final

import aiohttp

from mooncache.bench.serving.talk import ChatReply, ask
from mooncache.bench.serving.turns import TurnsOptions, cluster_of, demo_key
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.settings import EngineKind
from mooncache.errors import EngineFailed
from mooncache.reporting.rows import Row, bar_row

_REQUESTS: Final = 8
_BAR_S: Final = 3.0
_START_S: Final = 300.0
_CALL_S: Final = 60.0
# The worker has asked the engine again, and all parts have heard.
_RECOVER_S: Final = 3.0


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Two rows: the first token while all is well, and the slowest one beside a stopped engine.

    Raises:
        EngineFailed: a request was not served.
    """
    progress("starting two engines")
    options = TurnsOptions(engine=EngineKind.HF, start_timeout_s=_START_S)
    with cluster_of(options, "stopped", {}, prefill=0, decode=2) as cluster:
        pids = [row["engine_pid"] for row in cluster.describe_instances()]
        return asyncio.run(_rows(cluster, pids, 1 if quick else 5, progress))


async def _rows(
    cluster: EmbeddedCluster, pids: list[int], rounds: int, progress: Callable[[str], None]
) -> list[Row]:
    well_s: list[float] = []
    slowest_s: list[float] = []
    key = demo_key(cluster)
    async with aiohttp.ClientSession() as session:
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            await _served(session, cluster, key, f"warm up {number}")
            well_s += [answer.ttft_s for answer in await _served(session, cluster, key, f"all well {number}")]
            os.kill(pids[number % 2], signal.SIGSTOP)
            try:
                answers = await _served(session, cluster, key, f"one stopped {number}")
            finally:
                os.kill(pids[number % 2], signal.SIGCONT)
            slowest_s.append(max(answer.ttft_s for answer in answers))
            await asyncio.sleep(_RECOVER_S)
    return [
        Row("first token, all engines well", statistics.median(well_s), "s"),
        bar_row(
            "first token of the slowest request, one of two engines stopped",
            max(slowest_s),
            "s",
            at_most=_BAR_S,
        ),
    ]


async def _served(
    session: aiohttp.ClientSession, cluster: EmbeddedCluster, key: str, text: str
) -> list[ChatReply]:
    """Several requests at once. Raises EngineFailed when one is not answered."""
    bodies = [
        {"model": "bench", "max_tokens": 4, "messages": [{"role": "user", "content": f"{text}, {number}"}]}
        for number in range(_REQUESTS)
    ]
    calls = [ask(session, cluster.layout.gateway_url, key, body, _CALL_S) for body in bodies]
    answers = await asyncio.gather(*calls)
    for answer in answers:
        if answer.error:
            raise EngineFailed(f"A request failed: {answer.error}")
    return answers
