"""Values and buffers that end or change while they are in use."""

from __future__ import annotations

import threading
from functools import partial
from typing import Final

from mooncache.conformance.core.content import content_of, difference
from mooncache.conformance.core.verdicts import PromiseBrokenError, PromiseFamily, PromiseText
from mooncache.conformance.limits import attempt, together
from mooncache.conformance.store_bench import ReadCount, StoreBench, shown

_TRY_S: Final = 240.0
_PRESSURE: Final = 2.0
_BLOCKS_MIN: Final = 64
_BLOCK_MAX: Final = 1 << 20
_READERS: Final = 2
_VERSIONS: Final = 12
_LAPS_MAX: Final = 50
_READS_MIN: Final = 20
_READERS_TURN_S: Final = 0.02
_VERSION_BYTES: Final = 256 << 10


def _eviction(bench: StoreBench) -> str:
    capacity = int(bench.hook("capacity_bytes")())
    size = max(1, min(_BLOCK_MAX, capacity // _BLOCKS_MIN))
    keys = [bench.key("pressure") for _ in range(round(_PRESSURE * capacity / size))]
    counts, puts = ReadCount(), ReadCount()
    written = [0]
    over = threading.Event()

    def write() -> None:
        try:
            for number, key in enumerate(keys):
                bench.progress.work(f"{number * size >> 20} of {len(keys) * size >> 20} MiB")
                put = attempt(lambda k=key: bench.store.put(k, content_of(k, size)))  # type: ignore[misc]
                puts["found" if put.refusal is None else "failed"] += 1  # a full store may refuse
                written[0] = number + 1
        finally:
            over.set()

    def read(number: int) -> None:
        rng = bench.rng(f"pressure {number}")
        client = bench.clients()[number % len(bench.clients())]
        while not over.is_set():
            if written[0]:
                recent = max(0, written[0] - 8) if rng.random() < 0.5 else 0
                bench.may_read(client, keys[rng.randrange(recent, written[0])], size, counts)

    bench.other_client()
    together(_TRY_S, "reads under pressure", [write, *(partial(read, number) for number in range(_READERS))])
    last = ReadCount()
    for key in keys:
        bench.may_read(bench.store, key, size, last)
    if not last["found"] or not puts["found"]:
        raise PromiseBrokenError(
            f"nothing is readable afterwards: {last.text()}; {puts['failed']} puts were refused"
        )
    if last["found"] * size > capacity * 1.01:
        raise PromiseBrokenError(
            f"{last['found']} values of {size} bytes are there, more than the {capacity} bytes that it says to hold"
        )
    _remove(bench, keys)
    return (
        f"{len(keys) * size >> 20} MiB through {capacity >> 20}: while it was written {counts.text()}; afterwards "
        f"{last.text()}; {puts['failed']} puts refused"
    )


def _remove(bench: StoreBench, keys: list[bytes]) -> None:
    for key in keys:
        bench.store.remove(key)


def _change_while_read(bench: StoreBench) -> str:
    keys = [bench.key("change") for _ in range(3)]
    counts = ReadCount()
    over = threading.Event()
    contents = {
        key: [content_of(key, _VERSION_BYTES, version) for version in range(_VERSIONS)] for key in keys
    }

    def write() -> None:
        try:
            for lap in range(bench.rounds + _LAPS_MAX):
                if lap >= bench.rounds and counts["found"] >= _READS_MIN:
                    break
                over.wait(_READERS_TURN_S)  # a fast store would change its values before a reader has begun
                for version in range(_VERSIONS):
                    for key in keys:
                        bench.store.put(key, contents[key][version])  # over what is there, which may stay
                        bench.store.remove(key)
                        bench.store.put(key, contents[key][version])
        finally:
            over.set()

    def read(number: int) -> None:
        client = bench.clients()[number % len(bench.clients())]
        room = bytearray(_VERSION_BYTES)
        while not over.is_set():
            for key in keys:
                bench.may_read(client, key, _VERSION_BYTES, counts, _VERSIONS)
                got = attempt(lambda k=key: client.get_into(k, memoryview(room)))  # type: ignore[misc]
                if got.answer is not None and bytes(room) not in contents[key]:
                    raise PromiseBrokenError(f"{shown(key)}: get_into reads a mix of values")
                counts["failed" if got.refusal else "missed" if got.answer is None else "found"] += 1

    bench.other_client()
    together(_TRY_S, "reads of values that change", [write, lambda: read(0), lambda: read(1)])
    if not counts["found"]:
        raise PromiseBrokenError(f"no read found a value while it changed: {counts.text()}")
    for key in keys:
        found = {bytes(client.get(key) or b"") for client in bench.clients()}
        if len(found) > 1 or not found <= set(contents[key]):
            raise PromiseBrokenError(
                f"{shown(key)}: after the last put it is not one whole value for all clients"
            )
    _remove(bench, keys)
    return (
        f"3 keys with {_VERSIONS} values each, put over, removed and put: {counts.text()}, each a whole value"
    )


def _reused_source(bench: StoreBench) -> str:
    source = bytearray(_VERSION_BYTES)
    keys = [bench.key("source") for _ in range(16)]
    for key in keys:
        source[:] = content_of(key, len(source))
        bench.store.put(key, source)
        source[:] = bytes(len(source))
    for client in bench.clients():
        for key in keys:
            bench.must_read(key, content_of(key, len(source)), client)
    _remove(bench, keys)
    return f"{len(keys)} puts out of one buffer, which was overwritten as soon as each had returned"


def _settled_destination(bench: StoreBench) -> str:
    keys = [bench.key("settled") for _ in range(24)]
    size = 64 << 10
    for key in keys:
        bench.store.put(key, content_of(key, size))
    values = [bench.store.get(key) for key in keys]
    rooms = []
    for number, key in enumerate(keys):
        room = bytearray(size)
        bench.store.get_into(key if number % 3 else bench.key("never"), memoryview(room))
        room[:] = number.to_bytes(1, "little") * size  # it is the caller's again
        rooms.append(room)
    _remove(bench, keys)
    others = [bench.key("later") for _ in range(48)]
    for key in others:
        bench.store.put(key, content_of(key, size))
        bench.store.get(key)
    for number, (key, value, room) in enumerate(zip(keys, values, rooms, strict=True)):
        if value is None or (wrong := difference(value, content_of(key, size))):
            raise PromiseBrokenError(
                f"a value that was read before its removal changed: {wrong if value else 'gone'}"
            )
        if room.count(number) != size:
            raise PromiseBrokenError("a destination changed after get_into had returned")
    _remove(bench, others)
    return f"{len(keys)} values and destinations stay as they are while their keys go and {len(others)} values come"


PROMISES: Final = {
    PromiseText(
        "reused-source",
        PromiseFamily.LIFETIMES,
        "A buffer is the caller's again when put returns: to overwrite it changes nothing that is stored.",
    ): _reused_source,
    PromiseText(
        "settled-destination",
        PromiseFamily.LIFETIMES,
        "What was read never changes afterwards, whatever becomes of its key.",
    ): _settled_destination,
    PromiseText(
        "change-while-read",
        PromiseFamily.LIFETIMES,
        "A value that is replaced or removed while it is read is read as a whole, old or new, or is missing.",
    ): _change_while_read,
    PromiseText(
        "eviction",
        PromiseFamily.LIFETIMES,
        "More than fits is refused or makes others go: every read is right or a miss, meanwhile and afterwards.",
    ): _eviction,
}
