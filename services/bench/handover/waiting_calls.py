"""One decode leg waits for blocks that are not computed yet: how many calls do nodes and master get meanwhile?

The leg goes straight to the decode engine, with the hint that a gateway would give it, and nothing computes its blocks.
What nodes and master count in that time is compared with what they count in as long a time without a leg. Then the
prefill leg follows, and the decode leg has to give the tokens of the engine that computed them.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.request import urlopen

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from mooncache.auth import engine_key, load_cluster_token
from mooncache.bench.serving.turns import TurnsOptions, cluster_of
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.processes import ServiceKind
from mooncache.cluster.settings import EngineKind
from mooncache.errors import EngineFailed
from mooncache.kvcache.leg_hint import FIELD, LegHint, LegRole
from mooncache.reporting.rows import Row, bar_row

_BAR: Final = 2
_ROUNDS: Final = 5
_WAIT_S: Final = 5.0
_CALL_S: Final = 120.0
_WORDS: Final = 300
_METRICS_ON: Final = {"MOONCACHE_METRICS_ENABLED": "true"}
# What each service counts of its calls, and the label that names them.
_COUNTED: Final = {
    ServiceKind.STORE_NODE: ("mooncache_store_node_requests", "op"),
    ServiceKind.MASTER: ("mooncache_master_rpc_calls", "method"),
}
_LATER_S: Final = 1.7  # each round, by so much more
# A call that comes at intervals may come once more in one of two equal times.
_BEATS: Final = 1

Calls = Mapping[str, int]


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Calls for the sake of the leg, medians of several rounds, for each engine.

    Raises:
        EngineFailed: a leg was not served, did not wait, or gave other tokens.
    """
    rows: list[Row] = []
    for engine in (EngineKind.VLLM, EngineKind.HF):
        progress(f"{engine}: starting two engines")
        with cluster_of(TurnsOptions(engine=engine), f"waiting-{engine}", _METRICS_ON, prefill=1) as cluster:
            found: list[tuple[Calls, Calls]] = []
            for number in range(1 + (1 if quick else _ROUNDS)):
                progress(f"{engine}, round {number}")
                found.append(asyncio.run(_round(cluster, number)))
        idle = most(without for without, _ in found)
        # In the first round the engine connects.
        calls = usual([for_the_leg(idle, waiting) for _, waiting in found[1:]])
        named = ", ".join(f"{name} {count}" for name, count in sorted(calls.items())) or "none"
        rows.append(
            bar_row(
                f"{engine}: calls while a decode leg waits for {_WAIT_S:g} s ({named})",
                float(sum(calls.values())),
                "calls",
                at_most=_BAR,
            )
        )
    return rows


async def _round(cluster: EmbeddedCluster, number: int) -> tuple[Calls, Calls]:
    """The calls of a time without a leg, and of as long a time with a leg that waits."""
    await asyncio.sleep(_LATER_S * number)
    before = await asyncio.to_thread(_calls, cluster)
    await asyncio.sleep(_WAIT_S)
    idle = await asyncio.to_thread(_calls, cluster)
    async with aiohttp.ClientSession() as session:
        urls = {row["role"]: row["url"] for row in await asyncio.to_thread(cluster.describe_instances)}
        node = next(name for name, part in cluster.parts.items() if part.service is ServiceKind.STORE_NODE)
        text = " ".join(f"r{number}w{index}" for index in range(_WORDS))
        wait_ms = int(_CALL_S * 1e3)
        hint = LegHint(LegRole.DECODE, wait_tokens=_WORDS, wait_ms=wait_ms, store_node=node)
        leg = asyncio.ensure_future(_leg(session, cluster, urls["decode"], text, hint))
        await asyncio.sleep(_WAIT_S)
        if leg.done():
            raise EngineFailed(f"The decode leg did not wait: {leg.result()!r}.")
        waited = await asyncio.to_thread(_calls, cluster)
        computed = await _leg(
            session, cluster, urls["prefill"], text, LegHint(LegRole.PREFILL, store_node=node)
        )
        answer = await leg
    if answer != computed:
        raise EngineFailed(f"The decode leg answered {answer!r}, the engine that computed {computed!r}.")
    return _difference(idle, before), _difference(waited, idle)


def most(times: Iterable[Calls]) -> Calls:
    """Of each kind of call the most that came in one of these times."""
    found: dict[str, int] = {}
    for calls in times:
        for name, count in calls.items():
            found[name] = max(found.get(name, 0), count)
    return found


def for_the_leg(idle: Calls, waiting: Calls) -> Calls:
    """Calls of a time with a leg that an equally long time without one did not have."""
    own = {name: count - idle.get(name, 0) for name, count in waiting.items()}
    return {name: count for name, count in own.items() if count > (_BEATS if name in idle else 0)}


def usual(rounds: Sequence[Calls]) -> Calls:
    """The median of each kind of call. A leg's own calls are in every round; others fall into one time or the other."""
    names = {name for calls in rounds for name in calls}
    medians = {name: int(statistics.median(calls.get(name, 0) for calls in rounds)) for name in names}
    return {name: count for name, count in medians.items() if count}


def _difference(after: Calls, before: Calls) -> Calls:
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}


def _calls(cluster: EmbeddedCluster) -> Calls:
    """What nodes and masters have counted so far, by kind of call."""
    found: Counter[str] = Counter()
    for part in cluster.parts.values():
        if part.service not in _COUNTED:
            continue
        family, label = _COUNTED[part.service]
        with urlopen(f"http://{part.metrics}/metrics", timeout=_CALL_S) as answer:
            page = answer.read().decode()
        for metric in text_string_to_metric_families(page):
            if metric.name == family:
                for sample in metric.samples:
                    if sample.name == f"{family}_total":
                        found[f"{part.service} {sample.labels[label]}"] += int(sample.value)
    return found


async def _leg(
    session: aiohttp.ClientSession, cluster: EmbeddedCluster, url: str, text: str, hint: LegHint
) -> str:
    """The answer of one engine."""
    body: dict[str, Any] = {
        "model": "bench",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "temperature": 0,
        FIELD: hint.to_params(),
    }
    headers = {"Authorization": f"Bearer {engine_key(load_cluster_token(cluster.token_path))}"}
    timeout = aiohttp.ClientTimeout(total=_CALL_S)
    async with session.post(
        f"{url}/v1/chat/completions", json=body, headers=headers, timeout=timeout
    ) as response:
        if response.status != 200:
            raise EngineFailed(f"An engine answered HTTP {response.status}: {(await response.text())[:300]}")
        answer: dict[str, Any] = await response.json()
    return str(answer["choices"][0]["message"]["content"])
