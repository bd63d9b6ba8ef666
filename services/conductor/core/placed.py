"""Where the leading blocks of a prompt lie in the pool, as runs of blocks that lie alike, and what that means for each
instance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np

from mooncache.client.results import BlockCopy, BlockTier
from mooncache.conductor.core.policy.types import NO_ROW, Ints, PrefixSource

RUNS_MAX: Final = 32
"""Blocks behind so many runs count as lying like the last one of them."""


class PlacedRun(NamedTuple):
    """Blocks that lie alike: on disks alone, or in the memory of nodes on these hosts."""

    blocks: int
    is_on_ssd: bool
    hosts: frozenset[str]


def runs_of(
    copies: Sequence[tuple[BlockCopy, ...]], blocks: int, host_of_node: Mapping[str, str]
) -> tuple[PlacedRun, ...]:
    """The runs of the first `blocks` blocks. Blocks that lie alike share one tuple (`MatchResult.copies`)."""
    found: list[PlacedRun] = []
    for _, group in groupby(copies[:blocks], id):
        alike = list(group)
        if len(found) == RUNS_MAX:
            found[-1] = found[-1]._replace(blocks=found[-1].blocks + len(alike))
            continue
        warm = [copy.node_id for copy in alike[0] if copy.tier != BlockTier.SSD]
        hosts = frozenset(host_of_node[node] for node in warm if node in host_of_node)
        found.append(PlacedRun(len(alike), bool(alike[0]) and not warm, hosts))
    return tuple(found)


def sources(
    runs: Sequence[PlacedRun],
    local: Ints,
    block_tokens: int,
    tokens: int,
    rows_of_host: Mapping[str, Iterable[int]],
) -> tuple[PrefixSource, ...]:
    """The pool as a source of so many tokens, with what each row would read there from memory of its own host and from
    disks."""
    if not tokens:
        return ()
    on_host = host_tokens(runs, local, block_tokens, tokens, rows_of_host)
    return (
        PrefixSource(NO_ROW, tokens, on_host=on_host, on_ssd=ssd_tokens(runs, local, block_tokens, tokens)),
    )


def ssd_tokens(runs: Sequence[PlacedRun], local: Ints, block_tokens: int, end: int) -> Ints | None:
    """For each row how many tokens from those that it holds itself to `end` lie on disks alone; None: nothing does."""
    if not any(run.is_on_ssd for run in runs):
        return None
    found = np.zeros_like(local)
    for begin, until, run in _spans(runs, block_tokens, end):
        if run.is_on_ssd:
            found += np.maximum(until - np.maximum(local, begin), 0)
    return found


def host_tokens(
    runs: Sequence[PlacedRun],
    local: Ints,
    block_tokens: int,
    end: int,
    rows_of_host: Mapping[str, Iterable[int]],
) -> Ints | None:
    """For each row how many of these tokens the memory of its own host has; None: no row has any."""
    found = np.zeros_like(local)
    for begin, until, run in _spans(runs, block_tokens, end):
        rows = [row for host in run.hosts for row in rows_of_host.get(host, ())]
        if rows:
            found[rows] += np.maximum(until - np.maximum(local[rows], begin), 0)
    return found if found.any() else None


def _spans(runs: Sequence[PlacedRun], block_tokens: int, end: int) -> Iterable[tuple[int, int, PlacedRun]]:
    """First and last tokens of each run."""
    begin = 0
    for run in runs:
        until = min(end, begin + run.blocks * block_tokens)
        if until > begin:
            yield begin, until, run
        begin = until
