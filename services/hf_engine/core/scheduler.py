"""Which sequences run next, on which blocks: continuous batching with chunked prefill.

Idea: a step is a list of `Work`: every sequence that lacks one token decodes it, and the prompts that are still being
computed share a budget of tokens, first come first served, so that others go on decoding. Blocks of a prompt are taken
when it starts, blocks of the answer one by one. When they run out, the youngest sequence gives up its blocks and waits
again; what it had computed is mostly still found by key. A sequence with a lower `priority` goes before others.
The caller does what is decided: loads, computes, saves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mooncache.hf_engine.core.blocks import BlockPool
from mooncache.hf_engine.core.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Work:
    """Compute the KV of `count` tokens from position `start` on; choose the next token when they are the last ones."""

    sequence: Sequence
    start: int
    count: int

    @property
    def chooses(self) -> bool:
        """True when a token follows from it."""
        return self.start + self.count == len(self.sequence.tokens)


class BatchScheduler:
    """Continuous batching with chunked prefill.

    Args:
        blocks: the pool of blocks.
        batch_max: sequences that may hold blocks at once.
        chunk_tokens: prompt tokens of one step.
        blocks_to_load: how many of the blocks that the pool has for a sequence are worth loading.
    """

    def __init__(
        self,
        blocks: BlockPool,
        *,
        batch_max: int,
        chunk_tokens: int,
        blocks_to_load: Callable[[Sequence, int], int] = lambda _, found: found,
    ) -> None:
        self.blocks = blocks
        self.batch_max = batch_max
        self.chunk_tokens = chunk_tokens
        self.blocks_to_load = blocks_to_load
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemption_count = 0

    def add(self, sequence: Sequence) -> None:
        """A new sequence, behind all of its priority or a lower one. What has run before is not passed."""
        at = len(self.waiting)
        while (
            at and self.waiting[at - 1].priority > sequence.priority and not self.waiting[at - 1].preemptions
        ):
            at -= 1
        self.waiting.insert(at, sequence)

    def admit(self) -> list[Sequence]:
        """Sequences that start now. Each is RUNNING, or LOADING when `load` is not empty.

        The queue's order is kept, except that sequences whose lookup is under way are passed over.
        """
        admitted = []
        for sequence in list(self.waiting):
            if sequence.state is State.LOOKUP:
                continue
            if len(self.running) >= self.batch_max or not self._place(sequence):
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def _place(self, sequence: Sequence) -> bool:
        """Take blocks for all tokens there are, reusing local ones; False when there are not enough."""
        size = sequence.block_tokens
        local = self.blocks.find(sequence.keys[: sequence.reusable_blocks])
        # One block for each sequence that runs is left alone, or the new one would push an older one out at once.
        spare = len(self.running)
        needed = sequence.blocks_for(len(sequence.tokens)) - len(local)
        fresh = self.blocks.allocate(needed) if needed + spare <= self.blocks.free_count else None
        if fresh is None:
            self.blocks.release(reversed(local))
            return False
        first = end = len(local)
        sequence.computed = first * size
        while end < sequence.reusable_blocks and end < len(sequence.present) and sequence.present[end]:
            end += 1
        if sequence.promise_end > end:
            end = sequence.promise_end
        else:
            sequence.promise_end = 0  # all of it is here or in the pool
            end = first + self.blocks_to_load(sequence, end - first) if end > first else end
        sequence.blocks = local + fresh
        sequence.load = range(first, end)
        sequence.state = State.LOADING if sequence.load else State.RUNNING
        if not sequence.preemptions:
            sequence.local_tokens = first * size
        return True

    def loaded(self, sequence: Sequence, good: int) -> None:
        """The first `good` blocks of `load` have their bytes; the rest has to be computed."""
        assert sequence.state is State.LOADING
        for number in sequence.load[:good]:
            self.blocks.publish(sequence.blocks[number], sequence.keys[number])
        sequence.computed += good * sequence.block_tokens
        sequence.load = range(0)
        sequence.state = State.RUNNING

    def plan(self) -> list[Work]:
        """The next step; empty when nothing can run now. Every token of the work has its block."""
        for sequence in list(self.running):  # oldest first
            if sequence.state is State.RUNNING:
                self._reserve(sequence)
        work, budget = [], self.chunk_tokens
        for sequence in self.running:
            if sequence.state is not State.RUNNING:
                continue
            room = len(sequence.blocks) * sequence.block_tokens - sequence.computed
            if sequence.left == 1 and room >= 1:
                work.append(Work(sequence, sequence.computed, 1))
            elif sequence.left > 1 and budget > 0:
                count = min(sequence.left, budget, room)
                budget -= count
                work.append(Work(sequence, sequence.computed, count))
        return work

    def _reserve(self, sequence: Sequence) -> None:
        """A block for the token to be decoded, if need be at the cost of the last by priority, then of the youngest."""
        while len(sequence.blocks) < sequence.blocks_for(len(sequence.tokens)):
            fresh = self.blocks.allocate(1)
            if fresh is not None:
                sequence.blocks += fresh
                continue
            victims = [other for other in reversed(self.running) if other.state is State.RUNNING]
            victim = max(victims, key=lambda other: other.priority, default=sequence)
            if victim is sequence:
                return  # blocks that are being loaded or saved come free soon
            self._preempt(victim)

    def _preempt(self, sequence: Sequence) -> None:
        self._drop_blocks(sequence)
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        sequence.state = State.WAITING
        sequence.preemptions += 1
        sequence.verify_end = 0  # its blocks may be others' next time
        self.preemption_count += 1

    def advance(self, work: Work) -> range:
        """The work is done. Returns numbers of the blocks that it completed."""
        sequence = work.sequence
        before = sequence.computed // sequence.block_tokens
        sequence.computed += work.count
        after = sequence.computed // sequence.block_tokens
        if after > before:
            sequence.extend_keys()
            for number in range(before, after):
                self.blocks.publish(sequence.blocks[number], sequence.keys[number])
        return range(before, after)

    def finish(self, sequence: Sequence) -> None:
        """The sequence is over, for whatever reason. One that is LOADING has to be `loaded` first."""
        assert sequence.state is not State.LOADING
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self._drop_blocks(sequence)
        elif sequence.state is not State.DONE:
            self.waiting.remove(sequence)
        sequence.state = State.DONE

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.blocks.release(reversed(sequence.blocks))  # the tail is reused first: a head serves more prompts
        sequence.blocks = []
        sequence.computed = 0

    def check(self) -> None:
        """Invariants; `held` references beyond the sequences' own are the caller's (saves under way)."""
        self.blocks.check()
        assert len(self.running) <= self.batch_max
        for sequence in self.running:
            assert sequence.state in {State.RUNNING, State.LOADING}
            assert sequence.computed <= len(sequence.blocks) * sequence.block_tokens
            assert sequence.computed < len(sequence.tokens)
        for sequence in self.waiting:
            assert sequence.state in {State.LOOKUP, State.WAITING}
            assert not sequence.blocks
