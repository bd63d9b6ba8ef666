"""Where a block should live: pure weights and a pure choice.

`node_weights` turns what the master knows of each node into one number per node; the number travels in the cluster map.
`choose_nodes` turns (key, weights, caller's host) into an order of nodes. The native client computes the same order
from the same map, so a put needs no question to the master; `tests/master/placement_vectors.json` holds both sides to
it. The master places further copies (`choose_spread`) and drops those that are too many (`copy_to_drop`): it knows
zones and racks, and keeps the copies of a block apart.

Invariants: a weight is 0 exactly for nodes that must not receive new blocks; a node that is full still has a
weight, because a full cache evicts to take new blocks; small movements of free space do not move a weight,
because every moved weight moves the home of some keys.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

_MASK64 = (1 << 64) - 1
_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3
_GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """How weights are made."""

    slow_start_s: float
    """Seconds in which a node that came with no blocks ramps to its full weight."""
    free_steps: int = 16
    """Free space counts in this many steps of capacity. A full node keeps the share 1/free_steps of its weight."""
    slow_start_floor: float = 0.125
    """Share of its weight that such a node begins with, 0..1."""
    slow_start_fill: float = 0.25
    """Share of capacity in use at which the ramp is over whatever the time, 0..1."""

    def __post_init__(self) -> None:
        if self.free_steps < 1:
            raise ValueError("free_steps must be at least 1")
        if not 0.0 < self.slow_start_floor <= 1.0 or not 0.0 < self.slow_start_fill <= 1.0:
            raise ValueError("slow_start_floor and slow_start_fill must be in (0, 1]")


@dataclass(frozen=True, slots=True)
class NodeSpace:
    """What a weight depends on. `placeable` is False for nodes that are draining, suspect or dead."""

    placeable: bool
    capacity_bytes: int
    free_bytes: int
    used_bytes: int
    age_s: float


class Domains(NamedTuple):
    """What a node fails together with, the widest first. An empty name is not said: one domain with all like it."""

    zone: str = ""
    rack: str = ""
    host: str = ""

    @property
    def levels(self) -> tuple[tuple[str, ...], ...]:
        """Its zone, its rack and its host, as names that are unique in the cluster."""
        return ((self.zone,), (self.zone, self.rack), (self.zone, self.rack, self.host))


NOWHERE: Final = Domains()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node as the choice sees it."""

    node_id: str
    host_id: str
    weight: float
    index: int = 0
    takes_from_its_host: bool = True
    """Whether callers on its host put there first. GPU memory is scarce, and processes on the host cannot map it, so
    such a node is chosen by weight alone."""
    domains: Domains = NOWHERE
    """Where it is; the master's own copies are kept apart by it."""
    capacity_bytes: int = 0
    free_bytes: int = 0


def slow_start_factor(space: NodeSpace, rules: PlacementRules) -> float:
    """The share (0..1) of its weight that a node may use now.

    The further of its two ramps, time and bytes.
    """
    by_time = 1.0 if rules.slow_start_s <= 0 else space.age_s / rules.slow_start_s
    fill_bytes = space.capacity_bytes * rules.slow_start_fill
    by_bytes = 1.0 if fill_bytes <= 0 else space.used_bytes / fill_bytes
    progress = min(1.0, max(by_time, by_bytes, 0.0))
    # Sixteen steps, so that a ramp costs the cluster at most sixteen new maps.
    progress = math.floor(progress * 16.0) / 16.0
    return rules.slow_start_floor + (1.0 - rules.slow_start_floor) * progress


def node_weight(space: NodeSpace, rules: PlacementRules) -> float:
    """One node's weight in GiB of usable room, 0.0 when it must not receive blocks."""
    if not space.placeable or space.capacity_bytes <= 0:
        return 0.0
    free_bytes = min(max(space.free_bytes, 0), space.capacity_bytes)
    steps = max(1, math.ceil(rules.free_steps * free_bytes / space.capacity_bytes))
    return space.capacity_bytes / _GIB * steps / rules.free_steps * slow_start_factor(space, rules)


