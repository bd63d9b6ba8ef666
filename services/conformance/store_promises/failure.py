"""A node that is full, stopped or dead: errors in time, never wrong bytes, and an end of it."""

from __future__ import annotations

from collections import Counter
from typing import Final

from mooncache.conformance.core.content import content_of, difference
from mooncache.conformance.core.verdicts import PromiseBrokenError, PromiseFamily, PromiseText
from mooncache.conformance.store_bench import ReadCount, StoreBench, shown

_SIZE: Final = 50_000
_KEYS: Final = 24
RECOVERY_S: Final = 90.0
_CALLS_MEANWHILE: Final = 6


def _too_large(bench: StoreBench) -> str:
    capacity = int(bench.hook("capacity_bytes")())
    before, key = bench.key("before"), bench.key("too-large")
    bench.store.put(before, content_of(before, _SIZE))
    ended = bench.timed("a put of more than fits", lambda: bench.store.put(key, bytes(capacity + 1)))
    if ended == "done":
        raise PromiseBrokenError(f"a put of {capacity + 1} bytes succeeded where {capacity} fit")
    bench.must_miss(key, "was refused as too large")
    counts = ReadCount()
    bench.may_read(bench.store, before, _SIZE, counts)
    after = bench.key("after")
    bench.store.put(after, content_of(after, _SIZE))
    bench.must_read(after, content_of(after, _SIZE))
    return f"{capacity + 1} bytes: {ended}; the next put is taken"


def _broken_node(bench: StoreBench, breaks: str, mends: str) -> str:
    break_it, mend_it = bench.hook(breaks), bench.hook(mends)
    keys = [bench.key(breaks) for _ in range(_KEYS)]
    for key in keys:
        bench.store.put(key, content_of(key, _SIZE))
    bench.other_client()
    reads, puts = ReadCount(), Counter[str]()
    break_it()
    try:
        for client in bench.clients():
            for key in keys[:_CALLS_MEANWHILE]:
                bench.timed("get", lambda c=client, k=key: bench.may_read(c, k, _SIZE, reads))  # type: ignore[misc]
                fresh = bench.key("meanwhile")
                ended = bench.timed("put", lambda c=client, k=fresh: c.put(k, content_of(k, _SIZE)))  # type: ignore[misc]
                puts[ended] += 1
                bench.timed("get", lambda c=client, k=fresh: bench.may_read(c, k, _SIZE, reads))  # type: ignore[misc]
                bench.timed("exist", lambda c=client, k=key: c.exist(k))  # type: ignore[misc]
    finally:
        mend_it()
    took_s = bench.until(RECOVERY_S, "puts and reads afterwards", lambda: works(bench))
    for key in keys:
        bench.may_read(bench.store, key, _SIZE, reads)
    ended = ", ".join(f"{count} {name}" for name, count in sorted(puts.items()))
    return f"meanwhile and afterwards {reads.text()}; puts meanwhile: {ended}; all works {took_s:.1f} s after the mend"


def works(bench: StoreBench) -> None:
    """Values of every size are put and read again, by every client; LookupError when one is missing."""
    for client in bench.clients():
        for _ in range(4):
            key = bench.key("works")
            client.put(key, content_of(key, _SIZE))
            found = client.get(key)
            if found is None:
                raise LookupError(f"{shown(key)} was put, and is missing")
            if wrong := difference(found, content_of(key, _SIZE)):
                raise PromiseBrokenError(f"after the mend, {shown(key)}: {wrong}")
            client.remove(key)


def _stopped(bench: StoreBench) -> str:
    return _broken_node(bench, "stop_node", "resume_node")


def _killed(bench: StoreBench) -> str:
    return _broken_node(bench, "kill_node", "restart_node")


PROMISES: Final = {
    PromiseText(
        "too-large",
        PromiseFamily.FAILURE,
        "A value that cannot fit is refused in time, is invisible, and harms nothing else.",
    ): _too_large,
    PromiseText(
        "stopped-node",
        PromiseFamily.FAILURE,
        "While a node is stopped every call ends in time, right, with a miss or an error; afterwards all works.",
    ): _stopped,
    PromiseText(
        "killed-node",
        PromiseFamily.FAILURE,
        "When a node is killed every call ends in time, right, with a miss or an error; after its start all works.",
    ): _killed,
}
