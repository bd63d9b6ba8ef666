"""Eviction by the hits that blocks will still bring: policy "mooncache".

Idea: requests of one session use ever longer chains. Every use makes a `Chain`, which owns the blocks of the
request (it takes them from the chains before it): they were last used together and, up to where the session
forks, will be used together. The victim is the end of the chain that is worth least now (hazard.py): worth depends
on what was seen of the chain at its use, its class, and on the time since. Two kinds are worth next to nothing:
last, partly filled blocks of prompts (the next turn fills them, which changes their names) and what a session
left behind when it went on with another chain. Beginnings that several sessions share (system prompts) are
chains of their own: what is left behind and used after all shows where sessions part (`_forks`).
New blocks get no better treatment: a chain that is worth less than all the others is its own victim, which is
admission. Known are sessions, not only resident blocks: the last full block of each chain is remembered after its
eviction while the chain's age is learnt from, so turns, gaps and reuses are seen although the blocks are gone.
Where traffic is unlike anything that was learnt, LRU may do better: `Duel` follows it then.
Cost: O(1) per block and O(log chains) per use. Memory: O(capacity + `chains_max`).

Invariant: a resident block is owned by exactly one chain and lies in its [start, end); every chain with blocks has
an entry in the heap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from mooncache.simulate.cache.base import NO_INFO, UseInfo, leading_run
from mooncache.simulate.cache.hazard import (
    BAND_BEGIN_S,
    BANDS,
    LEFT,
    PARTIAL,
    SHARED,
    SHARED_GAP_BEGIN_S,
    Hazard,
    Signals,
    band_of,
    class_of,
    shared_class,
)
from mooncache.simulate.cache.recency import Lru

_REFRESH_USES: Final = 128
_CHAINS_MAX: Final = 1 << 16
_EXTENDS_BLOCKS: Final = 2  # a chain that keeps all but so many blocks of the one before it extends it
# Sessions that drop part of their history still use its beginning, so the first blocks are worth more.
_HEAD_BLOCKS: Final = 10
_HEAD_FACTOR: Final = 1.2
_DUEL_USES: Final = 512  # worths are judged after so many uses
_DUEL_KEEP: Final = 0.998
_DUEL_MARGIN: Final = 0.025
_DUEL_PAUSE_USES: Final = 1024
_DUEL_PAUSE_MAX_USES: Final = 16_384
_FORKS_MAX: Final = 1024
_VALUE_USES: Final = 16
_HEAP_MIN: Final = 1024


class Chain:
    """One use of a chain, or of a part of it that begins at position `first`.

    `start` and `end` are positions in the whole chain: between them blocks are resident and its own.
    """

    __slots__ = ("blocks", "end", "first", "fork", "klass", "number", "start", "turn", "used_s", "waits")

    def __init__(
        self, number: int, first: int, blocks: Sequence[int], used_s: float, turn: int, klass: int
    ) -> None:
        self.number = number  # running: the older chain has the lower one
        self.blocks = blocks
        self.used_s = used_s
        self.turn = turn
        self.klass = klass
        self.first = self.start = first
        self.end = first + len(blocks)
        self.waits = True  # not used again yet
        self.fork = -1  # the block after which the session went another way


class Duel:
    """Whether plain age (LRU) would hit more now: then it decides for a while, and worths are tried again.

    A second LRU cache of ids, as large as this one, tells what LRU would have hit.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self.by_age = False
        self._lru = Lru(capacity_blocks)
        self._lead = self._references = 0.0  # hits of LRU beyond ours, and all blocks; both fade
        self._uses_left = _DUEL_USES
        self._pause_uses = _DUEL_PAUSE_USES

    def judge(self, references: int, hits: int, blocks: Sequence[int], now_s: float) -> bool:
        """One more use, before it happens. True when the order of victims changes."""
        self._lead = self._lead * _DUEL_KEEP + self._lru.leading(blocks, now_s) - hits
        self._references = self._references * _DUEL_KEEP + references
        self._lru.use(blocks, now_s)
        self._uses_left -= 1
        if self._uses_left > 0:
            return False
        if self.by_age:
            self.by_age, self._uses_left = False, _DUEL_USES
            self._lead = self._references = 0.0
            return True
        if self._lead <= self._references * _DUEL_MARGIN:
            return False
        self.by_age, self._uses_left = True, self._pause_uses
        self._pause_uses = min(2 * self._pause_uses, _DUEL_PAUSE_MAX_USES)
        return True


