"""Which blocks of an admitted prompt are to come up from disks before the engine asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mooncache.client.keys import KEY_BYTES
from mooncache.conductor.core.decisions import Decision
from mooncache.conductor.core.placed import PlacedRun
from mooncache.conductor.core.policy.types import Branch

KEYS_MAX: Final = 4096
"""Of one call."""
BEGIN_MIN_S: Final = 0.2


def ssd_keys(
    keys: bytes, runs: Sequence[PlacedRun], local_tokens: int, prefix_tokens: int, block_tokens: int
) -> bytes:
    """Packed keys of the blocks on disks alone that the computing instance will load, in order."""
    if not block_tokens:
        return b""
    first, end = local_tokens // block_tokens, prefix_tokens // block_tokens
    found, begin = [], 0
    for run in runs:
        until = begin + run.blocks
        if run.is_on_ssd and min(until, end) > max(begin, first):
            found.append(keys[max(begin, first) * KEY_BYTES : min(until, end) * KEY_BYTES])
        begin = until
    return b"".join(found)[: KEYS_MAX * KEY_BYTES]


def keys_of(decision: Decision, keys: bytes) -> bytes:
    """The same for a decision; none when it was refused, or nothing is fetched."""
    choice = decision.choice
    if not choice.admitted or choice.branch == Branch.LOCAL:
        return b""
    # What lies behind the pool's leading blocks is being computed, and needs no disk.
    prefix = min(choice.prefix_tokens, decision.pool_tokens)
    return ssd_keys(keys, decision.pool.runs, decision.local_tokens, prefix, decision.record.block_tokens)


def begin_s(decision: Decision) -> float:
    """In how many seconds it is too late: the engine will have asked by then."""
    return max(BEGIN_MIN_S, decision.choice.queue_s)
