"""Gets and puts of blocks in memory: with the tier on over off, and small gets beside a disk that is busy.

Two pools run at the same time, one with a tier and one without, and are measured in turn. Beside the busy disk a
process reads blocks that are on the disk alone, as fast as it can. A process that only copies memory, in pieces as
large and at the same rate, tells how much of that is the processor; fio, which reads as many bytes of the same disk
while the tier has nothing to do, how much is the machine.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import mooncache
from mooncache.bench.fio import ENGINES, fio, fio_beside
from mooncache.bench.on_over_off import on_over_off
from mooncache.bench.ssd_pool import disk_counters, put_at_the_disks_pace, settle, ssd_pool
from mooncache.bench.store.ours import OurClient
from mooncache.errors import NodeUnavailable
from mooncache.reporting.rows import Row, bar_row

_BESIDE: Final = 1.2
_SMALL, _LARGE = 4 << 10, 1 << 20
_BATCH: Final = 16
_DEPTH: Final = 32
_START_S: Final = 60.0
_FIO_START_S: Final = 0.5
_CALLS_MIN: Final = 100
_AFTER_MISSES_S: Final = 0.01


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Medians of rounds of each kind, and the p99 alone and beside the disk."""
    rounds, calls = (4, 60) if quick else (100, 200)
    memory_bytes = (64 if quick else 256) << 20
    with ExitStack() as stack:
        pools = {}
        for on in (False, True):
            progress("starting a pool " + ("with" if on else "without") + " a tier")
            pools[on] = stack.enter_context(ssd_pool(memory_bytes, on * 4 * memory_bytes))
        clients = {
            on: stack.enter_context(mooncache.connect(**pool.client_settings(), timeout_s=60.0))
            for on, pool in pools.items()
        }
        rows = on_over_off(
            {on: OurClient(client) for on, client in clients.items()}, "tier", rounds, calls, progress
        )
        progress("filling the disk")
        cold = put_at_the_disks_pace(pools[True], clients[True], 3 * (memory_bytes >> 20), _LARGE)
        settle(pools[True])
        return rows + _beside(
            pools[True], clients[True], cold, 1 if quick else 7, 0.2 if quick else 1.5, progress
        )


def _beside(
    pool: Any,
    client: mooncache.Client,
    cold: list[bytes],
    rounds: int,
    seconds: float,
    progress: Callable[[str], None],
) -> list[Row]:
    """Rows of the p99 of small gets, alone and beside reads of the disk."""
    small = os.urandom(32)
    client.put(small, os.urandom(_SMALL))
    client.pin(small, ttl_s=600.0)
    alone, beside, copying, bare, moved = [], [], [], [], []
    bare_disk = _BareDisk(len(cold) * _LARGE)
    for number in range(rounds):
        progress(f"beside the disk, round {number + 1} of {rounds}")
        alone.append(small_get_p99_us(client, small, seconds))
        before, begun_s = disk_counters(pool)["ssd_read_bytes"], time.perf_counter()
        with reader_of(pool, cold):
            beside.append(small_get_p99_us(client, small, seconds))
            spent_s = time.perf_counter() - begun_s
            moved.append((disk_counters(pool)["ssd_read_bytes"] - before) / spent_s)
        with _copier(median(moved)):
            copying.append(small_get_p99_us(client, small, seconds))
        if not bare_disk.why_not:
            with bare_disk.read(median(moved)):
                bare.append(small_get_p99_us(client, small, seconds))
    bare_disk.end()
    against = "4 KiB get from memory, p99, alone"
    return [
        Row(against, median(alone), "us"),
        bar_row(
            "4 KiB get from memory, p99, beside a process that copies as many bytes (no Mooncache)",
            median(copying),
            "us",
            against=against,
            reference=median(alone),
        ),
        bar_row(
            "4 KiB get from memory, p99, beside a process that reads from the disk",
            median(beside),
            "us",
            against=against,
            reference=median(alone),
            at_most=_BESIDE,
        ),
        bare_disk.row(bare, against, median(alone)),
        Row("that process meanwhile, from the disk", median(moved) / 1e6, "MB/s"),
    ]


