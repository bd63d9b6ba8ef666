"""The load flips from long prompts to long answers: goodput with roles that follow it over fixed roles.

Three small engines, one for prompts and two for answers. First come more long prompts than one engine can compute, then
short prompts with long answers. Both clusters get the same requests at the same times; a request counts when all of its
tokens came within what is promised. Rates and promises are set from what one engine of this machine does.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from mooncache.bench.serving.talk import ChatReply, ask
from mooncache.bench.serving.turns import TurnsOptions, cluster_of, demo_key
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.settings import EngineKind
from mooncache.errors import EngineFailed
from mooncache.reporting.rows import Row, bar_row

_BAR: Final = 1.15
_START_S: Final = 300.0
_CALL_S: Final = 120.0
_AT_ONCE: Final = 16
_PROMPT_WORDS: Final = 900
_ANSWER_TOKENS: Final = 200
# Of what one engine computes: more than one can do, less than two.
_LOAD: Final = 1.4
# In times of what a prompt takes alone: enough for a short queue.
_TTFT_TIMES: Final = 10.0
_TBT_S: Final = 0.5
# Roles change at the second plan, and not back within two minutes.
_PHASE_S: Final = 150.0
_QUICK_PHASE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """How requests come, and what is promised."""

    prompt_every_s: float
    answer_every_s: float
    ttft_s: float


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Goodput of both clusters, and the requests that were lost.

    Raises:
        EngineFailed: a request of the calibration was not served.
    """
    phase_s = _QUICK_PHASE_S if quick else _PHASE_S
    pace: _Arrivals | None = None
    replies: dict[bool, tuple[list[ChatReply], list[ChatReply]]] = {}
    for follow in (False, True):
        name = "roles follow the load" if follow else "fixed roles"
        progress(f"{name}: starting three engines")
        env = {
            "MOONCACHE_CONDUCTOR_REBALANCE_ROLES": str(follow).lower(),
            "OMP_NUM_THREADS": "1",
        }
        options = TurnsOptions(engine=EngineKind.HF, start_timeout_s=_START_S)
        with cluster_of(options, "roles", env, prefill=1, decode=2) as cluster:
            if pace is None:
                progress("what one engine does")
                pace = asyncio.run(_calibrated(cluster))
            progress(f"{name}: {2 * phase_s:.0f} s of requests")
            replies[follow] = asyncio.run(_phases(cluster, pace, phase_s))
    assert pace is not None, "the first cluster set it"
    return _rows(replies, pace, phase_s)


def _rows(
    replies: dict[bool, tuple[list[ChatReply], list[ChatReply]]], pace: _Arrivals, phase_s: float
) -> list[Row]:
    good = {
        follow: [sum(_kept(reply, pace) for reply in phase) / phase_s for phase in phases]
        for follow, phases in replies.items()
    }
    lost = sum(bool(reply.error) for phases in replies.values() for phase in phases for reply in phase)
    fixed, following = sum(good[False]) / 2, sum(good[True]) / 2
    return [
        Row("long prompts that come", 1 / pace.prompt_every_s, "1/s"),
        Row("long answers that come", 1 / pace.answer_every_s, "1/s"),
        Row("goodput, fixed roles, long prompts", good[False][0], "1/s"),
        Row("goodput, fixed roles, long answers", good[False][1], "1/s"),
        Row("goodput, roles follow the load, long prompts", good[True][0], "1/s"),
        Row("goodput, roles follow the load, long answers", good[True][1], "1/s"),
        Row("goodput, fixed roles", fixed, "1/s"),
        bar_row(
            "goodput, roles follow the load",
            following,
            "1/s",
            against="goodput, fixed roles",
            reference=fixed,
            at_least=_BAR,
        ),
        bar_row("requests lost", float(lost), "", at_most=0.0),
    ]


def _kept(reply: ChatReply, pace: _Arrivals) -> bool:
    if reply.error or reply.ttft_s > pace.ttft_s:
        return False
    return not reply.gaps_s or statistics.fmean(reply.gaps_s) <= _TBT_S


def _prompt(name: str) -> dict[str, Any]:
    words = " ".join(f"{name} {number}" for number in range(_PROMPT_WORDS // 2))
    return {"model": "bench", "max_tokens": 2, "messages": [{"role": "user", "content": words}]}


def _answer(name: str) -> dict[str, Any]:
    text = f"Tell {name} a long story."
    return {
        "model": "bench",
        "max_tokens": _ANSWER_TOKENS,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": text}],
    }


async def _calibrated(cluster: EmbeddedCluster) -> _Arrivals:
    """Rates and promises for this machine."""
    key = demo_key(cluster)
    async with aiohttp.ClientSession() as session:
        alone = await _served(session, cluster, key, _prompt("alone"))
        alone = await _served(session, cluster, key, _prompt("alone again"))
        prompt_s = await _each_s(session, cluster, key, _prompt)
        answer_s = await _each_s(session, cluster, key, _answer)
    # One engine computes prompts, two make answers.
    return _Arrivals(prompt_s / _LOAD, 2 * answer_s / _LOAD, _TTFT_TIMES * alone.ttft_s)


async def _each_s(
    session: aiohttp.ClientSession,
    cluster: EmbeddedCluster,
    key: str,
    make: Callable[[str], dict[str, Any]],
) -> float:
    """Seconds for one of many that come at once: what the engines can do, not how long one takes."""
    began_s = time.perf_counter()
    bodies = [make(f"calibrate{number}") for number in range(_AT_ONCE)]
    await asyncio.gather(*(_served(session, cluster, key, body) for body in bodies))
    return (time.perf_counter() - began_s) / _AT_ONCE


async def _served(
    session: aiohttp.ClientSession, cluster: EmbeddedCluster, key: str, body: dict[str, Any]
) -> ChatReply:
    reply = await ask(session, cluster.layout.gateway_url, key, body, _CALL_S)
    if reply.error:
        raise EngineFailed(f"A request failed: {reply.error}")
    return reply


async def _phases(
    cluster: EmbeddedCluster, pace: _Arrivals, phase_s: float
) -> tuple[list[ChatReply], list[ChatReply]]:
    key = demo_key(cluster)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def phase(bodies: Sequence[dict[str, Any]], every_s: float) -> list[ChatReply]:
            calls = []
            began_s = time.perf_counter()
            for number, body in enumerate(bodies):
                await asyncio.sleep(max(0.0, began_s + number * every_s - time.perf_counter()))
                url = cluster.layout.gateway_url
                calls.append(asyncio.ensure_future(ask(session, url, key, body, _CALL_S)))
            return await asyncio.gather(*calls)

        prompts = [_prompt(f"word{number}") for number in range(int(phase_s / pace.prompt_every_s))]
        first = await phase(prompts, pace.prompt_every_s)
        answers = [_answer(f"reader {number}") for number in range(int(phase_s / pace.answer_every_s))]
        return first, await phase(answers, pace.answer_every_s)
