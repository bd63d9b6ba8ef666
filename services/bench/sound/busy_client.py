"""Small gets of one thread while eight others of the same client read in bulk: who waits for whom?"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles

import mooncache
from mooncache.bench.rows import Row, bar_row
from mooncache.bench.store.ours import start_cluster

BULK_THREADS = 8
_BULK_BLOCKS = 16
_BULK_BYTES = 1 << 20
_SMALL_BYTES = 4 << 10
_WARM_UP = 200
_AT_MOST = 10.0


def run(quick: bool, tell: Callable[[str], None]) -> list[Row]:
    """p99 of a 4 KiB get alone and beside bulk, over TCP and over shared memory; medians of the rounds."""
    gets, rounds = (500, 3) if quick else (2000, 7)
    rows: list[Row] = []
    with start_cluster(nodes=1, capacity_bytes=256 << 20) as cluster:
        for shm in (False, True):
            way = "shared memory" if shm else "TCP"
            with mooncache.connect(**cluster.client_settings(), shm=shm, timeout_s=60.0) as client:
                small, bulk = _fill(client)
                alone, beside = [], []
                for number in range(rounds):
                    tell(f"{way}, round {number + 1} of {rounds}")
                    alone.append(_p99_us(client, small, gets))
                    with _bulk_readers(client, bulk):
                        beside.append(_p99_us(client, small, gets))
            rows += _rows(way, median(alone), median(beside))
    return rows


def _rows(way: str, alone_us: float, beside_us: float) -> list[Row]:
    against = f"4 KiB get alone, {way}, p99"
    return [
        Row(against, alone_us, "us"),
        bar_row(
            f"4 KiB get beside {BULK_THREADS} bulk threads, {way}, p99",
            beside_us,
            "us",
            against=against,
            reference=alone_us,
            at_most=_AT_MOST,
        ),
    ]


def _fill(client: mooncache.Client) -> tuple[bytes, list[bytes]]:
    """Stores the blocks that are read; returns the small one's key and those of the bulk."""
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


@contextmanager
def _bulk_readers(client: mooncache.Client, keys: list[bytes]) -> Iterator[None]:
    """Threads that read the bulk again and again, each into memory of its own; every one has read once at entry."""
    stop = threading.Event()
    started = threading.Barrier(BULK_THREADS + 1)

    def read() -> None:
        targets = [memoryview(bytearray(_BULK_BYTES)) for _ in keys]
        client.get_many_into(keys, targets)
        started.wait()
        while not stop.is_set():
            client.get_many_into(keys, targets)

    threads = [threading.Thread(target=read, name=f"bulk-{number}") for number in range(BULK_THREADS)]
    for thread in threads:
        thread.start()
    try:
        started.wait()
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
