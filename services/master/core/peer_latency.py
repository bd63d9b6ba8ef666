"""How long store nodes need to reach each other: which peer each is to try next, and what came of its last tries.

Each node tries the nodes behind it in the order of the map, a ring, one after the other at a slow pace. With few nodes
that is every pair in both directions; with many the cost grows with the nodes and not with their square.

Invariants (`check`): a node has at most PEERS_MAX peers, all in its part of the ring, and ways to no others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

PEERS_MAX: Final = 32
TRIAL_INTERVAL_S: Final = 2.0
"""Between two tries of a node."""
KEPT: Final = 9
"""Tries of a pair whose median counts: one slow answer is no distance."""


class PeerLatency(NamedTuple):
    """What is known of the way from one node to another. Times in microseconds; 0: no try succeeded yet."""

    node_id: str
    median_us: int
    least_us: int
    tries: int
    failures: int
    """In a row, until now."""
    age_s: float
    """Since the last try."""


@dataclass(slots=True)
class _Way:
    took_us: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    failures: int = 0
    tried_s: float = 0.0


@dataclass(slots=True)
class _Source:
    peers: tuple[str, ...] = ()
    named: str = ""  # the peer to try, until its result has come
    named_s: float = float("-inf")
    turn: int = -1
    ways: dict[str, _Way] = field(default_factory=dict)


class PeerLatencies:
    """The ways between the nodes of one term. Times are those of the caller's clock."""

    def __init__(self) -> None:
        self._ring: tuple[str, ...] = ()
        self._place: dict[str, int] = {}
        self._sources: dict[str, _Source] = {}
        self.epoch = -1
        """Of the map that the ring was made from."""

    def follow(self, epoch: int, ring: Sequence[str]) -> None:
        """The nodes that live now, in the order of the map."""
        self.epoch = epoch
        if tuple(ring) == self._ring:
            return
        self._ring = tuple(ring)
        self._place = {name: at for at, name in enumerate(self._ring)}
        for name in self._sources.keys() - self._place.keys():
            del self._sources[name]
        for name, source in self._sources.items():
            self._settle(name, source)

    def next_peer(self, node_id: str, now_s: float) -> str:
        """Whom a node is to try now; "": no try is due, or there is no other node."""
        if node_id not in self._place:
            return ""
        source = self._sources.get(node_id)
        if source is None:
            source = self._sources[node_id] = _Source()
            self._settle(node_id, source)
        if not source.peers or now_s - source.named_s < TRIAL_INTERVAL_S:
            return ""
        source.turn = (source.turn + 1) % len(source.peers)
        source.named, source.named_s = source.peers[source.turn], now_s
        return source.named

    def take(self, node_id: str, peer: str, took_us: int, now_s: float) -> bool:
        """What came of a try; `took_us` 0: the peer did not answer. False for a try that was not asked for."""
        source = self._sources.get(node_id)
        if source is None or not peer or source.named != peer:
            return False
        source.named = ""
        way = source.ways.setdefault(peer, _Way())
        way.tried_s = now_s
        if took_us > 0:
            way.took_us.append(took_us)
            way.failures = 0
        else:
            way.failures += 1
        return True

    def of(self, node_id: str, now_s: float) -> list[PeerLatency]:
        """The ways from a node, in the order of its peers."""
        source = self._sources.get(node_id)
        if source is None:
            return []
        return [
            PeerLatency(
                peer,
                round(median(way.took_us)) if way.took_us else 0,
                min(way.took_us, default=0),
                len(way.took_us),
                way.failures,
                max(0.0, now_s - way.tried_s),
            )
            for peer in source.peers
            if (way := source.ways.get(peer)) is not None
        ]

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        for name, source in self._sources.items():
            assert name in self._place, "a node that is gone"
            assert len(source.peers) <= PEERS_MAX, "too many peers"
            assert name not in source.peers, "a node is no peer of its own"
            assert source.ways.keys() <= set(source.peers), "a way to a node that is no peer"
            assert not source.named or source.named in source.peers, "a node that is no peer was named"

    def _settle(self, node_id: str, source: _Source) -> None:
        """Give a node its part of the ring; ways to others are forgotten."""
        at, count = self._place[node_id], min(PEERS_MAX, len(self._ring) - 1)
        source.peers = tuple(self._ring[(at + step) % len(self._ring)] for step in range(1, count + 1))
        source.ways = {peer: way for peer, way in source.ways.items() if peer in source.peers}
        if source.named not in source.peers:
            source.named = ""
