"""Load or compute, for one request: what break_even.py says of its blocks, kept with the request.

Idea: a request's blocks are known with the places of their parts, one for each shard. What is not there yet comes to
the node of the hand-over. The choice is made once for all shards, by the slowest of them, and what each shard then
measures is learned for its own path. Blocks are counted from the beginning of the prompt; `first` is the one behind
those that the engine has itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mooncache.client.results import BELOW_MEMORY, BlockTier
from mooncache.kvcache.core.break_even import (
    BreakEven,
    LoadPlan,
    Pace,
    cut_reason,
    node_and_tier,
    place_name,
)
from mooncache.kvcache.leg_hint import LegHint, LoadedFrom, most_loaded


@dataclass(frozen=True, slots=True)
class ShardLoad:
    """What one shard measured of a load: blocks that came, seconds of moving them, whether it was cut as too slow."""

    loaded: int
    seconds: float
    is_cut: bool


@dataclass(slots=True)
class LoadChoice:
    """What was decided for one request, and what became of it."""

    places: tuple[tuple[str, ...], ...] = ()  # for each block where its shards' parts lie, as far as known
    pace: Pace | None = None  # of the load that is under way
    reason: str = ""  # why blocks that the pool has were computed
    found_end: int = 0  # block before which the pool had all of them when they were weighed
    weighed: LoadPlan | None = None  # what was decided when awaited blocks were not there yet
    computed_faster: bool = False
    spared_said: bool = False
    load_cut: bool = False
    loaded_from: tuple[LoadedFrom, ...] = ()  # where blocks lay that were loaded, as far as known

    def was_cut(self, came: int, asked: int, seconds: float) -> None:
        """Its load fell behind its pace."""
        self.load_cut = True
        self.reason = cut_reason(came, asked, seconds, self.pace)


class LoadWeighing:
    """The choice for each request of one engine.

    Args:
        shards: parts of a block.
    """

    def __init__(self, known: BreakEven, *, shards: int = 1) -> None:
        self.known = known
        self._shards = shards

    def _places(self, choice: LoadChoice, hint: LegHint, first: int, end: int) -> tuple[tuple[str, ...], ...]:
        """Where the blocks from `first` to `end` lie or will lie."""
        there = choice.places[first:end]
        if not (hint.wait_tokens and hint.store_node):
            return there
        coming = place_name(hint.store_node, BlockTier.DRAM)
        return there + ((coming,) * self._shards,) * (end - first - len(there))

    def worth_awaiting(
        self, choice: LoadChoice, hint: LegHint, first: int, awaited: int, now_s: float
    ) -> int:
        """The block before which the awaited ones are worth loading once they are there, 0 when none is: only they are
        waited for."""
        if hint.load_always:
            return awaited
        weighed = self.known.weigh(awaited - first, now_s, self._places(choice, hint, first, awaited))
        if weighed.load < weighed.found:
            choice.weighed, choice.reason, choice.computed_faster = weighed, weighed.reason, True
        return first + weighed.load if weighed.load else 0

    def pays(self, choice: LoadChoice, hint: LegHint, first: int, end: int) -> bool:
        """Whether all blocks from `first` to `end` are worth loading."""
        return hint.load_always or self.known.pays(end - first, self._places(choice, hint, first, end))

    def weigh(
        self, choice: LoadChoice, hint: LegHint, first: int, found_end: int, now_s: float
    ) -> tuple[int, int]:
        """Which of the blocks from `first` on to load, when the pool has those before `found_end`.

        Returns the block before which they are loaded, and how many others the pool has, said once for a request.
        """
        if hint.load_always:
            choice.found_end = found_end
            return found_end, 0
        weighed = choice.weighed or self.known.weigh(found_end - first, now_s, choice.places[first:])
        choice.weighed = None
        load_end, choice.found_end = min(found_end, first + weighed.load), found_end
        choice.reason = weighed.reason or choice.reason
        if load_end == found_end or choice.spared_said:
            return load_end, 0
        choice.computed_faster = choice.spared_said = True
        return load_end, found_end - load_end

    def pace(self, choice: LoadChoice, hint: LegHint, first: int, end: int) -> Pace | None:
        """What a load of the blocks from `first` to `end` has to keep, if anything."""
        if hint.load_always:
            return None
        places = self._places(choice, hint, first, end)
        choice.pace = self.known.pace(end - first, places, found=choice.found_end - first)
        return choice.pace

    def loaded(
        self,
        choice: LoadChoice,
        hint: LegHint,
        first: int,
        end: int,
        shards: Mapping[int, ShardLoad],
        *,
        parts: int | None = None,
    ) -> None:
        """Learn what each shard measured of a load of the blocks from `first` to `end`.

        Args:
            parts: how many blocks that took, when it was another number; then they are of use all together only.
        """
        asked, places = end - first, self._places(choice, hint, first, end)
        together = None if parts == asked else parts
        loaded = {
            shard: part.loaded if together is None else asked * (part.loaded >= together)
            for shard, part in shards.items()
        }
        came = min(loaded.values(), default=0)
        choice.loaded_from = most_loaded((*choice.loaded_from, *_loaded_from(places[:came])))
        for shard, part in shards.items():
            if part.is_cut or loaded[shard] >= asked:
                self.known.loaded(asked, loaded[shard], part.seconds, places, shard)


def _loaded_from(places: Sequence[tuple[str, ...]]) -> Iterator[LoadedFrom]:
    """Where these blocks lay. A block whose parts lie at several places counts where it was slowest: on a disk."""
    for parts, blocks in Counter(places).items():
        found = [node_and_tier(part) for part in parts if part]
        if found:
            node, tier = next((at for at in found if at[1] in BELOW_MEMORY), found[0])
            yield LoadedFrom(node, tier, blocks)
