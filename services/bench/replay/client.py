"""The measuring client: streamed completions of token ids, timed event by event, sent when the trace says so."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

_DATA = b"data:"
_DONE = b"[DONE]"
_ERROR_CHARS = 300


@dataclass(slots=True)
class ReplayTiming:
    """One request. Times in seconds from sending it; `error` is empty when all went well."""

    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    late_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class ReplayTarget:
    """Where requests go: base URL without /v1, API key, and the model's name there."""

    url: str
    key: str
    model: str
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to be sent `at_s` seconds after the beginning."""

    at_s: float
    tokens: list[int]
    output_tokens: int


async def complete(
    session: aiohttp.ClientSession, endpoint: ReplayTarget, tokens: list[int], output_tokens: int
) -> ReplayTiming:
    """Send one prompt and read the stream to its end. Never raises for what a server does."""
    found = ReplayTiming()
    body = {
        "model": endpoint.model,
        "prompt": tokens,
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    timeout = aiohttp.ClientTimeout(total=endpoint.timeout_s)
    sent_s = time.perf_counter()
    try:
        async with session.post(
            f"{endpoint.url}/v1/completions", json=body, headers=headers, timeout=timeout
        ) as response:
            if response.status != 200:
                found.error = f"HTTP {response.status}: {(await response.text())[:_ERROR_CHARS]}"
                return found
            await _read(response, found, sent_s)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        found.error = repr(error)[:_ERROR_CHARS]
    return found


async def _read(response: aiohttp.ClientResponse, found: ReplayTiming, sent_s: float) -> None:
    last_s, last, is_done = 0.0, b"", False
    async for raw in response.content:
        if not raw.startswith(_DATA):
            continue
        payload = raw[len(_DATA) :].strip()
        if payload == _DONE:
            is_done = True
            continue
        now_s = time.perf_counter()
        last = payload
        if b'"choices":[]' in payload.replace(b" ", b""):
            continue  # the event that has the usage
        if b'"error"' in payload[:10]:
            found.error = payload[:_ERROR_CHARS].decode("utf-8", "replace")
        elif not found.ttft_s:
            found.ttft_s = now_s - sent_s
        else:
            found.gaps_s.append(now_s - last_s)
        last_s = now_s
    usage = json.loads(last).get("usage") if last else None
    if usage:
        found.prompt_tokens = usage["prompt_tokens"]
        found.output_tokens = usage["completion_tokens"]
        found.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not found.error and not (is_done and found.ttft_s):
        found.error = "the stream ended without [DONE]"


async def replay(
    endpoint: ReplayTarget, requests: Sequence[Planned], progress: Callable[[int, int], None]
) -> list[ReplayTiming]:
    """Send every request at its time, whatever became of those before; tell (sent, ended) now and then."""
    results = [ReplayTiming() for _ in requests]
    ended = 0

    async def one(number: int) -> None:
        nonlocal ended
        planned = requests[number]
        results[number] = await complete(session, endpoint, planned.tokens, planned.output_tokens)
        results[number].late_s = late_s[number]
        ended += 1

    late_s = [0.0] * len(requests)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began_s = time.perf_counter()
        tasks = []
        for number, planned in enumerate(requests):
            delay_s = began_s + planned.at_s - time.perf_counter()
            await asyncio.sleep(max(0.0, delay_s))
            late_s[number] = time.perf_counter() - began_s - planned.at_s
            tasks.append(asyncio.create_task(one(number)))
            progress(number + 1, ended)
        await asyncio.gather(*tasks)
    return results
