"""Layer-wise save, 128 blocks x 64 layers: calls, and speed over one batched put of the same bytes.

The saver is the one that an engine uses (`kvcache/layerwise.py`), over a node in a process of its own: through shared
memory, and in frames over TCP. Its clock runs from the hook of the first layer to the report. A block's layer has the
bytes of one of four shards of a 32B model: 16 tokens, two KV heads of 128 in 16 bits. Then the same with a pause before
each layer, in which a device would compute: what is left to save after the last one.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from statistics import median
from typing import Any, cast

import mooncache
from mooncache.bench.transfer.node import TransferNode
from mooncache.errors import Internal
from mooncache.kvcache.layerwise import LayerSaver
from mooncache.kvcache.memory import HostMemory, LayerLayout, Region
from mooncache.kvcache.pool_link import PoolClient, PoolLink
from mooncache.kvcache.transfers import SaveReport, TransferJob
from mooncache.reporting.rows import Row, bar_row

BLOCKS, LAYERS, LAYER_BYTES = 128, 64, 16 << 10
BLOCK_BYTES = LAYERS * LAYER_BYTES
CALLS_MAX = 130
SPEED_MIN = 0.8
_ARENA_BYTES = 4 * BLOCKS * BLOCK_BYTES
_TIMEOUT_S = 30.0
_COMPUTE_SHARE = 3.0  # computing takes so many times as long as one batched put of what it makes


class _CountedBatch:
    """A batch of reservations whose calls are counted."""

    def __init__(self, batch: mooncache.ReservationBatch, counted: _CountedClient) -> None:
        self._batch = batch
        self._counted = counted
        self.codes = batch.codes

    def write_gathered(self, *args: Any, **kwargs: Any) -> mooncache.BatchResult:
        self._counted.calls += 1
        return self._batch.write_gathered(*args, **kwargs)

    def commit(self, **kwargs: Any) -> mooncache.PutResult:
        self._counted.calls += 1
        return self._batch.commit(**kwargs)

    def abort(self) -> None:
        self._batch.abort()


class _CountedClient:
    """A client whose calls are counted."""

    def __init__(self, client: mooncache.Client) -> None:
        self._client = client
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def exists_many(self, *args: Any, **kwargs: Any) -> tuple[bool, ...]:
        self.calls += 1
        return self._client.exists_many(*args, **kwargs)

    def reserve_many(self, *args: Any, **kwargs: Any) -> _CountedBatch:
        self.calls += 1
        return _CountedBatch(self._client.reserve_many(*args, **kwargs), self)


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Medians of the rounds; put and save take turns in each."""
    rounds = 3 if quick else 9
    tensors = [bytearray(os.urandom(LAYER_BYTES)) * BLOCKS for _ in range(LAYERS)]
    layout = LayerLayout((BLOCKS, LAYER_BYTES), (LAYER_BYTES, 1), 1)
    memory = HostMemory([(layout, _region(tensor)) for tensor in tensors], BLOCKS)
    rows = []
    with closing(TransferNode(_ARENA_BYTES)) as node:
        tcp = f"{node.peer['tcp_host']}:{node.peer['tcp_port']}"
        for path, target, shm in (
            ("shared memory", f"unix:{node.peer['unix_path']}", True),
            ("TCP", tcp, False),
        ):
            progress(path)
            with mooncache.connect(nodes=[target], token=node.peer["token"], shm=shm) as client:
                rows += _rows(path, client, node, memory, rounds)
    return rows


def _region(tensor: bytearray) -> Region:
    return Region(ctypes.addressof(ctypes.c_char.from_buffer(tensor)), len(tensor), tensor)


def _rows(
    path: str, client: mooncache.Client, node: TransferNode, memory: HostMemory, rounds: int
) -> list[Row]:
    counted = _CountedClient(client)
    puts, saves, lefts, calls, requests = [], [], [], [], []
    with _saver(counted, memory) as save:
        for _ in range(rounds + 1):
            with _fresh(client) as keys:
                began_s = time.perf_counter()
                client.put_many(
                    keys, [memory.slices(block) for block in range(BLOCKS)], timeout_s=_TIMEOUT_S
                ).raise_for_errors()
                puts.append(time.perf_counter() - began_s)
            with _fresh(client) as keys:
                counted.calls, asked = 0, _requests(node)
                saves.append(save(keys, 0.0)[0])
                calls.append(counted.calls)
                requests.append(_requests(node) - asked)
            with _fresh(client) as keys:
                lefts.append(save(keys, _COMPUTE_SHARE * puts[-1] / LAYERS)[1])
    size_gb = BLOCKS * BLOCK_BYTES / 1e9
    # the first round touches the node's memory
    put_s, save_s, left_s = median(puts[1:]), median(saves[1:]), median(lefts[1:])
    label = f"layer-wise save, {BLOCKS} blocks x {LAYERS} layers, {path}"
    return [
        bar_row(f"{label}: calls of the client", max(calls), "calls", at_most=CALLS_MAX),
        bar_row(f"{label}: speed over one batched put", put_s / save_s, "x", at_least=SPEED_MIN),
        Row(f"{label}: one batched put", size_gb / put_s, "GB/s"),
        Row(f"{label}: reserve, write each layer, commit", size_gb / save_s, "GB/s"),
        Row(f"{label}: requests to the node", median(requests[1:]), "requests"),
        Row(f"{label}: left after the last of {LAYERS} layers, over one batched put", left_s / put_s, "x"),
    ]


@contextmanager
def _saver(
    client: _CountedClient, memory: HostMemory
) -> Iterator[Callable[[Sequence[bytes], float], tuple[float, float]]]:
    """A function that saves the blocks under these keys, layer by layer, with a pause of some seconds before each. It
    returns the seconds that it took, and those after the last layer."""
    link = PoolLink(lambda: cast("PoolClient", client))
    reports: list[SaveReport] = []
    ended = threading.Event()

    def report(found: SaveReport) -> None:
        reports.append(found)
        ended.set()

    layers = [f"layer.{number}" for number in range(LAYERS)]
    saver = LayerSaver(link, memory, layers, report, timeout_s=_TIMEOUT_S, queue_bytes_max=1 << 40)
    numbers = itertools.count()

    def save(keys: Sequence[bytes], pause_s: float) -> tuple[float, float]:
        job = TransferJob(f"save-{next(numbers)}", tuple(keys), tuple(range(BLOCKS)))
        ended.clear()
        began_s = time.perf_counter()
        for layer in layers:
            time.sleep(pause_s)
            saver.layer_done([job], layer)
        computed_s = time.perf_counter()
        saver.finish(job)
        if not ended.wait(_TIMEOUT_S) or len(reports[-1].stored) != BLOCKS:
            raise Internal(f"The save did not end well: {reports[-1:]}")
        ended_s = time.perf_counter()
        return ended_s - began_s, ended_s - computed_s

    if not link.connected.wait(_TIMEOUT_S):
        raise Internal("The link of the saver did not come up.")
    try:
        yield save
    finally:
        saver.close()


@contextmanager
def _fresh(client: mooncache.Client) -> Iterator[list[bytes]]:
    """Keys that no block has, and whose blocks go afterwards."""
    keys = [os.urandom(32) for _ in range(BLOCKS)]
    yield keys
    client.remove_many(keys)


def _requests(node: TransferNode) -> int:
    """RESERVE, WRITE and COMMIT requests that the node has had."""
    stats = node.stats()
    return sum(stats[f"requests_{name}"] for name in ("reserve", "write", "commit"))
