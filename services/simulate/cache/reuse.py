"""Eviction by the hits that blocks will still bring: policy "mooncache".

Idea: requests of one session use ever longer chains. Every use makes a `Chain`, which owns the blocks of the
request (it takes them from the chains before it): they were last used together and, up to where the session
forks, will be used together. The victim is the end of the chain that is worth least now (hazard.py): worth depends
on what was seen of the chain at its use, its class, and on the time since. Two kinds are worth next to nothing:
last, partly filled blocks of prompts (the next turn fills them, which changes their names) and what a session
left behind when it went on with another chain. Beginnings that several sessions share (system prompts) are
chains of their own: what is left behind and used after all shows where sessions part (`_forks`).
New blocks get no better treatment: a chain that is worth less than all the others is its own victim, which is
admission. Known are sessions, not only the blocks that are here: the last full block of each chain is remembered
after its eviction while the chain's age is learnt from, so turns, gaps and reuses are seen although blocks are gone.
Until something is learnt of the traffic, plain age (LRU) decides.
A store node sees chains before it stores blocks of them, and stores only those that are placed there. It uses the
moves below `use`: `seen` (a chain was asked for), `stored`, `discard`, `victim` and `set_aside`, one block at a
time. native/src/store/reuse.cpp is the same policy for the nodes, with the same decisions to the bit.
Cost: O(1) per block and O(log chains) per use. Memory: O(capacity + `chains_max`).

Invariant: a block that is here is owned by at most one chain, at a position below its `end`, and counted in its
`here` (a store node also holds blocks of no known chain; those are not known here); every chain with blocks here
has an entry in the heap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from mooncache.simulate.cache.base import NO_INFO, CacheTable, UseInfo
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

_REFRESH_USES: Final = 128
_CHAINS_MAX: Final = 1 << 16
_EXTENDS_BLOCKS: Final = 2  # a chain that keeps all but so many blocks of the one before it extends it
# Sessions that drop part of their history still use its beginning, so the first blocks are worth more.
_HEAD_BLOCKS: Final = 10
_HEAD_FACTOR: Final = 1.15
_START_USES: Final = 512
_EXPECTED_MAX: Final = 1 << 13
_FORKS_MAX: Final = 1024
_VALUE_USES: Final = 16
_HEAP_MIN: Final = 1024
_HEAP_SLACK: Final = 4


NO_BLOCK: Final = -1


class Victim(NamedTuple):
    """What goes next, and the hits per second that it may still bring (while age decides: its last use)."""

    block: int
    worth: float


class Chain:
    """One use of a chain, or of a part of it that begins at position `first`.

    `here` counts the blocks that are here and its own; all lie before position `end` of the whole chain.
    """

    __slots__ = ("blocks", "end", "first", "fork", "here", "klass", "number", "turn", "used_s", "waits")

    def __init__(
        self, number: int, first: int, blocks: Sequence[int], used_s: float, turn: int, klass: int
    ) -> None:
        self.number = number  # running: the older chain has the lower one
        self.blocks = blocks
        self.used_s = used_s
        self.turn = turn
        self.klass = klass
        self.first = first
        self.here = 0
        self.end = first + len(blocks)
        self.waits = True  # not used again yet
        self.fork = -1  # the block after which the session went another way


_Place = tuple[Chain, int]  # the chain that used a block last, and the block's position in it


class Reuse(CacheTable):
    """The eviction policy `mooncache`.

    `chains_max`: chains that are learnt from at one time. `start_uses`: uses during which age alone decides.
    `tells_chances`: `chances` gets the chance of another use of each block that `use` evicts, for who takes it then.
    """

    def __init__(
        self,
        capacity_blocks: int,
        chains_max: int = _CHAINS_MAX,
        start_uses: int = _START_USES,
        tells_chances: bool = False,
    ) -> None:
        self._tells_chances = tells_chances
        self.chances: dict[int, float] = {}
        self._start_uses = start_uses
        self._chains_max = chains_max
        self._owner: dict[int, _Place] = {}
        super().__init__(capacity_blocks, self._owner)
        self._remembered: dict[int, Chain] = {}  # last full block of chains that are learnt from
        self._ageing: list[deque[Chain]] = [deque() for _ in range(BANDS)]
        self._ageing_count = 0
        self._forks: dict[int, None] = {}  # blocks after which several sessions go on
        self._hazard = Hazard()
        self._uses = 0
        # (worth, number of the chain, class, chain), worth least first; some entries are out of date.
        self._heap: list[tuple[float, int, int, Chain]] = []
        self._value_at = 0
        self._heap_max = _HEAP_MIN
        self._expected: dict[int, _Place] = {}  # blocks that are not here, used last by the chain

    def use(self, blocks: Sequence[int], now_s: float, info: UseInfo = NO_INFO) -> list[int]:
        self.seen(blocks, now_s, info)
        fresh = {block for block in blocks if block not in self._owner}
        for block in blocks:
            self.stored(block, now_s)
        gone: list[int] = []
        while len(self._owner) > self.capacity_blocks:
            victim = self.victim(now_s)
            if victim is None:
                break
            if self._tells_chances:
                self.chances[victim.block] = self._chance(victim.block, now_s)
            self.discard(victim.block)
            gone.append(victim.block)
        return [block for block in gone if block not in fresh]

    def _chance(self, block: int, now_s: float) -> float:
        chain = self._owner[block][0]
        return self._hazard.chance_of(chain.klass, now_s - chain.used_s)

    def seen(
        self,
        blocks: Sequence[int],
        now_s: float,
        info: UseInfo = NO_INFO,
        here: Container[int] = (),
    ) -> None:
        """A chain was asked for. `here`: blocks that are stored although no chain of theirs was known."""
        self._uses += 1
        if self._uses == self._start_uses:
            self._value_at = 0  # another order
        if self._uses % _REFRESH_USES == 0:
            self._hazard.refresh()
        self._age(now_s)
        whole = blocks[:-1] if info.last_partial else blocks
        if info.last_partial:
            self._use_partial(blocks[-1], now_s)
        if whole:
            self._use_chain(whole, now_s, info)
        for block in blocks:
            if block in here:
                self.stored(block, now_s)
        while len(self._expected) > _EXPECTED_MAX:
            del self._expected[next(iter(self._expected))]
        if len(self._heap) > self._heap_max:
            self._value_anew(now_s)

    def stored(self, block: int, now_s: float) -> bool:
        """The block is here now. False when no chain of it was seen lately: then it stays unknown."""
        if block in self._owner:
            return True
        expected = self._expected.pop(block, None)
        if expected is None:
            return False
        chain, at = expected
        self._owner[block] = expected
        chain.here += 1
        if chain.here == 1 or at >= chain.end:  # it had none, or had lost its end
            chain.end = max(chain.end, at + 1)
            self._note(chain, now_s)
        return True

    def _use_partial(self, block: int, now_s: float) -> None:
        before = self._last_use(block)
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
        before = self._last_use(blocks[-1])
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
            chain = self._last_use(block)
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
            if before.here > 0:
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
        """Chains that came into another band of age: not used in the one before."""
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
        """Give the chain its blocks: the stored ones now, the others when they are stored."""
        owner = self._owner
        for at, block in enumerate(chain.blocks, start=chain.first):
            place = owner.get(block)
            if place is None:
                self._expect(block, (chain, at))
            else:
                place[0].here -= 1
                chain.here += 1
                owner[block] = (chain, at)
        if chain.here > 0:
            self._note(chain, chain.used_s)
        self._remember(chain)

    # --- victims ---

    def _worth(self, chain: Chain, now_s: float) -> float:
        if self._uses < self._start_uses:
            return chain.used_s
        worth = self._hazard.worth_of(chain.klass, now_s - chain.used_s)
        return worth * _HEAD_FACTOR if chain.end - chain.first <= _HEAD_BLOCKS else worth

    def _note(self, chain: Chain, now_s: float) -> None:
        heappush(self._heap, (self._worth(chain, now_s), chain.number, chain.klass, chain))

    def _value_anew(self, now_s: float) -> None:
        """Worths move with age; often enough when it is done once in a sixteenth of the chains' number of uses."""
        live = {
            number: chain for _, number, klass, chain in self._heap if klass == chain.klass and chain.here > 0
        }
        self._heap = [
            (self._worth(chain, now_s), chain.number, chain.klass, chain) for chain in live.values()
        ]
        heapify(self._heap)
        self._value_at = self._uses + max(_VALUE_USES, len(self._heap) // 16)
        self._heap_max = 2 * len(self._heap) + _HEAP_MIN

    def victim(self, now_s: float, incoming: int = NO_BLOCK) -> Victim | None:
        """The last block of the chain that is worth least (of equals the older one); it stays until `discard`.

        `incoming`: the block that room is made for. Its own chain gives nothing unless no other can.
        """
        # Without uses only entries pile up: of chains that were set aside and came back.
        if self._uses >= self._value_at or len(self._heap) > _HEAP_SLACK * self._heap_max:
            self._value_anew(now_s)
        place = self._expected.get(incoming)
        own = place[0] if place is not None else None
        aside: tuple[float, int, int, Chain] | None = None
        found: Victim | None = None
        while self._heap and found is None:
            worth, _, klass, chain = self._heap[0]
            if chain.here == 0 or klass != chain.klass:
                heappop(self._heap)
            elif chain is own and aside is None:
                aside = heappop(self._heap)
            elif chain is not own:
                found = self._last_of(chain, worth, now_s)
            else:  # a second entry of the same chain
                heappop(self._heap)
        if aside is None:
            return found
        heappush(self._heap, aside)
        return found or self._last_of(aside[3], aside[0], now_s)

    def _last_of(self, chain: Chain, worth: float, now_s: float) -> Victim | None:
        """The chain's last block; None when it has none behind its head, which is worth more, or none at all."""
        head_end = chain.first + _HEAD_BLOCKS
        floor = head_end if chain.end > head_end else chain.first
        while chain.end > floor:
            block = chain.blocks[chain.end - 1 - chain.first]
            place = self._owner.get(block)
            if place is not None and place[0] is chain:
                return Victim(block, worth)
            chain.end -= 1
        if chain.here > 0:
            self._note_anew(chain, now_s)
        return None

    def _note_anew(self, chain: Chain, now_s: float) -> None:
        """What is left of the chain is worth more than its entry says, which is on top."""
        if self._heap and self._heap[0][3] is chain:
            heappop(self._heap)
        self._note(chain, now_s)

    def discard(self, block: int) -> None:
        place = self._owner.pop(block, None)
        if place is not None:
            place[0].here -= 1

    def set_aside(self, block: int) -> None:
        """The block cannot go now (it is being read): it counts as gone until `stored`."""
        place = self._owner.pop(block, None)
        if place is not None:
            place[0].here -= 1
            self._expect(block, place)

    def _expect(self, block: int, place: _Place) -> None:
        self._expected.pop(block, None)  # newest last
        self._expected[block] = place

    def _last_use(self, block: int) -> Chain | None:
        """The chain that used the block last, as far as that is known."""
        place = self._owner.get(block) or self._expected.get(block)
        return place[0] if place is not None else self._remembered.get(block)
