"""Which copies stay when a block has more than it should, and which may go.

Those stay that clients look at first: the best in the ranking of placement. Holders are only those whose copy lasts;
a copy on a draining node is neither counted nor dropped, its drain takes care of it.
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
) -> list[Trim]:
    """The copies to drop, one entry for each key with more than `replica_count` (at least 1) holders."""
    trims: list[Trim] = []
    for position, (key, where) in enumerate(zip(keys, holders, strict=True)):
        if len(where) <= replica_count:
            continue
        ranked = [
            node.index for node in rank_nodes(key, [node for node in candidates if node.index in where])
        ]
        order = ranked + sorted(set(where) - set(ranked))
        trims.append(Trim(position, tuple(order[:replica_count]), tuple(order[replica_count:])))
    return trims
