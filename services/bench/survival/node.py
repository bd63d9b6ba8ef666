"""One of eight nodes is slow, stopped or killed: the 99th percentile of gets of the other nodes' blocks, over before.

Two readers of one client: one reads blocks of single copy that lie on other nodes, the other one blocks of two copies,
some of them on the node in question. The same is done with and without hedged reads. A slow node runs for a hundredth
of the time.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import mooncache
from mooncache.bench.block_reads import BlockReads
from mooncache.bench.store.ours import start_cluster
from mooncache.client.results import MapNodeState
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import DeadlineExceeded
from mooncache.reporting.rows import Row, bar_row

_NODES: Final = 8
_VICTIM: Final = "node-1"
_BLOCK: Final = 16 << 10
_KEYS: Final = 512
_BEFORE_S: Final = 5.0
_AFTER_S: Final = 8.0
_FIRST_S: Final = 1.0
_PAUSE_S: Final = 0.001  # between two reads of a reader: processors of a small machine are not the limit
_CYCLE_S: Final = 0.05
_RUNNING_SHARE: Final = 0.01
_BACK_S: Final = 60.0
_HEDGE_PERCENT: Final = "MOONCACHE_CLIENT_HEDGE_PERCENT"
_FIRST_BAR: Final = 1.5
_LATER_BAR: Final = 1.2


@dataclass(frozen=True)
class _P99s:
    """99th percentiles in milliseconds: before the fault, in its first second, and later."""

    before: float
    first: float
    later: float
    failed: int


@contextmanager
def _slow(pool: EmbeddedCluster) -> Iterator[None]:
    """The node's process runs for a hundredth of the time."""
    pid, ended = pool.parts[_VICTIM].pid, threading.Event()

    def drive() -> None:
        while not ended.is_set():
            os.kill(pid, signal.SIGSTOP)
            ended.wait(_CYCLE_S * (1 - _RUNNING_SHARE))
            os.kill(pid, signal.SIGCONT)
            time.sleep(_CYCLE_S * _RUNNING_SHARE)

    thread = threading.Thread(target=drive, name="brake")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _stopped(pool: EmbeddedCluster) -> Iterator[None]:
    pool.kill(_VICTIM, signal.SIGSTOP)
    try:
        yield
    finally:
        pool.kill(_VICTIM, signal.SIGCONT)


@contextmanager
def _killed(pool: EmbeddedCluster) -> Iterator[None]:
    pool.kill(_VICTIM)
    try:
        yield
    finally:
        pool.restart(_VICTIM)


_FAULTS: Final = {"slow": _slow, "stopped": _stopped, "killed": _killed}


@contextmanager
def _hedge_percent(percent: int) -> Iterator[None]:
    """For clients that are made meanwhile; a client takes this setting from the configuration alone."""
    os.environ[_HEDGE_PERCENT] = str(percent)
    try:
        yield
    finally:
        del os.environ[_HEDGE_PERCENT]


def _await_nodes(client: mooncache.Client) -> None:
    end_s = time.monotonic() + _BACK_S
    while sum(node.state == MapNodeState.ACTIVE for node in client.nodes()) < _NODES:
        if time.monotonic() > end_s:
            raise DeadlineExceeded(f"{_VICTIM} did not come back within {_BACK_S:g} s.")
        time.sleep(0.1)


def _store(client: mooncache.Client) -> tuple[list[str], list[str]]:
    """Keys of blocks with one copy that lie on other nodes, and keys of blocks with two copies."""
    values = [os.urandom(_BLOCK)] * _KEYS
    single, double = [f"single-{i}" for i in range(_KEYS)], [f"double-{i}" for i in range(_KEYS)]
    client.remove_many(single + double)
    placed = client.put_many(single, values)
    placed.raise_for_errors()
    client.put_many(double, values, replicas=2).raise_for_errors()
    return [key for key, node in zip(single, placed.node_ids, strict=True) if node != _VICTIM], double


def _measure(pool: EmbeddedCluster, fault: str, percent: int, scale: float) -> tuple[_P99s, _P99s]:
    """P99 of the others' blocks and of those with two copies."""
    settings = pool.client_settings()
    with mooncache.connect(**settings, shm=False, timeout_s=20.0) as writer:
        _await_nodes(writer)
        others, double = _store(writer)
    with _hedge_percent(percent), mooncache.connect(**settings, shm=False, timeout_s=20.0) as client:
        client.get_many(others + double).raise_for_errors()
        readers = [
            BlockReads(client, keys, seed=seed, pause_s=_PAUSE_S)
            for seed, keys in enumerate((others, double))
        ]
        try:
            begun_s = time.monotonic() + 1.0  # the first second is for learning
            time.sleep(1.0 + _BEFORE_S * scale)
            fault_s = time.monotonic()
            with _FAULTS[fault](pool):
                time.sleep(_FIRST_S + _AFTER_S * scale)
                ended_s = time.monotonic()
        finally:
            for reader in readers:
                reader.end()
    first_s = fault_s + _FIRST_S
    other, both = (
        _P99s(
            reader.p99_s(begun_s, fault_s) * 1e3,
            reader.p99_s(fault_s, first_s) * 1e3,
            reader.p99_s(first_s, ended_s) * 1e3,
            reader.failed,
        )
        for reader in readers
    )
    return other, both


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """P99 of gets in the first second of each fault and later, over before."""
    rows: list[Row] = []
    with start_cluster(_NODES, _NODES * (32 << 20)) as pool:
        for fault in _FAULTS:
            for percent, way in ((5, "hedged"), (0, "not hedged")):
                progress(f"{_VICTIM} is {fault}, reads are {way}")
                other, double = _measure(pool, fault, percent, 0.4 if quick else 1.0)
                rows += _rows(f"{fault}, {way}", other, double, bars=percent > 0)
    return rows


def _rows(name: str, other: _P99s, double: _P99s, *, bars: bool) -> list[Row]:
    found = [
        Row(f"{name}: P99 before, others' blocks", other.before, "ms"),
        Row(f"{name}: P99 before, blocks with two copies", double.before, "ms"),
    ]
    for text, value, limit in (("first second", other.first, _FIRST_BAR), ("later", other.later, _LATER_BAR)):
        found.append(
            bar_row(
                f"{name}: P99 {text}, others' blocks",
                value,
                "ms",
                against="before",
                reference=other.before,
                at_most=limit if bars else None,
            )
        )
    for text, value in (("first second", double.first), ("later", double.later)):
        found.append(
            bar_row(
                f"{name}: P99 {text}, blocks with two copies",
                value,
                "ms",
                against="before",
                reference=double.before,
            )
        )
    found.append(Row(f"{name}: gets that failed", float(other.failed + double.failed), ""))
    return found
