"""A sequence's blocks as a job for the pool, and whether they are verified instead of loaded."""

from __future__ import annotations

from collections.abc import Iterable

from mooncache.hf_engine.core.sequence import Sequence
from mooncache.kvcache.core.shadow import VERIFIED, ShadowSampler
from mooncache.kvcache.leg_hint import LegRole
from mooncache.kvcache.transfers import TransferJob


def job_of(name: str, sequence: Sequence, numbers: Iterable[int]) -> TransferJob:
    """The blocks of these numbers, to be loaded or saved."""
    pairs = [(sequence.keys[number], sequence.blocks[number]) for number in numbers]
    keys, blocks = zip(*pairs, strict=True)
    hint = sequence.hint
    return TransferJob(
        name,
        keys,
        blocks,
        sequence.trace,
        node=hint.store_node,
        is_awaited=hint.is_awaited,
        session_token=hint.session_token,
    )


def begin_verifying(
    sequence: Sequence, found: int, sampler: ShadowSampler, now_s: float, draw: float
) -> bool:
    """Whether the first `found` blocks, which the pool has, are computed to verify them.

    All of the prompt has to be computed for that: what was loaded before may be wrong itself. A decode leg loads what
    was computed a moment ago for this request.
    """
    sequence.verify_end = 0
    if sequence.computed or sequence.preemptions or sequence.hint.role is LegRole.DECODE:
        return False
    if not sampler.takes(found * sequence.block_tokens, now_s, draw):
        return False
    sequence.verify_end, sequence.choice.reason = found, VERIFIED
    return True
