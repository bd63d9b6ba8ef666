"""The clients, in a process of their own: bare sockets that time the first event and count the others.

A real HTTP client costs more per event than the gateway; this one does as little as can be. Every question goes to
gateway and engine in turn, with prompts that neither has seen.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, cast

from mooncache.bench.gateway import prompts
from mooncache.bench.worker import serve

_ANSWER_TIMEOUT_S = 60.0
_SPREAD_S = 0.02

LoadTarget = dict[str, Any]
"""port, key and model, as stack.Target."""


class LoadConnection(asyncio.Protocol):
    """One kept-alive connection; one request at a time."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._transport: asyncio.Transport
        self._done: asyncio.Future[None] | None = None
        self._tail = b""
        self._sent_s = 0.0
        self.first_s = 0.0
        self.events = 0

    @classmethod
    async def open(cls, port: int, key: str) -> LoadConnection:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: cls(key), "127.0.0.1", port)
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    async def post(self, path: str, body: bytes) -> float:
        """Send a streaming request and read it to its end. Returns the seconds to the first event."""
        self._done = asyncio.get_running_loop().create_future()
        self._tail, self.first_s, self.events = b"", 0.0, 0
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self._key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._sent_s = time.perf_counter()
        self._transport.write(head.encode() + body)
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            await self._done
        return self.first_s

    def data_received(self, data: bytes) -> None:
        seen = self._tail + data
        if not self.first_s:
            if b"data:" not in seen:
                self._tail = seen
                if b"\r\n\r\n" in seen and not seen.startswith(b"HTTP/1.1 200"):
                    self._end(RuntimeError(seen[:500].decode(errors="replace")))
                return
            self.first_s = time.perf_counter() - self._sent_s
        self.events += seen.count(b"\n\n") - self._tail.count(b"\n\n")
        self._tail = seen[-8:]
        if self._tail.endswith(b"\r\n0\r\n\r\n"):
            self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or RuntimeError("the server closed the connection"))

    def _end(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)

    def close(self) -> None:
        self._transport.close()


