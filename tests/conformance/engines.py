"""A small engine with a prefix cache, honest, and others that each break one promise.

The answer is a hash over all words of the prompt, carried from block to block as KV is: what an engine loads is the
state after a block, so a wrong block gives a wrong answer.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BLOCK_WORDS = 16
PROMPT_WORDS_MAX = 10_000
_SLOWLY = threading.Event()  # never set: its waits are the time that an engine takes


class Engine:
    """Honest."""

    blocks_max = 512

    def __init__(self) -> None:
        self.blocks: dict[str, str] = {}
        self.lock = threading.Lock()
        self.broken = False
        self.asked = 0

    # --- what the liars change ---

    def scope(self, key: str, salt: str) -> str:
        """What must be equal for blocks to be shared."""
        return f"{key} {salt}"

    def name_of(self, scope: str, words: list[str]) -> str:
        """The key of the last block of these words."""
        return hashlib.sha256(f"{scope} {' '.join(words)}".encode()).hexdigest()

    def load(self, name: str) -> str | None:
        """The state after a block."""
        with self.lock:
            return self.blocks.get(name)

    def save(self, name: str, state: str) -> None:
        """Keep the state after a block."""
        with self.lock:
            while len(self.blocks) >= self.blocks_max:
                del self.blocks[next(iter(self.blocks))]
            self.blocks[name] = state

    def cut_off(self, scope: str, words: list[str]) -> None:
        """A client has gone."""

    def refused(self, body: dict[str, Any]) -> int:
        """The status of a question that is none; 0 for one that is."""
        known = body.get("model") == "fake"
        if not known:
            return 404
        sound = isinstance(body.get("prompt"), str) and isinstance(body.get("temperature"), int | float)
        sound = sound and 0 < body.get("max_tokens", 0) <= 4096
        return 0 if sound and len(body["prompt"].split()) <= PROMPT_WORDS_MAX else 400

    def state_of(self, scope: str, words: list[str]) -> tuple[str, int]:
        """The state after all words, and how many of them were loaded."""
        state, loaded = "", 0
        full = (len(words) - 1) // BLOCK_WORDS * BLOCK_WORDS  # the last word is always computed
        for end in range(BLOCK_WORDS, full + 1, BLOCK_WORDS):
            kept = self.load(self.name_of(scope, words[:end]))
            if kept is None or loaded != end - BLOCK_WORDS:
                state = _advance(state, words[end - BLOCK_WORDS : end])
                self.save(self.name_of(scope, words[:end]), state)
            else:
                state, loaded = kept, end
        return _advance(state, words[full:]), loaded

    def answer(self, key: str, body: dict[str, Any]) -> tuple[list[str], int, int]:
        """Words of the answer, words of the prompt, words that were loaded."""
        words = str(body["prompt"]).split()
        state, loaded = self.state_of(self.scope(key, body.get("cache_salt") or ""), words)
        return [f" w{state[at]}" for at in range(min(int(body["max_tokens"]), 40))], len(words), loaded

    def streamed(self, words: list[str]) -> list[str]:
        """The words of an answer as a stream has them."""
        return words


def _advance(state: str, words: list[str]) -> str:
    return hashlib.sha256(f"{state} {' '.join(words)}".encode()).hexdigest()


class IgnoresAWord(Engine):
    def name_of(self, scope: str, words: list[str]) -> str:
        return super().name_of(scope, [*words[:2], *words[3:]])


class SharesOverSalts(Engine):
    def scope(self, key: str, salt: str) -> str:
        return key


class SharesOverTenants(Engine):
    def scope(self, key: str, salt: str) -> str:
        return salt


class LoadsWrongBytes(Engine):
    def load(self, name: str) -> str | None:
        kept = super().load(name)
        return kept and kept[::-1]


class LosesTheTailOfALongPrompt(Engine):
    def state_of(self, scope: str, words: list[str]) -> tuple[str, int]:
        state, loaded = super().state_of(scope, words)
        return (state, loaded) if loaded < 8 * BLOCK_WORDS else ("0" * 64, loaded)


class StreamsAnotherAnswer(Engine):
    def streamed(self, words: list[str]) -> list[str]:
        return [*words[:-1], " other"]


class CountsTooMuch(Engine):
    def answer(self, key: str, body: dict[str, Any]) -> tuple[list[str], int, int]:
        words, prompt, loaded = super().answer(key, body)
        return words, prompt, loaded and prompt + 1


class SavesWhatWasCutOff(Engine):
    def cut_off(self, scope: str, words: list[str]) -> None:
        for end in range(BLOCK_WORDS, len(words), BLOCK_WORDS):
            self.save(self.name_of(scope, words[:end]), "half written".ljust(64, "x"))


class ReusesEvictedBlocks(Engine):
    """A block whose memory went to another one is still found."""

    blocks_max = 64

    def __init__(self) -> None:
        super().__init__()
        self.slots: list[str] = []
        self.slot_of: dict[str, int] = {}

    def save(self, name: str, state: str) -> None:
        with self.lock:
            number = len(self.slot_of) % self.blocks_max
            self.slots[number : number + 1] = [state]
            self.slot_of[name] = number

    def load(self, name: str) -> str | None:
        with self.lock:
            return self.slots[self.slot_of[name]] if name in self.slot_of else None


class MixesConcurrentRequests(Engine):
    def __init__(self) -> None:
        super().__init__()
        self.current = ""

    def answer(self, key: str, body: dict[str, Any]) -> tuple[list[str], int, int]:
        self.current = str(body["prompt"])
        _SLOWLY.wait(0.005)
        return super().answer(key, {**body, "prompt": self.current})


class FailsOnBadRequests(Engine):
    def refused(self, body: dict[str, Any]) -> int:
        return 500 if super().refused(body) else 0


class TakesBadRequests(Engine):
    def refused(self, body: dict[str, Any]) -> int:
        return 0 if body.get("max_tokens") == -1 else super().refused(body)


class AnswersWronglyWhileBroken(Engine):
    def state_of(self, scope: str, words: list[str]) -> tuple[str, int]:
        return ("f" * 64, 0) if self.broken else super().state_of(scope, words)


class NeverRecovers(Engine):
    """Refuses everything once it was broken."""

    was_broken = False

    def refused(self, body: dict[str, Any]) -> int:
        self.was_broken |= self.broken
        return 503 if self.was_broken else super().refused(body)


class NeverTheSame(Engine):
    """Not greedy: nothing can be compared."""

    def answer(self, key: str, body: dict[str, Any]) -> tuple[list[str], int, int]:
        words, prompt, loaded = super().answer(key, body)
        return [*words[:-1], f" {self.asked}"], prompt, loaded


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        if self.path.startswith("/broken/"):  # the tests' own way to break and mend
            self.engine.broken = self.path.endswith("yes")
        self._send(200, {"data": [{"id": "fake"}]})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        key = self.headers.get("Authorization", "")
        self.engine.asked += 1
        try:
            body = json.loads(data)
        except ValueError:
            self._send(400, {"error": {"message": "no JSON"}})
            return
        if status := self.engine.refused(body):
            self._send(status, {"error": {"message": "no"}})
            return
        words, prompt, loaded = self.engine.answer(key, body)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": len(words),
            "prompt_tokens_details": {"cached_tokens": loaded},
        }
        if body.get("stream"):
            self._stream(key, body, self.engine.streamed(words), usage)
            return
        choice = {"text": "".join(words), "finish_reason": "length"}
        self._send(200, {"choices": [choice], "usage": usage})

    def _send(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, key: str, body: dict[str, Any], words: list[str], usage: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        events: list[dict[str, Any]] = [{"choices": [{"text": word}]} for word in words]
        events += [{"choices": [{"text": "", "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
        try:
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
                _SLOWLY.wait(0.001)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.engine.cut_off(
                self.engine.scope(key, body.get("cache_salt") or ""), str(body["prompt"]).split()
            )
        self.close_connection = True


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """The engine's URL while it is served."""
    handler = type("Handler", (_Handler,), {"engine": engine})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
