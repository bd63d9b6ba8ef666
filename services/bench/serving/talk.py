"""A measuring client: one streamed chat request, timed token by token."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass(slots=True)
class ChatReply:
    """What came back. Times in seconds since the request was sent; `error` is empty when all went well."""

    text: str = ""
    ttft_s: float = 0.0
    total_s: float = 0.0
    events: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    decision: str = ""
    plan: str = ""
    error: str = ""
    done: bool = False
    gaps_s: list[float] = field(default_factory=list)


async def ask(
    session: aiohttp.ClientSession, url: str, key: str, body: dict[str, Any], timeout_s: float
) -> ChatReply:
    """Send one chat request with `stream` on and read it to its end. Never raises for what a server does."""
    answer = ChatReply()
    started_s = time.perf_counter()
    whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Authorization": f"Bearer {key}"}
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.post(
            f"{url}/v1/chat/completions", json=whole, headers=headers, timeout=timeout
        ) as response:
            answer.decision = response.headers.get("x-mooncache-decision", "")
            answer.plan = response.headers.get("x-mooncache-plan", "")
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return answer
            await _read(response, answer, started_s)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        answer.error = repr(error)
    answer.total_s = time.perf_counter() - started_s
    if not answer.error and not answer.done:
        answer.error = "the stream ended without [DONE]"
    return answer


async def _read(response: aiohttp.ClientResponse, answer: ChatReply, started_s: float) -> None:
    last_s = 0.0
    async for raw in response.content:
        line = raw.strip()
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == b"[DONE]":
            answer.done = True
            continue
        event = json.loads(payload)
        now_s = time.perf_counter()
        if "error" in event:
            answer.error = json.dumps(event["error"])[:300]
        for choice in event.get("choices", ()):
            text = (choice.get("delta") or {}).get("content")
            if text:
                answer.text += text
                answer.events += 1
                if answer.ttft_s == 0.0:
                    answer.ttft_s = now_s - started_s
                else:
                    answer.gaps_s.append(now_s - last_s)
                last_s = now_s
        usage = event.get("usage")
        if usage:
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.output_tokens = usage["completion_tokens"]
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
