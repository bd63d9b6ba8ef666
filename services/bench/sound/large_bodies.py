"""/health of a gateway, and its memory, while one tenant sends the largest bodies that it may.

The bodies are those that cost most to read: token ids beyond the model's length, half a million small messages, and
long text. They come from several connections at once, without a pause, whatever they are answered. The gateway and the
process that reads bodies beside it are measured together, before and after.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from mooncache.bench.gateway.stack import Stack, start_stack
from mooncache.bench.worker import WorkerError, resident_bytes
from mooncache.errors import EngineFailed
from mooncache.reporting.rows import Row, bar_row

# As `gateway.body_bytes_max` and its neighbours have it for the null engines' length of 2^20 tokens.
_BODY_BYTES: Final = (4 << 20) + 16 * (1 << 20)
_SENDERS: Final = 4
_CALL_S: Final = 60.0
_PROBE_PAUSE_S: Final = 0.005
_BAR_MS: Final = 50.0
_BAR_MEMORY: Final = 1.1
_SETTLE_S: Final = 10.0


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Three rows: /health alone, beside the bodies, and the memory that is left.

    Raises:
        EngineFailed: gateway, conductor or engines did not start.
    """
    with ExitStack() as resources:
        progress("starting conductor, gateway and null engines")
        try:
            stack = resources.enter_context(start_stack())
        except WorkerError as error:
            raise EngineFailed(str(error)) from None
        bodies = _bodies(stack.gateway.model)
        _send(
            stack,
            "/v1/completions",
            b'{"model":"%b","prompt":"%b"}' % (stack.gateway.model.encode(), b"a " * 150_000),
        )
        time.sleep(1.0)
        before_bytes = _memory_bytes(stack.gateway_pid)
        seconds = 3.0 if quick else 20.0
        progress("/health alone")
        alone_ms = _probe(stack, seconds)
        progress(f"/health beside bodies of {_BODY_BYTES >> 20} MiB")
        stop = threading.Event()
        senders = [
            threading.Thread(target=_flood, args=(stack, bodies, number, stop), daemon=True)
            for number in range(_SENDERS)
        ]
        for sender in senders:
            sender.start()
        try:
            beside_ms = _probe(stack, seconds)
        finally:
            stop.set()
            for sender in senders:
                sender.join(_CALL_S)
        after_bytes = _settled(stack.gateway_pid, before_bytes * _BAR_MEMORY)
    return [
        Row("gateway /health p99, alone", alone_ms, "ms"),
        bar_row("gateway /health p99 beside one tenant's largest bodies", beside_ms, "ms", at_most=_BAR_MS),
        Row("gateway memory before the largest bodies", before_bytes / (1 << 20), "MiB"),
        bar_row(
            "gateway memory after the largest bodies",
            after_bytes / (1 << 20),
            "MiB",
            against="before",
            reference=before_bytes / (1 << 20),
            at_most=_BAR_MEMORY,
        ),
    ]


def _bodies(model: str) -> list[tuple[str, bytes]]:
    """Paths and bodies of the largest size."""
    head = b'{"model":"%b","max_tokens":1,' % model.encode()
    room = _BODY_BYTES - len(head) - 64
    ids = b'"prompt":[' + b"1," * (room // 2) + b"1]}"
    message = b'{"role":"user","content":"a b c d"},'
    messages = b'"messages":[' + (message * (room // len(message)))[:-1] + b"]}"
    text = b'"prompt":"' + (b"so it goes " * (room // 11)) + b'"}'
    return [
        ("/v1/completions", head + ids),
        ("/v1/chat/completions", head + messages),
        ("/v1/completions", head + text),
    ]


def _flood(stack: Stack, bodies: list[tuple[str, bytes]], number: int, stop: threading.Event) -> None:
    while not stop.is_set():
        path, body = bodies[number % len(bodies)]
        _send(stack, path, body)
        number += 1


def _send(stack: Stack, path: str, body: bytes) -> None:
    """One request; what it is answered does not matter, and neither does a connection that is closed on it."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.gateway.port, timeout=_CALL_S)
    headers = {"authorization": f"Bearer {stack.gateway.key}", "content-type": "application/json"}
    try:
        connection.request("POST", path, body, headers)
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        time.sleep(_PROBE_PAUSE_S)
    finally:
        connection.close()


def _probe(stack: Stack, seconds: float) -> float:
    """99th percentile of GET /health in milliseconds. Raises EngineFailed."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.gateway.port, timeout=_CALL_S)
    times_ms: list[float] = []
    end_s = time.monotonic() + seconds
    try:
        while time.monotonic() < end_s:
            begun_s = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            times_ms.append((time.perf_counter() - begun_s) * 1e3)
            time.sleep(_PROBE_PAUSE_S)
    except (OSError, http.client.HTTPException) as error:
        raise EngineFailed(f"The gateway did not answer /health: {error!r}") from None
    finally:
        connection.close()
    times_ms.sort()
    return times_ms[min(len(times_ms) - 1, int(len(times_ms) * 0.99))]


def _settled(pid: int, enough_bytes: float) -> int:
    """Memory once it is back, or after a while."""
    until_s = time.monotonic() + _SETTLE_S
    while (now_bytes := _memory_bytes(pid)) > enough_bytes and time.monotonic() < until_s:
        time.sleep(0.1)
    return now_bytes


def _memory_bytes(pid: int) -> int:
    """Resident memory of a process and its children."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        pids += [int(word) for word in (task / "children").read_text().split()]
    return sum(resident_bytes(one) for one in pids)
