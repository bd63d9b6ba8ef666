"""What is read is what was written: sizes, buffers, removals, writers that do not finish."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any, Final

from mooncache.conformance.core.content import content_of, difference
from mooncache.conformance.core.verdicts import (
    NotOfferedError,
    PromiseBrokenError,
    PromiseFamily,
    PromiseText,
)
from mooncache.conformance.limits import attempt, within
from mooncache.conformance.store_bench import StoreBench, shown
from mooncache.conformance.store_contract import name_of

_SIZES: Final = (1, 2, 63, 64, 65, 511, 4095, 4096, 4097, 65_535, 65_536, 65_537, (1 << 20) + 1)
_GUARD: Final = 64
_GUARD_BYTE: Final = b"\xa5"
_WRITER_BYTES: Final = 1 << 20
_WRITER_START_S: Final = 300.0
_KILLS: Final = 2


def _round_trip(bench: StoreBench) -> str:
    values: list[tuple[bytes, bytes]] = []
    for size in _SIZES:
        for pattern in (b"", b"\0", b"\xff"):
            key = bench.key(f"size-{size}")
            values.append((key, pattern * size if pattern else content_of(key, size)))
    for key, value in values:
        bench.store.put(key, value)
    for client in bench.clients():
        for key, value in values:
            if not client.exist(key):
                raise PromiseBrokenError(f"{shown(key)} was put, and is said not to exist")
            bench.must_read(key, value, client)
            room = bytearray(_GUARD_BYTE * (len(value) + 2 * _GUARD))
            count = client.get_into(key, memoryview(room)[_GUARD : _GUARD + len(value)])
            if count != len(value):
                raise PromiseBrokenError(f"get_into of {len(value)} bytes answered {count}")
            _check_room(room, value, "get_into")
    return (
        f"{len(values)} values of 1 to {max(_SIZES):,} bytes, by {len(bench.clients())} clients, in both ways"
    )


def _check_room(room: bytearray, value: bytes, what: str) -> None:
    if wrong := difference(bytes(room[_GUARD : _GUARD + len(value)]), value):
        raise PromiseBrokenError(f"{what}: {wrong}")
    if set(room[:_GUARD]) | set(room[_GUARD + len(value) :]) != set(_GUARD_BYTE):
        raise PromiseBrokenError(f"{what} of {len(value)} bytes wrote outside of the destination")


def _empty_value(bench: StoreBench) -> str:
    key = bench.key("empty")
    put = attempt(lambda: bench.store.put(key, b""))
    if put.refusal is not None:
        bench.must_miss(key, "was refused")
        return f"refused: {put.ended}"
    found = bench.store.get(key)
    if found is None:
        if bench.store.exist(key):
            raise PromiseBrokenError("an empty value exists, and cannot be read")
        return "accepted, and not stored"
    if found:
        raise PromiseBrokenError(f"an empty value is read as {len(found)} bytes")
    return "stored, and read as an empty value"


def _bounds(bench: StoreBench) -> str:
    refused = 0
    for size in (2, 4096, 300_000):
        key = bench.key("bounds")
        value = content_of(key, size)
        bench.store.put(key, value)
        room = bytearray(_GUARD_BYTE * (size + 1000 + 2 * _GUARD))
        count = bench.store.get_into(key, memoryview(room)[_GUARD : _GUARD + size + 1000])
        if count != size:
            raise PromiseBrokenError(f"get_into of {size} bytes into larger memory answered {count}")
        _check_room(room[: size + 2 * _GUARD], value, "get_into of larger memory")
        short = size // 2
        room = bytearray(_GUARD_BYTE * (size + 2 * _GUARD))
        narrow = memoryview(room)[_GUARD : _GUARD + short]
        count = attempt(partial(bench.store.get_into, key, narrow)).answer
        if count is not None:
            raise PromiseBrokenError(
                f"get_into of {size} bytes into {short} answered {count}: that is no whole value"
            )
        if set(room[_GUARD + short :]) != set(_GUARD_BYTE):
            raise PromiseBrokenError(f"get_into of {size} bytes into {short} wrote behind its end")
        refused += 1
    return f"memory that is larger: nothing behind the value changed; too small: refused {refused} times"


def _removed(bench: StoreBench) -> str:
    clients = bench.clients()
    for number in range(8):
        key = bench.key("removed")
        if bench.store.remove(key):
            raise PromiseBrokenError(
                f"a removal of {shown(key)}, which was never put, answered that it was there"
            )
        for version in range(3):
            value = content_of(key, 20_000, version)
            clients[version % len(clients)].put(key, value)
            for client in clients:
                bench.must_read(key, value, client)
            if not clients[(version + number) % len(clients)].remove(key):
                raise PromiseBrokenError(f"a removal of {shown(key)} answered that it was not there")
            for client in clients:
                bench.must_miss(key, "was removed", client)
                room = memoryview(bytearray(len(value)))
                if client.get_into(key, room) is not None:
                    raise PromiseBrokenError(f"{shown(key)} was removed, and get_into reads it")
    return f"8 keys, 3 values each, put and removed by {len(clients)} clients in turns"


def _unfinished(bench: StoreBench) -> str:
    begin = bench.hook("begin")
    size = 200_000
    for finish in ("abandon", "commit"):
        key = bench.key("partial")
        value = content_of(key, size)
        part = begin(key, size)
        part.write(0, value[: size // 2])
        for client in bench.clients():
            bench.must_miss(key, "is half written", client)
        if finish == "commit":
            part.write(size // 2, value[size // 2 :])
            bench.must_miss(key, "is not committed")
            part.commit()
            for client in bench.clients():
                bench.must_read(key, value, client)
            continue
        part.abandon()
        attempt(lambda p=part, v=value: p.write(size // 2, v[size // 2 :]))  # type: ignore[misc]
        if attempt(part.commit).refusal is None:
            raise PromiseBrokenError("a value that was abandoned could be committed afterwards")
        bench.must_miss(key, "was abandoned")
    key = bench.key("partial")
    part = begin(key, size)
    part.write(0, bytes(size // 2))
    attempt(part.commit)
    bench.must_miss(key, "was committed with a half that was never written")
    return "invisible before the commit, after it was abandoned, and when half of it was never written"


def _dead_writer(bench: StoreBench) -> str:
    config = bench.hook("attach_config")()
    whole = half = 0
    rng = bench.rng("kills")
    for number in range(_KILLS * bench.rounds):
        head = bench.key(f"dead-{number}").decode()
        started, done, half_key = _killed_writer(bench, config, head, 0.05 + rng.random() * 0.3)
        for place in range(started):
            key = f"{head}/{place}".encode()
            found = bench.store.get(key)
            if found is not None and (wrong := difference(found, content_of(key, _WRITER_BYTES))):
                raise PromiseBrokenError(f"a writer was killed, and of what it put: {wrong}")
            if found is None and place < done:
                raise PromiseBrokenError(f"value {place} of a killed writer was put, and is missing")
            whole += found is not None
            bench.store.remove(key)
        if half_key:
            bench.must_miss(half_key.encode(), "was half written when its writer was killed")
            half += 1
    return f"{_KILLS * bench.rounds} writers killed: {whole} values whole, {half} half written and invisible"


def _killed_writer(
    bench: StoreBench, config: dict[str, Any], head: str, more_s: float
) -> tuple[int, int, str]:
    """How many puts a writer in another process had begun and ended when it was killed, and the key of its half
    written value ("" when the store has none).
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "mooncache.conformance.writer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    order = {"store": name_of(bench.store), "config": config, "head": head, "size_bytes": _WRITER_BYTES}
    said: list[str] = []

    def follow() -> None:
        """Until the third put has begun."""
        assert child.stdout is not None
        for line in child.stdout:
            said.append(line.strip())
            if said[-1] == "begin 2":
                return
        raise NotOfferedError("a process of its own cannot be a client: it ended before it had put anything")

    try:
        child.stdin.write(json.dumps(order) + "\n")
        child.stdin.flush()
        within(_WRITER_START_S, "a writer in a process of its own", follow)
        time.sleep(more_s)
    finally:
        child.kill()
        rest = child.stdout.read()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    lines = said + rest.splitlines()
    half_key = next((line.removeprefix("half ") for line in lines if line.startswith("half ")), "")
    begun = len({line for line in lines if line.startswith("begin ")})
    return begun, sum(line.startswith("done ") for line in lines), half_key


PROMISES: Final = {
    PromiseText(
        "round-trip",
        PromiseFamily.BYTES,
        "What is read is what was written, at every size, by every client, as bytes and into memory.",
    ): _round_trip,
    PromiseText(
        "empty-value", PromiseFamily.BYTES, "An empty value is read as empty, is missing, or is refused."
    ): _empty_value,
    PromiseText(
        "bounds",
        PromiseFamily.BYTES,
        "No byte outside of a destination changes; what does not fit is never reported as read.",
    ): _bounds,
    PromiseText(
        "removed",
        PromiseFamily.BYTES,
        "What was removed is missing for every client, and a later value of its key is read as a whole.",
    ): _removed,
    PromiseText(
        "unfinished",
        PromiseFamily.BYTES,
        "A value that is not committed, was abandoned, or has a hole is invisible.",
    ): _unfinished,
    PromiseText(
        "dead-writer",
        PromiseFamily.BYTES,
        "A writer that is killed leaves whole values or nothing; what it had put stays.",
    ): _dead_writer,
}