def splitmix64(value: int) -> int:
    """The splitmix64 finaliser of a 64-bit value."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def fnv1a64(data: bytes) -> int:
    """The 64-bit FNV-1a hash of `data`."""
    value = _FNV_OFFSET
    for byte in data:
        value = ((value ^ byte) * _FNV_PRIME) & _MASK64
    return value


def node_seed(node_id: str) -> int:
    """The node's part of the hash.

    Depends on its id only, so that it survives restarts and index changes.
    """
    return splitmix64(fnv1a64(node_id.encode("utf-8")))


def score(key: bytes, node_id: str, weight: float) -> float:
    """The rendezvous score of (key, node): higher wins; 0.0 for weight 0.

    -weight / ln(u) with u uniform in (0, 1) gives every node a share of the keys proportional to its weight,
    and a change of one weight moves only the keys that this node gains or loses.
    """
    if weight <= 0.0:
        return 0.0
    word = int.from_bytes(key[:8], "little")
    bits = splitmix64(word ^ node_seed(node_id)) >> 11
    uniform = max(bits, 1) * 2.0**-53
    return -weight / math.log(uniform)


def rank_nodes(key: bytes, nodes: Iterable[Candidate]) -> list[Candidate]:
    """The nodes with weight > 0, best score first; equal scores by node id."""
    scored = [
        (-score(key, node.node_id, node.weight), node.node_id, node) for node in nodes if node.weight > 0.0
    ]
    scored.sort(key=lambda entry: entry[:2])
    return [node for _, _, node in scored]


def choose_nodes(
    key: bytes, nodes: Iterable[Candidate], replicas: int, local_host_id: str = ""
) -> list[Candidate]:
    """Up to `replicas` distinct nodes for a block, first choice first.

    A node on the caller's host comes first. Then the ranking, hosts not used yet before hosts used already.
    Fewer nodes than `replicas` come back when the cluster has no more; none when no node may receive blocks.
    """
    ranked = rank_nodes(key, nodes)
    chosen: list[Candidate] = []
    if local_host_id:
        local = [node for node in ranked if node.host_id == local_host_id and node.takes_from_its_host]
        chosen = local[: min(1, replicas)]
    _take(chosen, ranked, replicas, distinct_hosts=True)
    _take(chosen, ranked, replicas, distinct_hosts=False)
    return chosen


def _take(
    chosen: list[Candidate], ranked: Sequence[Candidate], replicas: int, *, distinct_hosts: bool
) -> None:
    taken = {node.node_id for node in chosen}
    hosts = {node.host_id for node in chosen}
    for node in ranked:
        if len(chosen) >= replicas:
            return
        if node.node_id in taken or (distinct_hosts and node.host_id in hosts):
            continue
        chosen.append(node)
        taken.add(node.node_id)
        hosts.add(node.host_id)


def choose_spread(
    key: bytes,
    candidates: Iterable[Candidate],
    held: Iterable[Domains],
    count: int,
    *,
    preferred: Sequence[int] = (),
) -> list[Candidate]:
    """Up to `count` nodes for further copies of a block, best first.

    Preferred nodes first. Then those whose zone holds the fewest copies, of these whose rack does, of these whose host
    does; equals in the order of the ranking. Each choice counts as a copy for the next one.

    Args:
        candidates: nodes without a copy.
        held: where the copies are that there are already.
    """
    left = rank_nodes(key, candidates)
    wishes = {index: place for place, index in enumerate(preferred)}
    copies = Counter(level for domains in held for level in domains.levels)
    chosen: list[Candidate] = []
    while left and len(chosen) < count:
        best = min(
            left,
            key=lambda node: (
                wishes.get(node.index, len(wishes)),
                *(copies[level] for level in node.domains.levels),
            ),
        )
        left.remove(best)
        chosen.append(best)
        copies.update(best.domains.levels)
    return chosen


def spread(places: Collection[Domains]) -> tuple[int, ...]:
    """In how many zones, racks and hosts copies are."""
    return tuple(len({place.levels[level] for place in places}) for level in range(3))


def copy_to_drop(key: bytes, holders: Mapping[int, Domains], candidates: Collection[Candidate]) -> int:
    """The holder whose copy is missed least: the others are spread best without it; of equals the last in the ranking.

    Args:
        holders: index -> where it is, at least one.
    """
    ranked = {
        node.index: place
        for place, node in enumerate(rank_nodes(key, (node for node in candidates if node.index in holders)))
    }

    def worth(index: int) -> tuple[int, ...]:
        rest = [domains for other, domains in holders.items() if other != index]
        return (*spread(rest), ranked.get(index, len(ranked)), index)

    return max(holders, key=worth)


class FailureDomains(NamedTuple):
    """The widest level at which nodes differ: copies of a block belong into different ones of these domains."""

    level: str
    """zone, rack or host."""
    numbers: Mapping[int, int]
    """Index of a node -> number of its domain, from 0."""
    placeable: int
    """Domains with a node that takes blocks."""


def failure_domains(nodes: Mapping[int, Domains], placeable: Collection[int]) -> FailureDomains:
    """The domains of `nodes` (index -> where it is), of which `placeable` may receive blocks."""
    names = ("zone", "rack", "host")
    for level, name in enumerate(names):
        found = {domains.levels[level] for domains in nodes.values()}
        if len(found) > 1 or name == names[-1]:
            break
    numbered = {domain: number for number, domain in enumerate(sorted(found))}
    numbers = {index: numbered[domains.levels[level]] for index, domains in nodes.items()}
    return FailureDomains(name, numbers, len({numbers[index] for index in placeable if index in numbers}))
