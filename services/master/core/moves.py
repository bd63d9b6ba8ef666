"""Which copy of a block moves where, as a pure choice: from the fullest holder to the emptiest node that may take it.

Invariants of every move, for any capacities and sizes: behind it the source is at least as full as the target, so no
sequence of moves brings a copy back, the fullest node does not become fuller, and every sequence ends; the copies of
the block are in as many zones, racks and hosts as before; the target had no copy and displaces none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mooncache.master.core.placement import Domains, spread
from mooncache.master.core.rebalance_types import Move, NodeFill


def difference(fills: Mapping[int, NodeFill]) -> float:
    """By how much the fill of the fullest node is beyond that of the emptiest that takes blocks; 0..1."""
    takers = [fill.share for fill in fills.values() if fill.takes]
    return max(fill.share for fill in fills.values()) - min(takers) if takers else 0.0


def mean_share(fills: Mapping[int, NodeFill]) -> float:
    """The fill that all nodes would have if the blocks were spread evenly."""
    capacity_bytes = sum(fill.capacity_bytes for fill in fills.values())
    return sum(fill.used_bytes for fill in fills.values()) / capacity_bytes if capacity_bytes else 0.0


def excess_bytes(fills: Mapping[int, NodeFill]) -> int:
    """Bytes that lie beyond the mean fill: what has to move."""
    mean = mean_share(fills)
    return round(sum(max(0.0, fill.used_bytes - mean * fill.capacity_bytes) for fill in fills.values()))


def moved(fills: dict[int, NodeFill], move: Move, size_bytes: int) -> None:
    """Count a move in `fills`."""
    for index, change in ((move.source, -size_bytes), (move.target, size_bytes)):
        fill = fills.get(index)
        if fill is not None:
            fills[index] = fill._replace(used_bytes=max(0, fill.used_bytes + change))


def choose_move(
    holders: Collection[int],
    size_bytes: int,
    fills: Mapping[int, NodeFill],
    sites: Mapping[int, Domains],
    room_share: float,
) -> Move | None:
    """The move of one copy of a block, None when no move makes the pool more even.

    Args:
        holders: nodes with a copy, those that are about to have or to lose one among them.
        fills: nodes between which blocks may move.
        sites: where each of the holders is.
        room_share: share of its capacity that stays free at the target.
    """
    sources = [index for index in holders if index in fills and fills[index].gives]
    for source in sorted(sources, key=lambda index: (-fills[index].share, index)):
        giver = fills[source]
        behind = (giver.used_bytes - size_bytes) / giver.capacity_bytes
        kept = [sites[index] for index in holders if index != source and index in sites]
        before = spread([*kept, giver.domains])
        fitting = [
            (after, index)
            for index, fill in fills.items()
            if index not in holders
            and fill.takes
            and fill.capacity_bytes
            and (after := (fill.used_bytes + size_bytes) / fill.capacity_bytes)
            <= min(behind, 1.0 - room_share)
            and all(now >= was for now, was in zip(spread([*kept, fill.domains]), before, strict=True))
        ]
        if fitting:
            return Move(source, min(fitting)[1])
    return None
