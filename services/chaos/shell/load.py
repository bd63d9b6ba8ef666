"""Requests whose answers are known: each was asked once as a tenant of its own, for which nothing is cached.

Conversations of a few turns, so that later turns have prefixes in the caches. Before the first fault each turn is
answered once without any cache; later answers have to be equal, token for token (temperature 0). That holds where the
engine computes in float32, which `mooncache up` chooses on processors; with shorter types a batch of another size may
round otherwise, with or without faults.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from mooncache.auth import Token, tenant_token
from mooncache.bench.serving.talk import ChatReply, ask
from mooncache.chaos.core.records import CheckedAnswer, Outcome, Record
from mooncache.errors import EngineFailed, NoInstances

CONVERSATIONS: Final = 4
TURNS: Final = 3
HANG_S: Final = 120.0
"""A request that has no end after this hangs: longer than any time limit of an idle gateway's engines."""
TENANT: Final = "chaos"
_OUTPUT_TOKENS: Final = 12
_PAUSE_S: Final = 0.2
_SHARED: Final = "The pool keeps what was computed once, and it checks every byte that it gives back. " * 6


@dataclass(frozen=True, slots=True)
class KnownQuestion:
    """A turn of a conversation, and its answer when nothing is cached."""

    messages: tuple[dict[str, str], ...]
    expected: str


class Asker:
    """Asks the gateway. Use it as an asynchronous context manager."""

    def __init__(self, gateway_url: str, token: Token, tls: ssl.SSLContext | None) -> None:
        self._url, self._token = gateway_url, token
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self.model = ""

    async def __aenter__(self) -> Asker:
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls or True)
        self._session = aiohttp.ClientSession(connector=connector)
        self.model = await self._first_model(self._session)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, tenant: str, messages: tuple[dict[str, str], ...]) -> ChatReply:
        """One streamed request as a tenant."""
        assert self._session is not None
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": _OUTPUT_TOKENS,
            "temperature": 0,
        }
        return await ask(self._session, self._url, tenant_token(self._token, tenant).text, body, HANG_S)

    async def _first_model(self, session: aiohttp.ClientSession) -> str:
        headers = {"Authorization": f"Bearer {tenant_token(self._token, TENANT).text}"}
        try:
            async with session.get(
                f"{self._url}/v1/models", headers=headers, timeout=aiohttp.ClientTimeout(total=10)
            ) as answer:
                return str((await answer.json())["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
            raise NoInstances(f"The gateway at {self._url} offers no model: {error!r}.") from None


async def known_answers(asker: Asker, seed: int, progress: Callable[[str], None]) -> list[KnownQuestion]:
    """Every turn of every conversation, answered without a cache.

    Raises:
        EngineFailed: a request failed, or something was cached for a tenant that never asked.
    """
    run = secrets.token_hex(4)
    questions: list[KnownQuestion] = []
    for talk in range(CONVERSATIONS):
        messages: tuple[dict[str, str], ...] = ()
        for turn in range(TURNS):
            progress(f"answers without a cache: {len(questions) + 1} of {CONVERSATIONS * TURNS}")
            messages += ({"role": "user", "content": _text(seed, talk, turn)},)
            found = await asker.ask(f"{TENANT}-{run}-{talk}-{turn}", messages)
            if found.error:
                raise EngineFailed(f"The cluster does not serve, before any fault: {found.error}")
            if found.cached_tokens:
                raise EngineFailed(
                    f"{found.cached_tokens} tokens were cached for a tenant that had never asked."
                )
            questions.append(KnownQuestion(messages, found.text))
            messages += ({"role": "assistant", "content": found.text},)
    return questions


async def stream(
    asker: Asker,
    questions: list[KnownQuestion],
    record: Record,
    begun_s: float,
    rng: random.Random,
    stop: asyncio.Event,
) -> None:
    """One client: asks question after question until `stop`."""
    while not stop.is_set():
        question = rng.choice(questions)
        asked_s = time.monotonic()
        found = await asker.ask(TENANT, question.messages)
        record.answers.append(_answer(question, found, asked_s - begun_s, time.monotonic() - begun_s))
        if found.error:
            await asyncio.sleep(_PAUSE_S)  # who is refused does not hammer


def _answer(question: KnownQuestion, found: ChatReply, asked_s: float, ended_s: float) -> CheckedAnswer:
    detail = ""
    if found.error:
        outcome = Outcome.HUNG if ended_s - asked_s >= HANG_S * 0.95 else Outcome.FAILED
        detail = found.error[:200]
    elif found.text == question.expected:
        outcome = Outcome.RIGHT
    else:
        outcome = Outcome.WRONG
        detail = f"{found.text!r} where {question.expected!r} is right"
    return CheckedAnswer(
        asked_s, ended_s, outcome, found.ttft_s, found.prompt_tokens, found.cached_tokens, detail
    )


def _text(seed: int, talk: int, turn: int) -> str:
    return (
        f"{_SHARED if not turn else ''}Run {seed}, conversation {talk}: what comes after {talk * 37 + turn}?"
    )
