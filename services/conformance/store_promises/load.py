"""Many at once: each answer is checked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from mooncache.conformance.core.content import content_of, difference, version_of
from mooncache.conformance.core.verdicts import PromiseBrokenError, PromiseFamily, PromiseText
from mooncache.conformance.limits import together
from mooncache.conformance.store_bench import ReadCount, StoreBench, shown

_TRY_S: Final = 240.0
_THREADS: Final = 6
_STEPS: Final = 60
_SIZES: Final = (100, 5_000, 70_000)
_RACES: Final = 12
_RACERS: Final = 4


def _mixed(bench: StoreBench) -> str:
    shared = [bench.key("shared") for _ in range(12)]
    counts = ReadCount()
    bench.other_client()

    def worker(number: int) -> Callable[[], None]:
        rng = bench.rng(f"mixed {number}")
        client = bench.clients()[number % len(bench.clients())]

        def work() -> None:
            for _ in range(_STEPS * bench.rounds):
                key = rng.choice(shared)
                size = _SIZES[shared.index(key) % len(_SIZES)]
                match rng.randrange(4):
                    case 0:
                        client.put(key, content_of(key, size))
                    case 1:
                        client.remove(key)
                    case _:
                        bench.may_read(client, key, size, counts)
                own = bench.key(f"own-{number}")
                client.put(own, content_of(own, size))
                bench.must_read(own, content_of(own, size), client)
                counts["found"] += 1
                client.remove(own)
                bench.must_miss(own, "was removed", client)

        return work

    together(_TRY_S, "mixed load", [worker(number) for number in range(_THREADS)])
    for key in shared:
        bench.store.remove(key)
    steps = _THREADS * _STEPS * bench.rounds
    return f"{_THREADS} threads, {len(bench.clients())} clients, {steps} steps: {counts.text()}"


def _racers(bench: StoreBench) -> str:
    size = 150_000
    bench.other_client()
    kept: set[int] = set()
    for _ in range(_RACES * bench.rounds):
        key = bench.key("race")
        gate = threading.Barrier(_RACERS)

        def race(version: int, key: bytes = key, gate: threading.Barrier = gate) -> None:
            client = bench.clients()[version % len(bench.clients())]
            gate.wait(_TRY_S)
            client.put(key, content_of(key, size, version))
            found = client.get(key)
            if found is None:
                raise PromiseBrokenError(f"{shown(key)} was put, and is missing")
            if version_of(found, key, size, range(_RACERS)) is None:
                raise PromiseBrokenError(
                    f"{shown(key)} is a mix: {difference(found, content_of(key, size, version))}"
                )

        together(_TRY_S, "writers of one key", [lambda n=n: race(n) for n in range(_RACERS)])  # type: ignore[misc]
        found = {version_of(client.get(key) or b"", key, size, range(_RACERS)) for client in bench.clients()}
        if len(found) != 1 or None in found:
            raise PromiseBrokenError(
                f"{shown(key)}: when all puts have returned, clients read different values"
            )
        kept |= {version for version in found if version is not None}
        bench.store.remove(key)
    return f"{_RACES * bench.rounds} races of {_RACERS} writers: always one whole value, the same for all clients"


PROMISES: Final = {
    PromiseText(
        "mixed-load",
        PromiseFamily.LOAD,
        "Under concurrent puts, reads and removals each answer is right, and a writer finds what it has put.",
    ): _mixed,
    PromiseText(
        "racing-writers",
        PromiseFamily.LOAD,
        "Writers of different values under one key leave one of them, as a whole, for every client.",
    ): _racers,
}
