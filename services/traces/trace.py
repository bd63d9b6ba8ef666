"""A trace: when requests came, how long they were, and which blocks of prompt they share.

One array for each column, so that a million requests are a few hundred megabytes and every question about all of
them is one expression. Row i is one request; rows stand in order of arrival. Equal ids mean equal blocks *behind
equal prefixes*: an id has one predecessor only, so the ids of all requests make a tree and a request is a path
from its root. A trace never changes; what cuts or stretches it returns another one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import random

    from numpy.typing import NDArray

BLOCK_TOKENS = 512


class TracePart(StrEnum):
    """What of a trace is played."""

    WHOLE = "whole"
    FIRST_HALF = "first half"
    SECOND_HALF = "second half"


@dataclass(frozen=True, slots=True)
class Trace:
    """Columns of a trace. `arrival_s` ascends; the last block of a request may be partial.

    `hash_ids[offsets[i]:offsets[i + 1]]` are the blocks of request i, `ceil(input_tokens / block_tokens)` of them.
    `tenant`, `session` and `priority` are there when the file had them for every row.
    """

    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    hash_ids: NDArray[np.int64]
    block_tokens: int = BLOCK_TOKENS
    tenant: NDArray[np.int32] | None = None
    session: NDArray[np.int32] | None = None
    priority: NDArray[np.int8] | None = None

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last; 0 for an empty trace."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    def blocks(self, row: int) -> list[int]:
        """Block ids of one request, from the beginning of its prompt."""
        ids: list[int] = self.hash_ids[self.offsets[row] : self.offsets[row + 1]].tolist()
        return ids

    def first(self, count: int) -> Trace:
        """The first `count` requests."""
        return self._cut(0, min(max(count, 0), len(self)))

    def window(self, begin_s: float, end_s: float) -> Trace:
        """Requests with begin_s <= arrival < end_s; their time counts from `begin_s`."""
        begin, end = np.searchsorted(self.arrival_s, (begin_s, end_s))
        cut = self._cut(int(begin), max(int(begin), int(end)))
        return replace(cut, arrival_s=cut.arrival_s - begin_s)

    def halves(self) -> tuple[Trace, Trace]:
        """The trace before and after the middle of its time; each counts its time from its own beginning."""
        if not len(self):
            return self, self
        begin_s, end_s = float(self.arrival_s[0]), float(self.arrival_s[-1])
        middle_s = (begin_s + end_s) / 2
        return self.window(begin_s, middle_s), self.window(middle_s, np.nextafter(end_s, np.inf))

    def part(self, part: TracePart) -> Trace:
        """The whole trace or one of its halves."""
        return self if part == TracePart.WHOLE else self.halves()[part == TracePart.SECOND_HALF]

    def speed(self, factor: float) -> Trace:
        """The same requests, `factor` times as fast."""
        if not factor > 0:
            raise ValueError(f"a trace can be played {factor} times as fast only for a factor above 0")
        return replace(self, arrival_s=self.arrival_s / factor)

    def with_outputs(self, tokens: int) -> Trace:
        """The same requests, each answered with `tokens` tokens."""
        return replace(self, output_tokens=np.full(len(self), tokens, np.int32))

    def spread(self, tick_s: float = 3.0, rng: random.Random | None = None) -> Trace:
        """Requests of one clock tick take turns within it, in the order they have.

        The public traces have stamps of about 3 s: ten requests at once, then silence, a burst that never was.
        Requests with equal stamps are laid evenly over the time until the next stamp, at most `tick_s`; with `rng`
        at random places instead. A trace whose stamps all differ stays as it is.
        """
        if len(self) < 2 or tick_s <= 0:
            return self
        starts = np.flatnonzero(np.r_[True, np.diff(self.arrival_s) > 0])
        counts = np.diff(np.r_[starts, len(self)])
        stamps = self.arrival_s[starts]
        widths = np.minimum(np.r_[np.diff(stamps), tick_s], tick_s)
        if rng is None:
            within = (np.arange(len(self)) - np.repeat(starts, counts)) / np.repeat(counts, counts)
        else:
            draws = np.random.default_rng(rng.getrandbits(64)).random(len(self))
            tick = np.repeat(np.arange(len(starts)), counts)
            within = np.where(np.repeat(counts, counts) > 1, draws[np.lexsort((draws, tick))], 0.0)
        return replace(self, arrival_s=np.repeat(stamps, counts) + within * np.repeat(widths, counts))

    def _cut(self, begin: int, end: int) -> Trace:
        first_block, last_block = int(self.offsets[begin]), int(self.offsets[end])
        return Trace(
            arrival_s=self.arrival_s[begin:end],
            input_tokens=self.input_tokens[begin:end],
            output_tokens=self.output_tokens[begin:end],
            offsets=self.offsets[begin : end + 1] - first_block,
            hash_ids=self.hash_ids[first_block:last_block],
            block_tokens=self.block_tokens,
            tenant=None if self.tenant is None else self.tenant[begin:end],
            session=None if self.session is None else self.session[begin:end],
            priority=None if self.priority is None else self.priority[begin:end],
        )
