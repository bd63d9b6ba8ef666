"""The decode batch of one instance, event by event: only joins, leaves and prompts change the length of a step.

Idea: between two changes B sequences each add a token of KV per step, so step k of a segment takes s + g k seconds
(g = B times the cost of a KV token) and k steps take k s + g k (k-1) / 2. The time of the next change, and the
step in which an arrival falls, follow without stepping; the lengths of the steps are written to one buffer, of
which a sequence's own gaps are a slice.
Invariants: reserved KV never exceeds the capacity; a sequence joins and leaves at step boundaries only; steps
written down equal the steps of a loop that makes one at a time (a test compares them).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mooncache.conductor.core.policy.types import DecodeCost
    from mooncache.simulate.sim_request import SimSequence

WORST_SHARE = 0.1  # the paper's TBT of a request: the mean of the longest tenth of its gaps
_COUNTED = np.arange(4096, dtype=np.float64)
ROUNDING_S = 1e-9  # clocks of hours, in floats, are not finer


class Batch:
    """Continuous batching with first come, first served places."""

    def __init__(self, cost: DecodeCost, capacity_tokens: float, sequences_max: float) -> None:
        self.cost, self.capacity_tokens, self.sequences_max = cost, capacity_tokens, sequences_max
        self.running: dict[int, SimSequence] = {}
        self.waiting: deque[SimSequence] = deque()
        self._heap: list[tuple[int, int, SimSequence]] = []
        self.kv_tokens = self.reserved_tokens = 0
        self.step = 0  # steps that are over when the segment begins
        self.begin_s = self.step_s = self._growth_s = self._stall_s = 0.0
        self._gaps: NDArray[np.float64] = np.zeros(256)
        self._gaps_begin = 0  # step whose length is the buffer's first
        self._gaps_end = 0
        self.busy_s = 0.0
        self.tokens = 0
        self.held_at_s = math.inf  # newcomers are held while a step would be longer

    def fits(self, sequence: SimSequence) -> bool:
        """There is room now."""
        return (
            self.reserved_tokens + sequence.reserved_tokens <= self.capacity_tokens
            and len(self.running) < self.sequences_max
            and (not self.running or self.tbt_with(sequence) <= self.held_at_s)
        )

    def never_fits(self, sequence: SimSequence) -> bool:
        """Not even an empty instance has the room."""
        return sequence.reserved_tokens > self.capacity_tokens

    def tbt_with(self, sequence: SimSequence) -> float:
        """The length of a step once the sequence has joined."""
        return self.cost.tbt_s(len(self.running) + 1, self.kv_tokens + sequence.kv_tokens)

    def tbt_after_all(self, sequence: SimSequence) -> float:
        """The length of a step once the sequence, and all that wait for a place, have joined."""
        kv_tokens = self.kv_tokens + sum(other.kv_tokens for other in self.waiting)
        return self.cost.tbt_s(len(self.running) + len(self.waiting) + 1, kv_tokens + sequence.kv_tokens)

    def tbt_now(self) -> float:
        """The length of a step of the batch as it is; 0 when nothing runs."""
        if not self.running:
            return 0.0
        cost = self.cost
        return cost.base_s + cost.per_sequence_s * len(self.running) + cost.per_token_s * self.kv_tokens

    # time within a segment

    def _after(self, steps: int) -> float:
        """The seconds that so many steps of this segment take."""
        return steps * self.step_s + self._growth_s * (steps * (steps - 1) / 2)

    def steps_until(self, seconds: float) -> int:
        """The fewest steps of this segment that take at least so long."""
        if seconds <= 0:
            return 0
        step_s, growth = self.step_s, self._growth_s
        guess = seconds / step_s
        if growth > 0:
            half = step_s - growth / 2
            guess = (math.sqrt(half * half + 2 * growth * seconds) - half) / growth
        steps = max(0, math.ceil(guess))
        # The formula of `_after`, written out: this is asked for at every event of a batch.
        while steps > 0 and (steps - 1) * step_s + growth * ((steps - 1) * (steps - 2) / 2) >= seconds:
            steps -= 1
        while steps * step_s + growth * (steps * (steps - 1) / 2) < seconds:
            steps += 1
        return steps

    def boundary_s(self, now_s: float) -> float:
        """When the step that runs at `now_s` ends; `now_s` when nothing runs."""
        if not self.running:
            return now_s
        return self.begin_s + self._after(self.steps_until(now_s - self.begin_s))

    def next_leave_s(self) -> float:
        """When the next sequence ends, infinite when none runs."""
        if not self._heap:
            return math.inf
        return self.begin_s + self._after(self._heap[0][0] - self.step)

    # changes; all of them happen at a boundary

    def advance(self, at_s: float) -> list[SimSequence]:
        """Close the segment at the boundary `at_s`; returns the sequences that ended there."""
        if not self.running:
            self.begin_s = at_s
            return []
        steps = self.steps_until(at_s - self.begin_s - ROUNDING_S)
        if steps:
            self._write(steps)
            self.busy_s += at_s - self.begin_s
            self.tokens += steps * len(self.running)
            self.step += steps
            self.kv_tokens += steps * len(self.running)
        self.begin_s = at_s
        ended = []
        while self._heap and self._heap[0][0] <= self.step:
            _, number, sequence = heapq.heappop(self._heap)
            del self.running[number]
            self.kv_tokens -= sequence.reserved_tokens
            self.reserved_tokens -= sequence.reserved_tokens
            ended.append(sequence)
        return ended

    def join(self, sequence: SimSequence, number: int, now_s: float) -> None:
        """Take the sequence in; `begin` has to follow."""
        sequence.first_step = self.step
        sequence.last_step = self.step + sequence.steps
        sequence.joined_s = now_s
        sequence.first_gap_s = -self._stall_s  # the batch stood still before it came: no gap of its own
        self.running[number] = sequence
        self.kv_tokens += sequence.kv_tokens
        self.reserved_tokens += sequence.reserved_tokens
        heapq.heappush(self._heap, (sequence.last_step, number, sequence))

    def drop(self, number: int) -> SimSequence | None:
        """Take a running sequence out before its end (its instance failed)."""
        sequence = self.running.pop(number, None)
        if sequence is not None:
            self._heap = [entry for entry in self._heap if entry[1] != number]
            heapq.heapify(self._heap)
            self.kv_tokens -= sequence.kv_tokens + self.step - sequence.first_step
            self.reserved_tokens -= sequence.reserved_tokens
        return sequence

    def stall(self, seconds: float) -> None:
        """A prompt was computed between two steps: the next step's gap is longer by that, and later begins."""
        self.begin_s += seconds
        self.busy_s += seconds
        if self.running:
            self._stall_s += seconds

    def begin(self, extra_s: float = 0.0) -> None:
        """Start a segment with the batch as it is; extra_s: what each step takes longer (a chunk in it)."""
        self.step_s = self.tbt_now() + extra_s
        self._growth_s = self.cost.per_token_s * len(self.running)

    def _write(self, steps: int) -> None:
        held = self._gaps_end - self._gaps_begin
        if held + steps > len(self._gaps):
            self._compact(steps)
            held = self._gaps_end - self._gaps_begin
        if steps == 1:
            self._gaps[held] = self.step_s
        else:
            self._gaps[held : held + steps] = self.step_s + self._growth_s * _counted(steps)
        self._gaps[held] += self._stall_s
        self._stall_s = 0.0
        self._gaps_end += steps

    def _compact(self, more: int) -> None:
        """Forget the steps that no running sequence has seen, and make room."""
        first = min((s.first_step for s in self.running.values()), default=self._gaps_end)
        kept = self._gaps[first - self._gaps_begin : self._gaps_end - self._gaps_begin].copy()
        size = max(256, 2 * (len(kept) + more))
        self._gaps = np.zeros(size)
        self._gaps[: len(kept)] = kept
        self._gaps_begin = first

    def gaps(self, sequence: SimSequence) -> NDArray[np.float64]:
        """The time between the tokens of a sequence that has just ended (a view; copy to keep)."""
        return self._gaps[sequence.first_step - self._gaps_begin : sequence.last_step - self._gaps_begin]


def _counted(steps: int) -> NDArray[np.float64]:
    """0, 1, 2, ..."""
    return _COUNTED[:steps] if steps <= len(_COUNTED) else np.arange(steps, dtype=np.float64)


def worst_gaps_mean(gaps: NDArray[np.float64], first_extra_s: float) -> tuple[float, float]:
    """(mean of the longest tenth of the gaps, mean of all); the first gap is longer by `first_extra_s`.

    Source: FAST'25, section 5: TBT of a request is the mean of its longest 10 % of token arrival intervals.
    """
    count = len(gaps)
    if not count:
        return 0.0, 0.0
    own = gaps.copy()
    own[0] += first_extra_s
    mean = float(np.add.reduce(own)) / count
    worst = max(1, math.ceil(count * WORST_SHARE - 1e-9))
    if worst < count:
        own.partition(count - worst)
        own = own[count - worst :]
    return float(np.add.reduce(own)) / worst, mean
