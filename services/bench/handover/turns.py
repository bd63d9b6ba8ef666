"""The last of eight turns, vLLM: time to the first token with the pool, with the engine's own cache, and with nothing.

Prefill and decode are apart where the pool is; the others are one engine that does everything. All three clusters run
at the same time and have the same conversations in turn, with the same answers.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

import aiohttp

from mooncache.bench.serving.talk import ChatReply
from mooncache.bench.serving.turns import (
    NO_POOL,
    TURNS,
    VLLM_CACHE_OFF,
    TurnsOptions,
    cluster_of,
    conversation,
)
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.settings import EngineKind
from mooncache.errors import EngineFailed
from mooncache.reporting.rows import Row, bar_row

_NOTHING: Final = "no cache"
_OWN: Final = "the engine's own cache"
_POOL: Final = "the pool"
_OVER_NOTHING: Final = 0.3
_OVER_OWN: Final = 1.4
_TALKS: Final = 5


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """The last turn of each, the pool over the others, and how much of its prompt was not computed.

    Raises:
        EngineFailed: two clusters answered with other tokens.
    """
    options = TurnsOptions(engine=EngineKind.VLLM, talks=1 if quick else _TALKS)
    kinds = {_NOTHING: {**NO_POOL, **VLLM_CACHE_OFF}, _OWN: NO_POOL, _POOL: {}}
    with ExitStack() as stack:
        clusters = {}
        for number, (name, env) in enumerate(kinds.items()):
            progress(f"{name}: starting")
            prefill = int(name == _POOL)
            clusters[name] = stack.enter_context(cluster_of(options, f"turns-{number}", env, prefill))
        return _rows(asyncio.run(_conversations(clusters, options, progress)))


async def _conversations(
    clusters: dict[str, EmbeddedCluster], options: TurnsOptions, progress: Callable[[str], None]
) -> dict[str, list[list[ChatReply]]]:
    """For each cluster its conversations but the first, which warms up."""
    found: dict[str, list[list[ChatReply]]] = {name: [] for name in clusters}
    async with aiohttp.ClientSession() as session:
        for talk in range(options.talks + 1):
            texts = set()
            for name, cluster in clusters.items():
                progress(f"conversation {talk} of {options.talks}, {name}")
                answers = await conversation(session, cluster, options, talk)
                texts.add(tuple(answer.text for answer in answers))
                found[name].append(answers)
            if len(texts) > 1:
                raise EngineFailed(f"Conversation {talk} was answered in {len(texts)} ways: {sorted(texts)}.")
    return {name: talks[1:] for name, talks in found.items()}


def _rows(found: dict[str, list[list[ChatReply]]]) -> list[Row]:
    last_ms = {
        name: statistics.median(talk[-1].ttft_s for talk in talks) * 1e3 for name, talks in found.items()
    }
    pool = [talk[-1] for talk in found[_POOL]]
    title = f"turn {TURNS} of {TURNS}, {pool[0].prompt_tokens} prompt tokens: TTFT"
    share = statistics.median(reply.cached_tokens / reply.prompt_tokens for reply in pool)
    bars = {_NOTHING: _OVER_NOTHING, _OWN: _OVER_OWN}
    return [
        *(Row(f"{title}, {name}", last_ms[name], "ms") for name in bars),
        *(
            bar_row(
                f"{title}, {_POOL} over {name}",
                last_ms[_POOL],
                "ms",
                against=name,
                reference=last_ms[name],
                at_most=bar,
            )
            for name, bar in bars.items()
        ),
        Row("share of that prompt that the pool's cluster did not compute", share, "of 1"),
    ]
