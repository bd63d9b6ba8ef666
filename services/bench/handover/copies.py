"""Twelve readers that know nothing of each other take a prefix of which there are three copies: who sends the bytes?

The readers are processes of their own without shared memory, as engines on other hosts are. They read either as an
engine's worker does, which does not know where the blocks lie, or after a match, as its scheduler does. The bytes are
those that the nodes count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from statistics import median
from typing import Any, Final
from urllib.request import urlopen

import mooncache
from mooncache.bench.store.ours import start_cluster
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.processes import ServiceKind
from mooncache.errors import DeadlineExceeded, NotFound, ProtocolError
from mooncache.reporting.rows import Row, bar_row

READERS: Final = 12
COPIES: Final = 3
AT_MOST: Final = 1.3
_BLOCKS: Final = 48
_BLOCK_BYTES: Final = 256 << 10
_CALL_S: Final = 60.0
_METRICS_ON: Final = {"MOONCACHE_METRICS_ENABLED": "true"}
_COUNTER: Final = "mooncache_store_node_read_bytes_total "


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Bytes of each holder over their mean, and what the readers got together; medians of the rounds.

    Raises:
        NotFound: a reader did not get a block.
        DeadlineExceeded: a reader did not answer.
    """
    rows: list[Row] = []
    rounds = 1 if quick else 5
    with start_cluster(nodes=COPIES, capacity_bytes=128 << 20, env=_METRICS_ON) as cluster:
        keys = [os.urandom(32) for _ in range(_BLOCKS)]
        values = [os.urandom(_BLOCK_BYTES) for _ in keys]
        with mooncache.connect(**cluster.client_settings(), timeout_s=_CALL_S) as client:
            client.put_many(keys, values, replicas=COPIES).raise_for_errors()
        for matches in (False, True):
            way = "after a match" if matches else "without a question"
            shares: list[list[float]] = []
            rates: list[float] = []
            for number in range(rounds):
                progress(f"{way}, round {number + 1} of {rounds}")
                found, elapsed_s = _round(cluster, keys, matches=matches)
                mean = sum(found) / len(found)
                shares.append(sorted((each / mean for each in found), reverse=True))
                rates.append(sum(found) / elapsed_s)
            rows += _rows(way, shares, rates)
    return rows


def _rows(way: str, shares: list[list[float]], rates: list[float]) -> list[Row]:
    least = [
        Row(
            f"holder {rank + 1} of {COPIES} over the mean, {way}",
            median(share[rank] for share in shares),
            "x",
        )
        for rank in range(1, COPIES)
    ]
    return [
        bar_row(
            f"busiest of {COPIES} holders over the mean, {READERS} readers, {way}",
            median(share[0] for share in shares),
            "x",
            at_most=AT_MOST,
        ),
        *least,
        Row(f"{READERS} readers together, {way}", median(rates) / 1e9, "GB/s"),
    ]


def _round(cluster: EmbeddedCluster, keys: list[bytes], *, matches: bool) -> tuple[list[int], float]:
    """Bytes that each node gave to twelve fresh readers, and the time from the first to the last."""
    nodes = node_metrics(cluster)
    with _readers(cluster.client_settings(), keys, matches=matches) as lines:
        for line in lines:
            _expect(line, "ready")
        before = [read_bytes(node) for node in nodes]
        started_s = time.perf_counter()
        for line in lines:
            line.send("go")
        hits = [_expect(line) for line in lines]
        elapsed_s = time.perf_counter() - started_s
    if any(count != len(keys) for count in hits):
        raise NotFound(f"Of {len(keys)} blocks a reader got {min(hits)}.")
    return [read_bytes(node) - count for node, count in zip(nodes, before, strict=True)], elapsed_s


def node_metrics(cluster: EmbeddedCluster) -> list[str]:
    """Addresses (host:port) of the nodes' metrics."""
    return [part.metrics for part in cluster.parts.values() if part.service is ServiceKind.STORE_NODE]


def read_bytes(address: str) -> int:
    """Bytes of blocks that a node says it gave to readers. Raises ProtocolError when it does not say."""
    with urlopen(f"http://{address}/metrics", timeout=_CALL_S) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(_COUNTER):
                return int(float(line.split()[1]))
    raise ProtocolError(f"The node at {address} does not count what it gives to readers.")


@contextmanager
def _readers(settings: dict[str, Any], keys: list[bytes], *, matches: bool) -> Iterator[list[Connection]]:
    context = get_context("spawn")
    lines: list[Connection] = []
    processes: list[BaseProcess] = []
    try:
        for number in range(READERS):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_read, args=(settings, keys, matches, theirs), name=f"reader-{number}", daemon=True
            )
            process.start()
            lines.append(ours)
            processes.append(process)
        yield lines
    finally:
        for started in processes:
            started.kill()
            started.join()


def _read(settings: dict[str, Any], keys: list[bytes], matches: bool, line: Connection) -> None:
    targets = [memoryview(bytearray(_BLOCK_BYTES)) for _ in keys]
    with mooncache.connect(**settings, shm=False, timeout_s=_CALL_S) as client:
        line.send("ready")
        line.recv()
        if matches:
            client.match(keys)
        line.send(client.get_many_into(keys, targets).hits)
        line.recv()  # the end comes from outside


def _expect(line: Connection, word: str = "") -> Any:
    """What a reader says. Raises DeadlineExceeded."""
    if not line.poll(_CALL_S):
        raise DeadlineExceeded(f"A reader said nothing for {_CALL_S:g} s.")
    said = line.recv()
    if word and said != word:
        raise DeadlineExceeded(f"A reader said {said!r} and not {word!r}.")
    return said
