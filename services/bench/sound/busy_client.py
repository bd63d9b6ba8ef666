"""Small gets of one thread while eight others of the same client read in bulk: who waits for whom?

The same gets beside eight threads that only copy memory tell how much of it is the operating system, which shares
few cores among nine threads.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median, quantiles

import mooncache
from mooncache.bench.store.ours import start_cluster
from mooncache.reporting.rows import Row, bar_row

BULK_THREADS = 8
_BULK_BLOCKS = 16
_BULK_BYTES = 1 << 20
_SMALL_BYTES = 4 << 10
_WARM_UP = 200
_AT_MOST = 10.0


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """p99 of a 4 KiB get alone, beside bulk and beside copying, over TCP and over shared memory; medians of rounds."""
    gets, rounds = (500, 3) if quick else (2000, 7)
    rows: list[Row] = []
    with start_cluster(nodes=1, capacity_bytes=256 << 20) as cluster:
        for shm in (False, True):
            way = "shared memory" if shm else "TCP"
            with mooncache.connect(**cluster.client_settings(), shm=shm, timeout_s=60.0) as client:
                small, bulk = _fill(client)
                alone, beside, copying, rates = [], [], [], []
                for number in range(rounds):
                    progress(f"{way}, round {number + 1} of {rounds}")
                    alone.append(_p99_us(client, small, gets))
                    with _busy(_copier):
                        copying.append(_p99_us(client, small, gets))
                    with _busy(partial(_reader, client, bulk)) as moved_bytes:
                        before_bytes, started_s = moved_bytes(), time.perf_counter()
                        beside.append(_p99_us(client, small, gets))
                        rates.append((moved_bytes() - before_bytes) / (time.perf_counter() - started_s))
            rows += _rows(way, median(alone), median(copying), median(beside), median(rates))
    return rows


def _rows(way: str, alone_us: float, copying_us: float, beside_us: float, bytes_per_s: float) -> list[Row]:
    against = f"4 KiB get alone, {way}, p99"
    return [
        Row(against, alone_us, "us"),
        bar_row(
            f"4 KiB get beside {BULK_THREADS} threads that only copy memory (no Mooncache), {way}, p99",
            copying_us,
            "us",
            against=against,
            reference=alone_us,
        ),
        bar_row(
            f"4 KiB get beside {BULK_THREADS} bulk threads, {way}, p99",
            beside_us,
            "us",
            against=against,
            reference=alone_us,
            at_most=_AT_MOST,
        ),
        Row(f"bulk of the {BULK_THREADS} threads meanwhile, {way}", bytes_per_s / 1e9, "GB/s"),
    ]


def _fill(client: mooncache.Client) -> tuple[bytes, list[bytes]]:
    """Store the blocks to read. Returns the small one's key and those of the bulk."""
    small, *bulk = (os.urandom(32) for _ in range(1 + _BULK_BLOCKS))
    client.put(small, os.urandom(_SMALL_BYTES))
    client.put_many(bulk, [os.urandom(_BULK_BYTES) for _ in bulk]).raise_for_errors()
    return small, bulk


def _p99_us(client: mooncache.Client, key: bytes, gets: int) -> float:
    target = memoryview(bytearray(_SMALL_BYTES))
    times = []
    for number in range(_WARM_UP + gets):
        started = time.perf_counter()
        client.get_into(key, target)
        if number >= _WARM_UP:
            times.append(time.perf_counter() - started)
    return quantiles(times, n=100)[-1] * 1e6


def _reader(client: mooncache.Client, keys: list[bytes]) -> Callable[[], object]:
    """Read all bulk once, into separate memory."""
    targets = [memoryview(bytearray(_BULK_BYTES)) for _ in keys]
    return lambda: client.get_many_into(keys, targets)


def _copier() -> Callable[[], object]:
    """Copy as many bytes without the GIL, as the client does."""
    size = _BULK_BLOCKS * _BULK_BYTES
    source, target = ((ctypes.c_char * size).from_buffer(bytearray(size)) for _ in range(2))
    return lambda: ctypes.memmove(target, source, size)


@contextmanager
def _busy(make_work: Callable[[], Callable[[], object]]) -> Iterator[Callable[[], int]]:
    """Threads that work without end, each once before entry; yields what tells the bytes that all have moved."""
    stop = threading.Event()
    started = threading.Barrier(BULK_THREADS + 1)
    done = [0] * BULK_THREADS

    def repeat(number: int) -> None:
        work = make_work()
        work()
        started.wait()
        while not stop.is_set():
            work()
            done[number] += 1

    threads = [
        threading.Thread(target=repeat, args=(number,), name=f"bulk-{number}")
        for number in range(BULK_THREADS)
    ]
    for thread in threads:
        thread.start()
    try:
        started.wait()
        yield lambda: sum(done) * _BULK_BLOCKS * _BULK_BYTES
    finally:
        stop.set()
        for thread in threads:
            thread.join()
