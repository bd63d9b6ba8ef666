"""Load or compute, for one sequence: what kvcache/core/break_even.py says of its blocks, kept with the sequence."""

from __future__ import annotations

from mooncache.client.results import BlockTier
from mooncache.hf_engine.core.sequence import Sequence
from mooncache.kvcache.core.break_even import BreakEven, Pace, place_name
from mooncache.kvcache.lookup import TIMEOUT_S


def places_of(sequence: Sequence) -> tuple[tuple[str, ...], ...]:
    """Where its blocks lie or will lie: what is not there yet comes to the node of the hint."""
    missing = sequence.awaited_blocks - len(sequence.places)
    if missing <= 0 or not sequence.hint.store_node:
        return sequence.places
    return sequence.places + ((place_name(sequence.hint.store_node, BlockTier.DRAM),),) * missing


def worth_awaiting(known: BreakEven | None, sequence: Sequence, now_s: float) -> int:
    """Those of the awaited blocks that are worth loading once they are there: only they are waited for."""
    awaited = sequence.awaited_blocks
    if known is None or not awaited:
        return awaited
    weighed = known.weigh(awaited, now_s, places_of(sequence))
    if weighed.load < weighed.found:
        sequence.weighed, sequence.reason, sequence.computed_faster = weighed, weighed.reason, True
    return weighed.load


def ask_s(known: BreakEven | None, sequence: Sequence, awaited: int) -> float:
    """How long the pool has to answer; who waits for another instance has the time of that wait."""
    if known is None or awaited or sequence.promise_end:
        return TIMEOUT_S
    return known.ask_s(sequence.reusable_blocks)


def worth_loading(known: BreakEven, sequence: Sequence, found: int, now_s: float) -> tuple[int, int]:
    """How many of the blocks that the pool has behind the local ones to load, and the tokens of those that are computed
    for that reason, said once."""
    first = sequence.computed // sequence.block_tokens
    weighed = sequence.weighed or known.weigh(found, now_s, sequence.places[first:])
    sequence.weighed = None
    worth, sequence.found_blocks = min(found, weighed.load), found
    sequence.reason = weighed.reason or sequence.reason
    if worth == found or sequence.spared_said:
        return worth, 0
    sequence.computed_faster = sequence.spared_said = True
    return worth, (found - worth) * sequence.block_tokens


def pace_of(known: BreakEven, sequence: Sequence) -> Pace:
    """What the load of a sequence has to keep."""
    places = places_of(sequence)[sequence.load.start : sequence.load.stop]
    return known.pace(len(sequence.load), places, found=sequence.found_blocks)
