"""A client's counters as Prometheus wants them: families with one label each, whatever process shows them.

The native core names its counters flatly (`rdma_rail_mlx5_0:1_failures`); here the name becomes a family and a label.
Labels are bounded: the reasons and ways are a fixed set, ports are those of this machine, and of nodes only the first
PEERS_MAX in the order of their names have a label of their own, the others share one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mooncache.errors import Closed

PEERS_MAX: Final = 64
OTHERS: Final = "others"
RAIL_UP: Final = "client_rail_up"


class Family(NamedTuple):
    """Text and label of a family. Counters, but for RAIL_UP."""

    text: str
    label: str


FAMILIES: Final[Mapping[str, Family]] = {
    "client_bytes": Family("Bytes of blocks moved, by transport.", "way"),
    "client_misses": Family("Gets that found no usable block, by reason.", "reason"),
    "client_fallbacks": Family(
        "Times that a faster transport to a node was disabled for some seconds.", "way"
    ),
    "client_hedges": Family(
        "Late reads that were asked of a second node, by what became of that.", "outcome"
    ),
    "client_retries": Family("Batches that failed at one node and were to go to another one.", "outcome"),
    "client_left_nodes": Family("Times that a node was left alone for a while, by reason.", "reason"),
    "client_rail_bytes": Family("Bytes moved over the RDMA port of this machine.", "rail"),
    "client_rail_failures": Family("Queue pairs on the RDMA port that failed.", "rail"),
    RAIL_UP: Family("1 while the RDMA port is active.", "rail"),
    "client_peer_bytes": Family("Bytes moved over RDMA with the node.", "node"),
    "client_peer_failures": Family("Transfers and connections over RDMA with the node that failed.", "node"),
    "client_peer_fallbacks": Family("Times that RDMA with the node was replaced by TCP.", "node"),
}
_PLAIN: Final[Mapping[str, tuple[str, str]]] = {
    **{f"{way}_bytes": ("client_bytes", way) for way in ("tcp", "unix", "shm", "rdma")},
    **{f"{way}_fallbacks": ("client_fallbacks", way) for way in ("shm", "rdma")},
    "hedges": ("client_hedges", "begun"),
    "hedges_won": ("client_hedges", "won"),
    "hedges_refused": ("client_hedges", "refused"),
    "retries": ("client_retries", "made"),
    "retries_refused": ("client_retries", "refused"),
    "breaker_opens": ("client_left_nodes", "failed"),
    "slow_nodes": ("client_left_nodes", "slow"),
    **{
        f"miss_{reason}": ("client_misses", reason)
        for reason in ("not_found", "checksum", "generation", "unreachable", "too_small", "other")
    },
}


class _Counted(StrEnum):
    """What a named counter is about."""

    RAIL = "rail"
    PEER = "peer"


_NAMED: Final = re.compile(r"rdma_(rail|peer)_(.+)_(bytes|failures|fallbacks|up)", re.DOTALL)

Figures = dict[tuple[str, str], int]
"""(family, label) -> value."""


def figures(stats: Mapping[str, int]) -> Figures:
    """What `client.stats()` says, of the families above."""
    found: Figures = defaultdict(int)
    peers = sorted(
        {
            match[2]
            for name in stats
            if (match := _NAMED.fullmatch(name)) is not None and match[1] == _Counted.PEER
        }
    )
    own = frozenset(peers[:PEERS_MAX])
    for name, value in stats.items():
        if name in _PLAIN:
            found[_PLAIN[name]] = value
        elif match := _NAMED.fullmatch(name):
            kind, label, what = match.groups()
            if kind == _Counted.PEER and label not in own:
                label = OTHERS
            if f"client_{kind}_{what}" in FAMILIES:
                found[f"client_{kind}_{what}", label] += value
    return dict(found)


def growth(before: Mapping[tuple[str, str], int], after: Figures) -> Figures:
    """What was added to each counter. One that shrank begins anew: the node left the map and came back."""
    grown = {}
    for key, value in after.items():
        last = before.get(key, 0)
        if key[0] != RAIL_UP and value != last:
            grown[key] = value - last if value > last else value
    return grown


class Counts(Protocol):
    """A client, as far as its counters go."""

    def stats(self) -> dict[str, int]: ...


class ClientCollector(Collector):
    """Shows the figures of a process's client at scrape time, under `prefix`; nothing while there is no client."""

    def __init__(self, prefix: str, client: Callable[[], Counts | None]) -> None:
        self._prefix = prefix
        self._client = client

    def describe(self) -> Sequence[Metric]:
        """Nothing: the registry need not ask for values when this collector is registered."""
        return ()

    def collect(self) -> Iterator[Metric]:
        client = self._client()
        if client is None:
            return
        try:
            found = figures(client.stats())
        except Closed:
            return
        for name, family in FAMILIES.items():
            kind = GaugeMetricFamily if name == RAIL_UP else CounterMetricFamily
            metric = kind(self._prefix + name, family.text, labels=[family.label])
            for (of, label), value in sorted(found.items()):
                if of == name:
                    metric.add_metric([label], value)
            if metric.samples:
                yield metric
