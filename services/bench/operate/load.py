"""The clients, in a process of their own: large bodies at a pace, or as fast as they are answered.

Bodies share all but their last message, as later turns of a conversation do, or nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from typing import Any

from mooncache.bench.gateway import prompts
from mooncache.bench.gateway.load import LoadConnection
from mooncache.bench.worker import serve

_PATH = "/v1/chat/completions"
_TEXT_PATH = "/v1/completions"
_FRAME_BYTES = 200
_WARM_UP = 8

WayThrough = dict[str, Any]
"""port, key and model."""


def arrivals(seed: int, rate_per_s: float, seconds: float) -> list[float]:
    """Seconds at which requests come, at random."""
    dice, at_s, found = random.Random(seed), 0.0, []
    while (at_s := at_s + dice.expovariate(rate_per_s)) < seconds:
        found.append(at_s)
    return found


def ids_body(way: WayThrough, number: int, tokens: int, output: int) -> dict[str, Any]:
    """A prompt of token ids that begins like no other one."""
    dice = random.Random(f"{way['model']} {number}")
    prompt = [dice.randrange(200) for _ in range(tokens)]
    return {"model": way["model"], "prompt": prompt, "max_tokens": output}


class LargeBodies:
    """Answers the parent's questions; everything runs in one event loop."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._number = itertools.count()
        self._loop = asyncio.new_event_loop()

    def paced(
        self, ways: list[WayThrough], body_bytes: int, added_bytes: int, rate_per_s: float, requests: int
    ) -> dict[str, Any]:
        """Milliseconds to the first event of each request, for each way; the ways take turns."""
        return self._loop.run_until_complete(self._paced(ways, body_bytes, added_bytes, rate_per_s, requests))

    def sustained(
        self, way: WayThrough, body_bytes: int, added_bytes: int, clients: int, seconds: float
    ) -> dict[str, Any]:
        """Requests a second of clients that each send the next one when their answer has ended."""
        return self._loop.run_until_complete(self._sustained(way, body_bytes, added_bytes, clients, seconds))

    def arriving(
        self, way: WayThrough, seed: int, rate_per_s: float, seconds: float, tokens: int, output: int
    ) -> dict[str, Any]:
        """Milliseconds to the first event of each request; they come at random, whether others have ended or not."""
        return self._loop.run_until_complete(
            self._arriving(way, arrivals(seed, rate_per_s, seconds), tokens, output)
        )

    def all_at_once(
        self, way: WayThrough, requests: int, clients: int, tokens: int, output: int
    ) -> dict[str, Any]:
        """Seconds for so many requests of clients that each send the next one when their answer has ended."""
        return self._loop.run_until_complete(self._all_at_once(way, requests, clients, tokens, output))

    async def _arriving(
        self, way: WayThrough, due_s: list[float], tokens: int, output: int
    ) -> dict[str, Any]:
        started_s = time.perf_counter()
        idle: list[LoadConnection] = []

        async def one(at_s: float) -> float:
            body = json.dumps({**ids_body(way, next(self._number), tokens, output), "stream": True}).encode()
            await asyncio.sleep(max(0.0, started_s + at_s - time.perf_counter()))
            line = idle.pop() if idle else await LoadConnection.open(way["port"], way["key"])
            first_s = await line.post(_TEXT_PATH, body)
            idle.append(line)
            return 1e3 * first_s

        times = await asyncio.gather(*map(one, due_s))
        for line in idle:
            line.close()
        return {"ms": times}

    async def _all_at_once(
        self, way: WayThrough, requests: int, clients: int, tokens: int, output: int
    ) -> dict[str, Any]:
        bodies = [
            json.dumps({**ids_body(way, next(self._number), tokens, output), "stream": True}).encode()
            for _ in range(requests)
        ]
        started_s = time.perf_counter()

        async def drain() -> None:
            line = await LoadConnection.open(way["port"], way["key"])
            while bodies:
                await line.post(_TEXT_PATH, bodies.pop())
            line.close()

        await asyncio.gather(*(drain() for _ in range(clients)))
        return {"s": time.perf_counter() - started_s}

    async def _paced(
        self, ways: list[WayThrough], body_bytes: int, added_bytes: int, rate_per_s: float, requests: int
    ) -> dict[str, Any]:
        times: list[list[float]] = [[] for _ in ways]
        clients = [await LoadConnection.open(way["port"], way["key"]) for way in ways]
        makers = [self._maker(way, body_bytes, added_bytes) for way in ways]
        for client, make in zip(clients, makers, strict=True):
            for _ in range(_WARM_UP):
                await client.post(_PATH, make())
        due_s = time.perf_counter()
        for number in range(requests * len(ways)):
            at = number % len(ways)
            body = makers[at]()
            due_s = max(due_s + 1 / rate_per_s, time.perf_counter() - 1.0)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            times[at].append(1e3 * await clients[at].post(_PATH, body))
        for client in clients:
            client.close()
        return {"ms": times}

    async def _sustained(
        self, way: WayThrough, body_bytes: int, added_bytes: int, clients: int, seconds: float
    ) -> dict[str, Any]:
        make = self._maker(way, body_bytes, added_bytes)
        lines = [await LoadConnection.open(way["port"], way["key"]) for _ in range(clients)]
        for line in lines:
            await line.post(_PATH, make())
        started_s = time.perf_counter()
        until_s = started_s + seconds
        times: list[float] = []

        async def drain(line: LoadConnection) -> None:
            while time.perf_counter() < until_s:
                times.append(1e3 * await line.post(_PATH, make()))

        await asyncio.gather(*map(drain, lines))
        took_s = time.perf_counter() - started_s
        for line in lines:
            line.close()
        return {"per_s": len(times) / took_s, "ms": times}

    def _maker(self, way: WayThrough, body_bytes: int, added_bytes: int) -> Any:
        """Makes bodies of that size, of which the last `added_bytes` differ; all of it where that is the size."""
        talk = prompts.conversation(self._dice, max(0, body_bytes - added_bytes - _FRAME_BYTES), 8)
        shared = (
            json.dumps(talk, ensure_ascii=False).encode()[1:-1] + b"," if added_bytes < body_bytes else b""
        )
        head = json.dumps(
            {"model": way["model"], "stream": True, "max_tokens": 1, "null_usage": False}
        ).encode()[:-1]

        def make() -> bytes:
            said = f"{next(self._number)} {prompts.text(self._dice, added_bytes)}"
            last = json.dumps({"role": "user", "content": said}, ensure_ascii=False).encode()
            return b"".join((head, b',"messages":[', shared, last, b"]}"))

        return make


def main() -> int:
    """`python -m mooncache.bench.operate.load SEED`."""
    import uvloop

    uvloop.install()
    load = LargeBodies(int(sys.argv[1]))
    serve(
        {},
        {
            "paced": load.paced,
            "sustained": load.sustained,
            "arriving": load.arriving,
            "all_at_once": load.all_at_once,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
