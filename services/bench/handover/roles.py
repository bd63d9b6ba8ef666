"""The load flips from long prompts to long answers, and back: goodput with roles that follow it over fixed roles.

Three small engines, one thread each, so that one of them is one processor's work; two for prompts and one for answers,
which is right for the load that comes first. Long prompts come for a while, as many as two engines compute in 0.7 of
their time, then short prompts with long answers that need two engines as well. An engine has few places, so answers
that find none wait. Both clusters get the same requests at the same times; a request counts when its first token came
within what is promised and the others followed. Rates and promises are set from what engines of this machine do, once
for both. Of several such rounds in one run each figure is the median.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

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
_ONE_BY_ONE: Final = 8
_PLACES: Final = 4
_PROMPT_WORDS: Final = 900
_ANSWER_TOKENS: Final = 200
# Of half of what the two engines compute, and of what the one that answers generates: more than one engine has
# time for, less than two.
_LOAD: Final = 1.4
# In times of what a prompt takes alone: enough for a short queue.
_TTFT_TIMES: Final = 10.0
_TBT_S: Final = 0.5
_PHASE_S: Final = 40.0
_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """How requests come, and what is promised."""

    prompt_every_s: float
    answer_every_s: float
    ttft_s: float


_Round = tuple[list[ChatReply], list[ChatReply]]


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Goodput of both clusters, and the requests that were lost.

    Raises:
        EngineFailed: a request of the calibration was not served.
    """
    rounds = 1 if quick else _ROUNDS
    pace: _Arrivals | None = None
    replies: dict[bool, list[_Round]] = {}
    for follow in (False, True):
        name = "roles follow the load" if follow else "fixed roles"
        progress(f"{name}: starting three engines")
        env = {
            # Roles are what is compared: what is long goes to prefill engines in both.
            "MOONCACHE_CONDUCTOR_INLINE_TOKENS_MAX": "512",
            "MOONCACHE_CONDUCTOR_REBALANCE_ROLES": str(follow).lower(),
            "MOONCACHE_HF_BATCH_MAX": str(_PLACES),
            "OMP_NUM_THREADS": "1",
        }
        options = TurnsOptions(engine=EngineKind.HF, start_timeout_s=_START_S)
        with cluster_of(options, "roles", env, prefill=2, decode=1) as cluster:
            if pace is None:
                progress("what the engines do")
                pace = asyncio.run(_calibrated(cluster))
            replies[follow] = []
            for number in range(rounds):
                progress(f"{name}: round {number + 1} of {rounds}, {2 * _PHASE_S:.0f} s of requests")
                replies[follow].append(asyncio.run(_phases(cluster, pace, number)))
    assert pace is not None, "the first cluster set it"
    return _rows(replies, pace)


def _rows(replies: dict[bool, list[_Round]], pace: _Arrivals) -> list[Row]:
    rows = [
        Row("long prompts that come", 1 / pace.prompt_every_s, "1/s"),
        Row("long answers that come", 1 / pace.answer_every_s, "1/s"),
        Row("promised time to the first token", pace.ttft_s, "s"),
    ]
    whole: dict[bool, float] = {}
    for follow, name in ((False, "fixed roles"), (True, "roles follow the load")):
        good = [[_goodput(phase, pace) for phase in phases] for phases in replies[follow]]
        for number, load in enumerate(("long prompts", "long answers")):
            middle = statistics.median(phases[number] for phases in good)
            rows.append(Row(f"goodput, {name}, {load}", middle, "1/s"))
        whole[follow] = statistics.median(statistics.fmean(phases) for phases in good)
    lost = sum(
        bool(reply.error) for rounds in replies.values() for one in rounds for phase in one for reply in phase
    )
    return [
        *rows,
        Row("goodput, fixed roles", whole[False], "1/s"),
        bar_row(
            "goodput, roles follow the load",
            whole[True],
            "1/s",
            against="goodput, fixed roles",
            reference=whole[False],
            at_least=_BAR,
        ),
        bar_row("requests lost", float(lost), "", at_most=0.0),
    ]


def _goodput(replies: list[ChatReply], pace: _Arrivals) -> float:
    return sum(_kept(reply, pace) for reply in replies) / _PHASE_S


def _kept(reply: ChatReply, pace: _Arrivals) -> bool:
    if reply.error or reply.ttft_s > pace.ttft_s:
        return False
    return not reply.gaps_s or statistics.fmean(reply.gaps_s) <= _TBT_S


def _prompt(name: str) -> dict[str, object]:
    words = " ".join(f"{name} {number}" for number in range(_PROMPT_WORDS // 2))
    return {"model": "bench", "max_tokens": 2, "messages": [{"role": "user", "content": words}]}


def _answer(name: str) -> dict[str, object]:
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
        await _served(session, cluster, key, _prompt("first"))
        alone = [await _served(session, cluster, key, _prompt(f"alone{at}")) for at in range(_ONE_BY_ONE)]
        ttft_s = statistics.median(reply.ttft_s for reply in alone)
        # Many at once: what two engines compute together with all else that runs here.
        prompt_s = await _each_s(session, cluster, key, _prompt)
        # One engine generates, in a full batch.
        answer_s = await _each_s(session, cluster, key, _answer)
    return _Arrivals(2 * prompt_s / _LOAD, answer_s / _LOAD, _TTFT_TIMES * ttft_s)


async def _each_s(
    session: aiohttp.ClientSession,
    cluster: EmbeddedCluster,
    key: str,
    make: Callable[[str], dict[str, object]],
) -> float:
    """Seconds for one of many that come at once: what the engines can do, not how long one takes."""
    began_s = time.perf_counter()
    bodies = [make(f"calibrate{number}") for number in range(_AT_ONCE)]
    await asyncio.gather(*(_served(session, cluster, key, body) for body in bodies))
    return (time.perf_counter() - began_s) / _AT_ONCE


async def _served(
    session: aiohttp.ClientSession, cluster: EmbeddedCluster, key: str, body: dict[str, object]
) -> ChatReply:
    reply = await ask(session, cluster.layout.gateway_url, key, body, _CALL_S)
    if reply.error:
        raise EngineFailed(f"A request failed: {reply.error}")
    return reply


async def _phases(cluster: EmbeddedCluster, pace: _Arrivals, number: int) -> _Round:
    key = demo_key(cluster)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def phase(bodies: Sequence[dict[str, object]], every_s: float) -> list[ChatReply]:
            calls = []
            began_s = time.perf_counter()
            for at, body in enumerate(bodies):
                await asyncio.sleep(max(0.0, began_s + at * every_s - time.perf_counter()))
                url = cluster.layout.gateway_url
                calls.append(asyncio.ensure_future(ask(session, url, key, body, _CALL_S)))
            return await asyncio.gather(*calls)

        prompts = [_prompt(f"word{number}-{at}") for at in range(int(_PHASE_S / pace.prompt_every_s))]
        first = await phase(prompts, pace.prompt_every_s)
        answers = [_answer(f"reader {number}-{at}") for at in range(int(_PHASE_S / pace.answer_every_s))]
        return first, await phase(answers, pace.answer_every_s)
