"""Names of pages in the pool, and how much of a prefix several pools can restore together.

Idea: SGLang names a page by a hash of all tokens before it, which says nothing about model, type, rank or layout. The
root of a passport says all of that, so both together are the name. A page of a pool may lie in several blocks, one for
each shard that it is cut into; it is there when all of them are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

PREFIX = "sglang"


class Rank(NamedTuple):
    """One shard of a model that tensor parallelism cuts."""

    rank: int
    size: int


def ranks_of_page(*, tp_rank: int, tp_size: int, replicated: bool, split_into: int = 0) -> tuple[Rank, ...]:
    """The shards of which this rank holds a page.

    Args:
        replicated: all ranks hold the same bytes (MLA): they share one block.
        split_into: SGLang's tp_lcm_size, or 0: the number of shards that fleets of several sizes agree on. A rank of a
            smaller fleet holds several of them.
    """
    if replicated:
        return (Rank(0, 1),)
    count = split_into or tp_size
    each = count // tp_size
    return tuple(Rank(tp_rank * each + i, count) for i in range(each))


def page_names(roots: Sequence[str], hashes: Iterable[str]) -> list[str]:
    """Names of the blocks of pages, page by page and within a page in the order of `roots` (one for each shard)."""
    return [f"{PREFIX}/{root}/{page}" for page in hashes for root in roots]


def whole_pages(blocks: Sequence[bool], blocks_per_page: int) -> list[bool]:
    """For each page whether all of its blocks are there, or went well."""
    return [all(blocks[at : at + blocks_per_page]) for at in range(0, len(blocks), blocks_per_page)]


def leading(pages: Iterable[bool]) -> int:
    """Number of pages before the first that is missing."""
    count = 0
    for there in pages:
        if not there:
            break
        count += 1
    return count


def trailing_ends(pages: Sequence[bool], window: int) -> list[int]:
    """Lengths of prefixes, ascending, whose last `window` pages are all there (all of them in a shorter prefix)."""
    ends, run = [], 0
    for length, there in enumerate(pages, start=1):
        run = run + 1 if there else 0
        if run >= min(window, length):
            ends.append(length)
    return ends
