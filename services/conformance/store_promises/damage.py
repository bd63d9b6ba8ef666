"""Stored bytes that change behind the store's back: a miss or an error, never a wrong value."""

from __future__ import annotations

from typing import Final

from mooncache.conformance.core.content import content_of
from mooncache.conformance.core.verdicts import PromiseBrokenError, PromiseFamily, PromiseText
from mooncache.conformance.store_bench import ReadCount, StoreBench
from mooncache.conformance.store_promises.failure import RECOVERY_S, works

_BLOCKS: Final = 96
_SIZE: Final = 64 << 10


def _harmed(bench: StoreBench, name: str, unit: str) -> str:
    harm = bench.hook(name)
    keys = [bench.key(name) for _ in range(_BLOCKS)]
    for key in keys:
        bench.store.put(key, content_of(key, _SIZE))
    before = ReadCount()
    for key in keys:
        bench.may_read(bench.store, key, _SIZE, before)
    count = int(harm(bench.rng(name)))
    after = ReadCount()
    bench.other_client()
    bench.until(RECOVERY_S, "puts and reads afterwards", lambda: works(bench))
    for client in bench.clients():
        for key in keys:
            bench.may_read(client, key, _SIZE, after)
    if count <= 0:
        raise PromiseBrokenError(f"{name}() changed nothing, so nothing is shown")
    if after["found"] >= before["found"] * len(bench.clients()):
        raise PromiseBrokenError(f"{count} {unit} changed, and every value is as before: nothing is shown")
    return f"{count:,} {unit}: before {before.text()}; after it {after.text()}, none of them wrong"


def _flipped(bench: StoreBench) -> str:
    return _harmed(bench, "damage", "bits changed")


def _truncated(bench: StoreBench) -> str:
    return _harmed(bench, "truncate", "bytes cut off")


PROMISES: Final = {
    PromiseText(
        "flipped-bits",
        PromiseFamily.BYTES,
        "A value of which a stored bit changed is a miss or an error, never a wrong value.",
    ): _flipped,
    PromiseText(
        "truncated",
        PromiseFamily.BYTES,
        "A value of which the end is cut off is a miss or an error, never a short or wrong value.",
    ): _truncated,
}