class _BareDisk:
    """fio on the disk of the pool; `why_not`: it cannot run here."""

    def __init__(self, file_bytes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mooncache-bench-beside-")
        self._file, self._file_bytes = Path(self._folder.name) / "fio", file_bytes
        made = fio(
            self._file,
            ENGINES[0],
            "randread",
            block_bytes=_LARGE,
            file_bytes=file_bytes,
            depth=_DEPTH,
            seconds=_FIO_START_S,
        )
        self.why_not = made if isinstance(made, str) else ""

    @contextmanager
    def read(self, bytes_per_s: float) -> Iterator[None]:
        """fio is at work when this yields."""
        with fio_beside(
            self._file, block_bytes=_LARGE, file_bytes=self._file_bytes, depth=_DEPTH, bytes_per_s=bytes_per_s
        ):
            time.sleep(_FIO_START_S)
            yield

    def row(self, p99_us: list[float], against: str, alone_us: float) -> Row:
        """What small gets took beside it."""
        name = "4 KiB get from memory, p99, beside fio that reads as many bytes from that disk (no tier)"
        if self.why_not:
            return Row(f"{name}: {self.why_not}", 0.0, "us")
        return bar_row(name, median(p99_us), "us", against=against, reference=alone_us)

    def end(self) -> None:
        self._folder.cleanup()


def small_get_p99_us(client: mooncache.Client, key: bytes, seconds: float) -> float:
    """p99 of gets one after the other. Raises NodeUnavailable when the block is not there."""
    target = memoryview(bytearray(_SMALL))
    times: list[float] = []
    until_s = time.perf_counter() + seconds
    while len(times) < _CALLS_MIN or time.perf_counter() < until_s:
        started = time.perf_counter()
        if client.get_into(key, target) is None:
            raise NodeUnavailable("The block that is read has left the memory.")
        times.append(time.perf_counter() - started)
    return quantiles(times, n=100)[-1] * 1e6


@contextmanager
def reader_of(pool: Any, keys: list[bytes]) -> Iterator[None]:
    """A process that gets these blocks of 1 MiB, over and over, where they lie in shared memory: it copies no byte, as
    if it were on another host. Raises NodeUnavailable."""
    with _process(_read, (pool.client_settings(), keys)):
        yield


def _read(settings: dict[str, Any], keys: list[bytes], ready: Connection) -> None:
    batch = 2 * _BATCH
    with mooncache.connect(**settings, timeout_s=60.0) as client:
        client.get_many_views(keys[:batch])
        ready.send(True)
        while True:
            for at in range(0, len(keys) - batch + 1, batch):
                if not client.get_many_views(keys[at : at + batch]).hits:
                    time.sleep(_AFTER_MISSES_S)  # what is missing is computed elsewhere


@contextmanager
def _copier(bytes_per_s: float) -> Iterator[None]:
    """A process that copies what a node copies for each byte that comes from a disk."""
    with _process(_copy, (bytes_per_s,)):
        yield


def _copy(bytes_per_s: float, ready: Connection) -> None:
    source, target = memoryview(bytearray(_LARGE)), memoryview(bytearray(_LARGE))
    ready.send(True)
    next_s = time.perf_counter()
    while True:
        target[:] = source
        next_s = max(next_s + _LARGE / bytes_per_s, time.perf_counter() - 0.1)
        time.sleep(max(0.0, next_s - time.perf_counter()))


@contextmanager
def _process(target: Callable[..., None], arguments: tuple[object, ...]) -> Iterator[None]:
    """A process that is at work when this yields, and gone afterwards. Raises NodeUnavailable."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, theirs), name="beside")
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_S):
            raise NodeUnavailable("A process beside the gets did not start.")
        ours.recv()
        yield
    finally:
        process.kill()
        process.join()