class Reuse:
    """See the module's text. `chains_max`: chains that are learnt from at one time."""

    def __init__(self, capacity_blocks: int, chains_max: int = _CHAINS_MAX) -> None:
        self.capacity_blocks = capacity_blocks
        self._chains_max = chains_max
        self._owner: dict[int, Chain] = {}
        self._remembered: dict[int, Chain] = {}  # last full block of chains that are learnt from
        self._ageing: list[deque[Chain]] = [deque() for _ in range(BANDS)]
        self._ageing_count = 0
        self._forks: dict[int, None] = {}  # blocks after which several sessions go on
        self._hazard = Hazard()
        self._duel = Duel(capacity_blocks)
        self._uses = 0
        # (worth, number of the chain, class, chain), worth least first; some entries are out of date.
        self._heap: list[tuple[float, int, int, Chain]] = []
        self._value_at = 0
        self._heap_max = _HEAP_MIN
        self._fresh: set[int] = set()  # blocks that this use brought

    def use(self, blocks: Sequence[int], now_s: float, info: UseInfo = NO_INFO) -> list[int]:
        self._uses += 1
        if self._duel.judge(len(blocks), self.leading(blocks, now_s), blocks, now_s):
            self._value_at = 0  # another order
        if self._uses % _REFRESH_USES == 0:
            self._hazard.refresh()
        self._age(now_s)
        self._fresh.clear()
        whole = blocks[:-1] if info.last_partial else blocks
        if info.last_partial:
            self._use_partial(blocks[-1], now_s)
        if whole:
            self._use_chain(whole, now_s, info)
        if len(self._heap) > self._heap_max:
            self._value_anew(now_s)
        return self._evict(now_s)

    def _use_partial(self, block: int, now_s: float) -> None:
        before = self._owner.get(block) or self._remembered.get(block)
        if before is not None:
            self._reused(before, now_s)
        self._own(Chain(3 * self._uses, 0, (block,), now_s, 1, PARTIAL))

    def _use_chain(self, blocks: Sequence[int], now_s: float, info: UseInfo) -> None:
        known, before = self._find(blocks)
        shared = self._shared(blocks, known)
        if shared > 0:
            self._use_shared(blocks[:shared], now_s)
        turn, gap_s = 1, 0.0
        if before is not None and known > shared:
            gap_s = now_s - before.used_s
            turn = self._continues(before, blocks, known, now_s)
        if len(blocks) > shared:
            length = max(info.chain_blocks, info.first + len(blocks)) + (1 if info.last_partial else 0)
            klass = class_of(Signals(turn, gap_s, length, length - info.first - known))
            self._own(Chain(3 * self._uses + 2, shared, blocks[shared:], now_s, turn, klass))

    def _use_shared(self, blocks: Sequence[int], now_s: float) -> None:
        before = self._owner.get(blocks[-1]) or self._remembered.get(blocks[-1])
        gap_s = SHARED_GAP_BEGIN_S[-1]
        if before is not None:
            gap_s = now_s - before.used_s
            if before.klass >= SHARED:
                self._reused(before, now_s)
        self._own(Chain(3 * self._uses + 1, 0, blocks, now_s, 1, shared_class(gap_s)))

    # --- sessions ---

    def _find(self, blocks: Sequence[int]) -> tuple[int, Chain | None]:
        """How many leading blocks are known, and the chain that used the last of them last."""
        for known in range(len(blocks), 0, -1):
            block = blocks[known - 1]
            chain = self._owner.get(block) or self._remembered.get(block)
            if chain is not None:
                return known, chain
        return 0, None

    def _shared(self, blocks: Sequence[int], known: int) -> int:
        """Blocks at the beginning that other sessions use too."""
        for at in range(known - 1, -1, -1):
            if blocks[at] in self._forks:
                self._forks[blocks[at]] = self._forks.pop(blocks[at])
                return at + 1
        return 0

    def _continues(self, before: Chain, blocks: Sequence[int], known: int, now_s: float) -> int:
        """The session goes on after `known` blocks of `before`; the turn this is."""
        if before.fork >= 0:  # it was left behind and is used after all: several sessions share its beginning
            self._forks[before.fork] = None
            if len(self._forks) > _FORKS_MAX:
                del self._forks[next(iter(self._forks))]
        self._reused(before, now_s)
        extends = known > before.first + len(before.blocks) - _EXTENDS_BLOCKS
        if not extends and before.fork < 0:
            before.fork = blocks[known - 1]
            before.waits = True  # for a use of what it left behind
        if before.klass != LEFT:
            before.klass = LEFT
            if before.start < before.end:
                self._note(before, now_s)
        return before.turn + 1 if extends else max(before.turn, 2)

    def _reused(self, chain: Chain, now_s: float) -> None:
        if chain.waits:
            chain.waits = False
            age_s = now_s - chain.used_s
            band = band_of(age_s)
            self._hazard.reused(chain.klass, band, age_s - BAND_BEGIN_S[band])

    def _remember(self, chain: Chain) -> None:
        self._remembered[chain.blocks[-1]] = chain
        self._ageing[0].append(chain)
        self._ageing_count += 1
        if self._ageing_count > self._chains_max:
            self._forget(next(filter(None, reversed(self._ageing))).popleft())

    def _forget(self, chain: Chain) -> None:
        self._ageing_count -= 1
        last = chain.blocks[-1]
        if self._remembered.get(last) is chain:
            del self._remembered[last]

    def _age(self, now_s: float) -> None:
        """Chains that came into another band of age: nobody used them in the one before."""
        for band in range(BANDS - 1):
            chains, end_s = self._ageing[band], BAND_BEGIN_S[band + 1]
            seconds = end_s - BAND_BEGIN_S[band]
            while chains and now_s - chains[0].used_s >= end_s:
                chain = chains.popleft()
                if not chain.waits:
                    self._forget(chain)
                    continue
                self._hazard.waited(chain.klass, band, seconds)
                if band + 2 < BANDS:
                    self._ageing[band + 1].append(chain)
                else:
                    self._forget(chain)

    # --- blocks ---

    def _own(self, chain: Chain) -> None:
        """Makes the chain's blocks resident, its own and in their queue."""
        owner, previous = self._owner, None
        for at, block in enumerate(chain.blocks, start=chain.first):
            was = owner.get(block)
            if was is not previous:
                if previous is not None:
                    self._lose_front(previous, at)
                previous = was
            if was is None:
                self._fresh.add(block)
            owner[block] = chain
        if previous is not None:
            self._lose_front(previous, chain.end)
        self._note(chain, chain.used_s)
        self._remember(chain)

    def _lose_front(self, chain: Chain, start: int) -> None:
        """Its blocks before `start` belong to a newer chain now."""
        chain.start = start

    # --- victims ---

    def _worth(self, chain: Chain, now_s: float) -> float:
        if self._duel.by_age:
            return chain.used_s
        worth = self._hazard.worth_of(chain.klass, now_s - chain.used_s)
        return worth * _HEAD_FACTOR if chain.end - chain.first <= _HEAD_BLOCKS else worth

    def _note(self, chain: Chain, now_s: float) -> None:
        heappush(self._heap, (self._worth(chain, now_s), chain.number, chain.klass, chain))

    def _value_anew(self, now_s: float) -> None:
        """Worths move with age; often enough when it is done once in a sixteenth of the chains' number of uses."""
        live = (
            entry[3] for entry in self._heap if entry[2] == entry[3].klass and entry[3].start < entry[3].end
        )
        self._heap = [(self._worth(chain, now_s), chain.number, chain.klass, chain) for chain in live]
        heapify(self._heap)
        self._value_at = self._uses + max(_VALUE_USES, len(self._heap) // 16)
        self._heap_max = 2 * len(self._heap) + _HEAP_MIN

    def _victim(self, now_s: float) -> Chain:
        """The chain with blocks that is worth least; the older one of equals."""
        if self._uses >= self._value_at:
            self._value_anew(now_s)
        while True:
            _, _, klass, chain = self._heap[0]
            if chain.start < chain.end and klass == chain.klass:
                return chain
            heappop(self._heap)

    def _evict(self, now_s: float) -> list[int]:
        gone: list[int] = []
        surplus = len(self._owner) - self.capacity_blocks
        while surplus > 0:
            chain = self._victim(now_s)
            head_end = chain.first + _HEAD_BLOCKS
            start = max(chain.start, chain.end - surplus, head_end if chain.end > head_end else 0)
            for at in range(chain.end - 1, start - 1, -1):
                block = chain.blocks[at - chain.first]
                if self._owner.get(block) is chain:
                    del self._owner[block]
                    gone.append(block)
                    surplus -= 1
            chain.end = start
            if chain.start < start == head_end:  # what is left is worth more
                heappop(self._heap)
                self._note(chain, now_s)
        return [block for block in gone if block not in self._fresh]

    def discard(self, block: int) -> None:
        self._owner.pop(block, None)

    def leading(self, blocks: Sequence[int], now_s: float) -> int:
        return leading_run(self._owner, blocks)

    def __contains__(self, block: int, /) -> bool:
        return block in self._owner

    def __len__(self) -> int:
        return len(self._owner)
