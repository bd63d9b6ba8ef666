"""How many leading tokens of each prompt a cache of a given size would have: stack distances of an LRU cache.

A block is a hit when fewer other blocks than the cache holds were used since its last use (Mattson, 1970), so one
pass gives all sizes at once. A prompt's blocks count as used last block first: the blocks nearest to the root stay
longest, as in every prefix cache. Only a leading run of hits counts.

Invariant: a larger cache never has fewer tokens of any prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
NEVER: Final = np.iinfo(np.int64).max // 4


def counts_of_larger_before(values: Ints) -> Ints:
    """For every position the number of earlier positions with a larger value; values are distinct.

    A wavelet tree from the highest bit down: among elements that share all higher bits, those with a 1 that come
    before one with a 0 are larger. n log n in NumPy, instead of one Python step per element.
    """
    count = len(values)
    found = np.zeros(count, dtype=np.int64)
    if count < 2:
        return found
    rank = np.empty(count, dtype=np.int64)
    rank[np.argsort(values, kind="stable")] = np.arange(count)
    order = np.arange(count)
    for bit in range(int(count - 1).bit_length() - 1, -1, -1):
        ranks = rank[order]
        ones = (ranks >> bit) & 1
        before = np.cumsum(ones) - ones
        group = ranks >> (bit + 1)
        starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
        base = np.repeat(before[starts], np.diff(np.r_[starts, count]))
        found[order] += np.where(ones == 0, before - base, 0)
        order = order[np.argsort(ranks >> bit, kind="stable")]
    return found


@dataclass(frozen=True, slots=True)
class ReuseDistances:
    """Stack distance of every block of every prompt, as the largest of its leading run."""

    offsets: Ints
    needed: Ints
    """Blocks that a cache needs for a hit on this block and all before it; NEVER for a first use."""
    input_tokens: Ints
    block_tokens: int

    def cached_tokens(self, capacity_blocks: float) -> Ints:
        """Leading tokens of each prompt that an LRU cache of so many blocks has; the last token is always computed."""
        hit = (self.needed <= capacity_blocks).astype(np.int64)
        sums = np.concatenate(([0], np.cumsum(hit)))
        blocks = sums[self.offsets[1:]] - sums[self.offsets[:-1]]
        cached: Ints = np.clip(blocks * self.block_tokens, 0, np.maximum(self.input_tokens - 1, 0))
        return cached

    @property
    def blocks_max(self) -> int:
        """Blocks beyond which a larger cache has nothing more."""
        reused = self.needed[self.needed < NEVER]
        return int(reused.max()) if len(reused) else 0


def measure(hash_ids: Ints, offsets: Ints, input_tokens: Ints, block_tokens: int) -> ReuseDistances:
    """Stack distances of a trace: request i uses blocks hash_ids[offsets[i]:offsets[i + 1]], root first."""
    count = len(hash_ids)
    lengths = np.diff(offsets)
    begin = np.repeat(offsets[:-1], lengths)
    end = np.repeat(offsets[1:], lengths)
    position = begin + (end - 1 - np.arange(count))  # last block first
    by_block = np.lexsort((position, hash_ids))
    same = (
        np.r_[False, hash_ids[by_block][1:] == hash_ids[by_block][:-1]] if count else np.zeros(0, dtype=bool)
    )
    previous = np.full(count, -1, dtype=np.int64)  # last use of the block at each position
    sorted_position = position[by_block]
    previous[sorted_position[same]] = sorted_position[np.flatnonzero(same) - 1]
    reused = np.flatnonzero(previous >= 0)
    repeats = np.zeros(count, dtype=np.int64)
    repeats[reused] = counts_of_larger_before(previous[reused])
    segment_begin = np.empty(count, dtype=np.int64)
    segment_begin[position] = begin
    distance = np.full(count, NEVER, dtype=np.int64)
    # Distinct blocks between the last use and the begin of this prompt, plus the block itself.
    distance[reused] = np.maximum(segment_begin[reused] - previous[reused] - repeats[reused], 1)
    needed = distance[position] if count else distance
    return ReuseDistances(offsets, _running_max(needed, offsets), input_tokens, block_tokens)


def _running_max(values: Ints, offsets: Ints) -> Ints:
    """Largest value so far within each segment."""
    if not len(values):
        return values
    segment = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    step = np.int64(1) << 40
    lifted = np.maximum.accumulate(np.minimum(values, step - 1) + segment * step) - segment * step
    result: Ints = np.where(lifted == step - 1, NEVER, lifted)
    return result
