"""A put of 16 blocks while one of two store nodes is stopped (SIGSTOP): how long until all are stored elsewhere?

The node that is stopped keeps its connections open and says nothing, as a full node does that waits for space.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from statistics import median
from typing import Final

import mooncache
from mooncache.bench.store.ours import start_cluster
from mooncache.errors import NodeUnavailable
from mooncache.reporting.rows import Row, bar_row

_BLOCKS: Final = 16
_BLOCK_BYTES: Final = 64 << 10
_BAR_S: Final = 1.2
_CALL_S: Final = 30.0


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Three rows: the put while all is well, the first one after the stop, and the slowest of those that follow.

    Raises:
        NodeUnavailable: a block was not stored.
    """
    well_s: list[float] = []
    first_s: list[float] = []
    later_s: list[float] = []
    for number in range(1 if quick else 5):
        progress(f"round {number + 1}")
        with (
            start_cluster(nodes=2, capacity_bytes=256 << 20) as cluster,
            mooncache.connect(**cluster.client_settings(), timeout_s=_CALL_S) as client,
        ):
            well_s += [_put_s(client, f"well-{number}-{turn}") for turn in range(8)]
            node = cluster.parts["node-1"]
            node.send(signal.SIGSTOP)
            try:
                first_s.append(_put_s(client, f"first-{number}"))
                later_s += [_put_s(client, f"later-{number}-{turn}") for turn in range(4)]
            finally:
                node.send(signal.SIGCONT)
    return [
        Row("put of 16 blocks, both nodes well", median(well_s) * 1e3, "ms"),
        bar_row(
            "put of 16 blocks, one of two nodes stopped: the slowest first put",
            max(first_s),
            "s",
            at_most=_BAR_S,
        ),
        bar_row("the puts after it: the slowest", max(later_s), "s", at_most=_BAR_S),
    ]


def _put_s(client: mooncache.Client, name: str) -> float:
    keys = [f"{name}-{index}" for index in range(_BLOCKS)]
    values = [os.urandom(_BLOCK_BYTES) for _ in keys]
    began_s = time.perf_counter()
    outcome = client.put_many(keys, values)
    took_s = time.perf_counter() - began_s
    if any(outcome.codes):
        raise NodeUnavailable(f"Of {_BLOCKS} blocks {sum(map(bool, outcome.codes))} were not stored.")
    return took_s