class LoadGenerator:
    """Answers the parent's questions; everything runs in one event loop."""

    def __init__(self, folder: Path, seed: int) -> None:
        from tokenizers import Tokenizer

        self._dice = random.Random(seed)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        text = prompts.text(self._dice, 100_000)
        self._chars_per_token = len(text) / len(self._tokenizer.encode(text, add_special_tokens=False).ids)
        self._loop = asyncio.new_event_loop()

    def first_token(
        self,
        targets: list[LoadTarget],
        tokens: int,
        concurrency: int,
        requests: int,
        output: int,
        rate: float,
    ) -> dict[str, Any]:
        """Milliseconds to the first event of each request, for each target; targets take turns in short rounds.

        concurrency: clients that each send the next request when their stream has ended. rate: events per second of a
        stream, 0 as fast as they go.
        """
        return self._run(self._first_token(targets, tokens, concurrency, requests, output, rate))

    def turns(self, targets: list[LoadTarget], tokens: int, added: int, requests: int) -> dict[str, object]:
        """Milliseconds to the first event of a first and of a later turn, and the tokenizer's own for the new text."""
        return self._run(self._turns(targets, tokens, added, requests))

    def relay(self, target: LoadTarget, streams: int, output: int, rate: float) -> dict[str, Any]:
        """Events per second over all streams together."""
        return self._run(self._relay(target, streams, output, rate))

    def _run(self, work: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._loop.run_until_complete(work)
        return answer

    def _body(self, target: LoadTarget, messages: list[dict[str, object]], output: int, rate: float) -> bytes:
        body = {"model": target["model"], "messages": messages, "stream": True, "max_tokens": output}
        # An engine that guesses usage counts other tokens than the gateway, which then stops tokenising for it.
        body["null_usage"] = False
        if rate:
            body["null_events_per_s"] = rate
        return json.dumps(body, ensure_ascii=False).encode()

    def _talk(self, tokens: int, turns: int = 2) -> list[dict[str, Any]]:
        return prompts.conversation(self._dice, int(tokens * self._chars_per_token), turns)

    async def _first_token(
        self,
        targets: list[LoadTarget],
        tokens: int,
        concurrency: int,
        requests: int,
        output: int,
        rate: float,
    ) -> dict[str, object]:
        times: list[list[float]] = [[] for _ in targets]
        took_s = [0.0 for _ in targets]
        rounds = max(1, requests // max(16, concurrency))
        for _ in range(rounds):
            for at, target in enumerate(targets):
                count = -(-requests // rounds)
                bodies = [self._body(target, self._talk(tokens), output, rate) for _ in range(count)]
                clients = [
                    await LoadConnection.open(target["port"], target["key"]) for _ in range(concurrency)
                ]
                started = time.perf_counter()
                spread_s = output / rate if rate else _SPREAD_S
                results = await asyncio.gather(*(self._drain(client, bodies, spread_s) for client in clients))
                took_s[at] += time.perf_counter() - started
                times[at] += [value for values in results for value in values]
                for client in clients:
                    client.close()
        rates = [len(values) / seconds for values, seconds in zip(times, took_s, strict=True)]
        return {"ms": [[1e3 * value for value in values] for values in times], "per_s": rates}

    async def _drain(self, client: LoadConnection, bodies: list[bytes], spread_s: float) -> list[float]:
        # clients do not start in step, so those with streams of equal length do not send in step either
        await asyncio.sleep(self._dice.random() * spread_s)
        times = []
        while bodies:
            times.append(await client.post("/v1/chat/completions", bodies.pop()))
        return times

    async def _turns(
        self, targets: list[LoadTarget], tokens: int, added: int, requests: int
    ) -> dict[str, Any]:
        first: list[list[float]] = [[] for _ in targets]
        later: list[list[float]] = [[] for _ in targets]
        own: dict[str, list[float]] = {"first": [], "later": []}
        clients = [await LoadConnection.open(target["port"], target["key"]) for target in targets]
        for _ in range(requests):
            talk = self._talk(tokens, turns=8)
            grown = prompts.next_turn(self._dice, talk, int(added * self._chars_per_token))
            for at, (client, target) in enumerate(zip(clients, targets, strict=True)):
                first[at].append(await client.post("/v1/chat/completions", self._body(target, talk, 2, 0.0)))
                later[at].append(await client.post("/v1/chat/completions", self._body(target, grown, 2, 0.0)))
            own["first"].append(self._own_s("".join(message["content"] for message in talk)))
            own["later"].append(self._own_s("".join(message["content"] for message in grown[len(talk) :])))
        for client in clients:
            client.close()
        return {
            "first_ms": [[1e3 * value for value in values] for values in first],
            "later_ms": [[1e3 * value for value in values] for values in later],
            "own_first_ms": [1e3 * value for value in own["first"]],
            "own_later_ms": [1e3 * value for value in own["later"]],
        }

    def _own_s(self, text: str) -> float:
        started = time.perf_counter()
        self._tokenizer.encode(text, add_special_tokens=False).ids  # noqa: B018 - the list is part of the work
        return time.perf_counter() - started

    async def _relay(self, target: LoadTarget, streams: int, output: int, rate: float) -> dict[str, Any]:
        clients = [await LoadConnection.open(target["port"], target["key"]) for _ in range(streams)]
        body = self._body(target, [{"role": "user", "content": "go on"}], output, rate)
        started = time.perf_counter()
        await asyncio.gather(*(client.post("/v1/chat/completions", body) for client in clients))
        seconds = time.perf_counter() - started
        events = sum(client.events for client in clients)
        for client in clients:
            client.close()
        if events < streams * output:
            raise RuntimeError(f"{events} events of {streams * output} arrived")
        return {"per_s": events / seconds, "events": events}


def main() -> int:
    """`python -m mooncache.bench.gateway.load TOKENIZER_FOLDER SEED`."""
    import uvloop

    uvloop.install()
    load = LoadGenerator(Path(sys.argv[1]), int(sys.argv[2]))
    serve({}, {"first_token": load.first_token, "turns": load.turns, "relay": load.relay})
    return 0


if __name__ == "__main__":
    sys.exit(main())
