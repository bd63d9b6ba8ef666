"""Load or compute, for one request of vLLM: what kvcache/core/break_even.py says of its blocks, kept in its state.

Idea: a request's blocks are known with the places of their parts, one for each shard. What is not there yet comes to
the node of the hand-over. The choice is made once for all shards, by the slowest of them, and what each shard then
measures is learned for its own path.
"""

from __future__ import annotations

from collections.abc import Mapping

from mooncache.client.results import BlockTier
from mooncache.connectors.vllm.core.request import RequestState, ShardLoad
from mooncache.kvcache.core.break_even import BreakEven, Pace, place_name


class LoadWeighing:
    """The choice for each request of one engine.

    Args:
        may_cut: whether the engine can use a part of a load.
        shards: parts of a block.
    """

    def __init__(self, known: BreakEven, *, may_cut: bool, shards: int) -> None:
        self._known = known
        self._may_cut = may_cut
        self._shards = shards

    def _places(self, request: RequestState, end: int) -> tuple[tuple[str, ...], ...]:
        """Where the blocks from the local ones to `end` lie or will lie."""
        first = request.local_blocks
        there = request.places[first:end]
        if not (request.hint.wait_tokens and request.hint.store_node):
            return there
        coming = place_name(request.hint.store_node, BlockTier.DRAM)
        return there + ((coming,) * self._shards,) * (end - first - len(there))

    def ask_s(self, request: RequestState, blocks: int) -> float:
        """How long the pool has to say which of the first `blocks` it has."""
        return self._known.ask_s(blocks - request.local_blocks)

    def worth_awaiting(self, request: RequestState, awaited: int, now_s: float) -> int:
        """Those of the awaited blocks that are worth loading once they are there: only they are waited for."""
        first = request.local_blocks
        weighed = self._known.weigh(awaited - first, now_s, self._places(request, awaited))
        if weighed.load < weighed.found:
            request.weighed, request.reason, request.computed_faster = weighed, weighed.reason, True
        return first + weighed.load if weighed.load else 0

    def pays(self, request: RequestState, end: int) -> bool:
        """Whether all blocks to `end` are worth loading."""
        return self._known.pays(end - request.local_blocks, self._places(request, end))

    def weigh(self, request: RequestState, found: int, now_s: float) -> int:
        """Decide which of the blocks up to `found` are loaded. Returns the number of those that are not, once."""
        first = request.local_blocks
        weighed = request.weighed or self._known.weigh(found - first, now_s, request.places[first:])
        request.weighed = None
        request.load_end, request.found_end = min(found, first + weighed.load), found
        request.reason = weighed.reason or request.reason
        spared = found - request.load_end
        if request.spared_said:
            spared = 0  # when the pool was asked before
        request.spared_said = request.spared_said or bool(spared)
        request.computed_faster = request.computed_faster or bool(spared)
        return spared

    def pace(self, request: RequestState, end: int) -> Pace | None:
        """What a load of the blocks to `end` has to keep."""
        if not self._may_cut:
            return None
        first = request.local_blocks
        return self._known.pace(end - first, self._places(request, end), found=request.found_end - first)

    def loaded(self, request: RequestState, end: int, shards: Mapping[int, ShardLoad]) -> None:
        """Learn what each shard measured of a load of the blocks to `end`."""
        asked, places = end - request.local_blocks, self._places(request, end)
        for shard, part in shards.items():
            if part.is_cut or part.loaded >= asked:
                self._known.loaded(asked, part.loaded, part.seconds, places, shard)
