"""Which copies stay when a block has more than it should, and which may go.

Those stay that are asked for, then those that clients look at first: the best in the ranking of placement. Holders
are only those whose copy lasts; a copy on a draining node is neither counted nor dropped, its drain takes care of it.
Invariant: as many holders stay as were asked for, or all of them; so at least one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mooncache.master.core.placement import Candidate, rank_nodes


class Trim(NamedTuple):
    """Of the key at `position`: nodes that keep their copy, and nodes whose copy may go."""

    position: int
    stay: tuple[int, ...]
    go: tuple[int, ...]


def plan_trims(
    keys: Sequence[bytes],
    holders: Sequence[Sequence[int]],
    candidates: Sequence[Candidate],
    replica_count: int,
    *,
    keep: Sequence[int] = (),
    only: int | None = None,
) -> list[Trim]:
    """The copies to drop, one entry for each key with more than `replica_count` (at least 1) holders.

    Args:
        keep: nodes whose copies go last, the best first.
        only: the one node whose copy may go; None: any.
    """
    places = {index: place for place, index in enumerate(keep)}
    trims: list[Trim] = []
    for position, (key, where) in enumerate(zip(keys, holders, strict=True)):
        if len(where) <= replica_count:
            continue
        ranked = [
            node.index for node in rank_nodes(key, [node for node in candidates if node.index in where])
        ]
        order = ranked + sorted(set(where) - set(ranked))
        order.sort(key=lambda index: places.get(index, len(places)))
        if only is not None:
            if only not in where:
                continue
            order.remove(only)
            trims.append(Trim(position, tuple(order[:replica_count]), (only,)))
            continue
        trims.append(Trim(position, tuple(order[:replica_count]), tuple(order[replica_count:])))
    return trims
