"""The first turn of a conversation, vLLM: prefill and decode in two engines over one engine that does everything.

Both clusters run at the same time and get the same prompts in turn, each prompt once, so that nothing is in any cache.
The decode leg says in its cache report what of the transfer took place while the prompt was still being computed.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

import aiohttp

from mooncache.bench.serving.decisions import cache_reports, decision_of
from mooncache.bench.serving.talk import ChatReply, ask
from mooncache.bench.serving.turns import HANDED_OVER, NO_POOL, TurnsOptions, cluster_of, demo_key
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.settings import EngineKind
from mooncache.errors import EngineFailed
from mooncache.reporting.rows import Row, bar_row

_CALL_S: Final = 300.0
_ROUNDS: Final = 5
# Prompt tokens, the sentences that make about so many, and how many times the time of one engine two may take.
_LENGTHS: Final = ((1000, 43, 1.5), (4000, 166, 1.2))
_HIDDEN_BAR: Final = 0.8
_HIDDEN_TOKENS: Final = 4000
_SETTLE_S: Final = 0.3
_OTHER_PROMPTS: Final = 1000


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Rows for each length of prompt, and the share of the transfer that was hidden.

    Raises:
        EngineFailed: a request was not served, or two engines answered with other tokens than one.
    """
    options = TurnsOptions(engine=EngineKind.VLLM)
    with ExitStack() as stack:
        progress("one engine: starting")
        alone = stack.enter_context(cluster_of(options, "alone", NO_POOL, prefill=0))
        progress("two engines: starting")
        apart = stack.enter_context(cluster_of(options, "apart", HANDED_OVER, prefill=1))
        return asyncio.run(_rows(alone, apart, 1 if quick else _ROUNDS, progress))


async def _rows(
    alone: EmbeddedCluster, apart: EmbeddedCluster, rounds: int, progress: Callable[[str], None]
) -> list[Row]:
    rows: list[Row] = []
    async with aiohttp.ClientSession() as session:
        for tokens, sentences, bar in _LENGTHS:
            one: list[ChatReply] = []
            two: list[ChatReply] = []
            hidden: list[float] = []
            for number in range(-1, rounds):  # the first round warms up
                progress(f"{tokens} tokens, round {number + 1} of {rounds}")
                text = _prompt(tokens, number, sentences)
                first = await _served(session, alone, text)
                second = await _served(session, apart, text)
                if first.text != second.text:
                    raise EngineFailed(f"Two engines answered {second.text!r}, one answered {first.text!r}.")
                if number < 0:
                    continue
                one.append(first)
                two.append(second)
                share = await _hidden(session, apart, _prompt(tokens, number + _OTHER_PROMPTS, sentences))
                if share is not None:
                    hidden.append(share)
            length = f"first turn, {one[0].prompt_tokens} prompt tokens"
            base_ms = statistics.median(reply.ttft_s for reply in one) * 1e3
            split_ms = statistics.median(reply.ttft_s for reply in two) * 1e3
            rows.append(Row(f"{length}: TTFT, one engine", base_ms, "ms"))
            rows.append(
                bar_row(
                    f"{length}: TTFT, prefill and decode apart",
                    split_ms,
                    "ms",
                    against="one engine",
                    reference=base_ms,
                    at_most=bar,
                )
            )
            if hidden:
                at_least = _HIDDEN_BAR if tokens >= _HIDDEN_TOKENS else None
                rows.append(
                    bar_row(
                        f"{length}: share of the transfer that prefill hides",
                        statistics.median(hidden),
                        "of 1",
                        at_least=at_least,
                    )
                )
    return rows


def _prompt(tokens: int, number: int, sentences: int) -> str:
    """Text that no other round has."""
    sentence = f"Round {number} of {tokens}: " + " ".join(f"w{number + index}" for index in range(8)) + ". "
    return sentence * sentences


def _body(text: str) -> dict[str, object]:
    messages = [{"role": "user", "content": text}]
    return {"model": "bench", "messages": messages, "max_tokens": 8, "temperature": 0}


async def _served(session: aiohttp.ClientSession, cluster: EmbeddedCluster, text: str) -> ChatReply:
    reply = await ask(session, cluster.layout.gateway_url, demo_key(cluster), _body(text), _CALL_S)
    if reply.error:
        raise EngineFailed(f"A request failed: {reply.error}")
    return reply


async def _hidden(session: aiohttp.ClientSession, cluster: EmbeddedCluster, text: str) -> float | None:
    """Share of the decode leg's loading that went on while it waited; None when it did not load or did not say.

    vLLM adds a cache report to whole answers alone, so this is a request of its own.
    """
    body = {**_body(text), "stream": False}
    headers = {"Authorization": f"Bearer {demo_key(cluster)}"}
    url = f"{cluster.layout.gateway_url}/v1/chat/completions"
    timeout = aiohttp.ClientTimeout(total=_CALL_S)
    async with session.post(url, json=body, headers=headers, timeout=timeout) as response:
        await response.read()
        decision = response.headers.get("x-mooncache-decision", "")
    await asyncio.sleep(_SETTLE_S)  # the last report of a request follows its answer
    cache = cache_reports(await decision_of(cluster, decision)).get("decode")
    if not cache or not cache.get("load_ms"):
        return None
    return min(1.0, float(cache.get("hidden_ms", 0.0)) / float(cache["load_ms"]))
