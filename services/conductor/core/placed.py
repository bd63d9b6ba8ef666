"""Where the leading blocks of a prompt lie in the pool, as runs of blocks that lie alike, and what that means for each
instance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, islice
from typing import Final, NamedTuple

import numpy as np

from mooncache.client.results import BELOW_MEMORY, BlockCopy
from mooncache.conductor.core.holder_rates import BlockHolder
from mooncache.conductor.core.policy.types import NO_ROW, Floats, Ints, PrefixSource

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
        warm = [copy.node_id for copy in alike[0] if copy.tier not in BELOW_MEMORY]
        hosts = frozenset(host_of_node[node] for node in warm if node in host_of_node)
        found.append(PlacedRun(len(alike), bool(alike[0]) and not warm, hosts))
    return tuple(found)


def holders_of(copies: Sequence[tuple[BlockCopy, ...]], blocks: int) -> tuple[tuple[BlockHolder, ...], ...]:
    """For each of the runs of `runs_of` who holds its blocks: in memory, or on disks where they lie there alone."""
    firsts = [next(group) for _, group in islice(groupby(copies[:blocks], id), RUNS_MAX)]
    return tuple(
        tuple(BlockHolder(copy.node_id, False) for copy in first if copy.tier not in BELOW_MEMORY)
        or tuple(BlockHolder(copy.node_id, True) for copy in first)
        for first in firsts
    )


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


def at_holders(
    source: PrefixSource,
    runs: Sequence[PlacedRun],
    holders: Sequence[tuple[BlockHolder, ...]],
    local: Ints,
    block_tokens: int,
    rows_of_host: Mapping[str, Iterable[int]],
    tokens_per_s: Callable[[BlockHolder], float | None],
) -> PrefixSource:
    """The source with the time that its holders take, as far as their rates are known.

    Several holders are read at once, so the slowest sets the time. Of blocks with several copies readers take turns.
    What a row reads from memory of its own host is not read from a holder elsewhere.
    """
    rates = [[tokens_per_s(owner) for owner in owners] for owners in holders]
    if all(rate is None for known in rates for rate in known):
        return source
    held, on_ssd = np.zeros_like(local), source.on_ssd
    seconds: dict[tuple[BlockHolder, ...], Floats] = {}
    spans = _spans(runs, block_tokens, source.tokens)
    for (begin, until, run), owners, of_each in zip(spans, holders, rates, strict=False):
        known = [rate for rate in of_each if rate is not None]
        if not known or len(known) < len(owners):
            continue
        part = np.maximum(until - np.maximum(local, begin), 0)
        part[[row for host in run.hosts for row in rows_of_host.get(host, ())]] = 0
        held += part
        on_ssd = on_ssd - part if run.is_on_ssd and on_ssd is not None else on_ssd
        taken_s = part * (sum(1 / rate for rate in known) / len(known))
        seconds[owners] = seconds.get(owners, 0.0) + taken_s
    if not seconds:
        return source
    return source._replace(on_ssd=on_ssd, held=held, held_s=np.maximum.reduce(list(seconds.values())))


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
    found: Ints | None = None
    for begin, until, run in _spans(runs, block_tokens, end):
        rows = [row for host in run.hosts for row in rows_of_host.get(host, ())]
        if rows:
            found = np.zeros_like(local) if found is None else found
            found[rows] += np.maximum(until - np.maximum(local[rows], begin), 0)
    return found if found is not None and found.any() else None


def _spans(runs: Sequence[PlacedRun], block_tokens: int, end: int) -> Iterable[tuple[int, int, PlacedRun]]:
    """First and last tokens of each run."""
    begin = 0
    for run in runs:
        until = min(end, begin + run.blocks * block_tokens)
        if until > begin:
            yield begin, until, run
        begin = until
