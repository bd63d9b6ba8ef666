"""The question to the pool: which keys of a request, in which order, and what its answer means.

Idea: all keys are asked for at once, those of one block next to each other. When some are awaited they come first. With
several groups or a window these are not simply the leading ones, but what going on at the awaited border needs: so no
request waits for a block in front of a window, which its writer may never have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mooncache.client.keys import KEY_BYTES
from mooncache.connectors.vllm.core.chain import at_positions, put_back
from mooncache.connectors.vllm.core.groups import KvGroups
from mooncache.connectors.vllm.core.parts import positions
from mooncache.connectors.vllm.core.request import RequestState
from mooncache.kvcache.core.shadow import VERIFIED, ShadowSampler
from mooncache.kvcache.leg_hint import LegRole

KEYS_ASKED_MAX = 1 << 16
"""Keys of one question, as many as the client takes at once."""


class AskedKeys(NamedTuple):
    """Packed keys of leading `blocks`; the first `awaited` of them are waited for."""

    keys: bytes
    awaited: int
    blocks: int


def ask(request: RequestState, groups: KvGroups, awaited: int) -> AskedKeys:
    """The keys to ask for, when the first `awaited` blocks of the prompt are awaited."""
    assert request.chain is not None
    chain, request.order = request.chain, []
    count = len(chain.parts)
    blocks = min(len(chain), KEYS_ASKED_MAX // count)
    keys, awaited = chain.interleaved(blocks), min(awaited, blocks)
    if not awaited or groups.is_plain:
        return AskedKeys(keys, awaited * count, blocks)
    needed = groups.needed(request.local_blocks, awaited)
    request.order = chain.order(blocks, *needed)
    keys = at_positions(keys, request.order, KEY_BYTES)
    return AskedKeys(keys, len(positions(needed)) * chain.shards, blocks)


def awaited_blocks(request: RequestState, groups: KvGroups, block_tokens: int) -> int:
    """Leading blocks that another instance is computing; 0 when none is missing here."""
    awaited = groups.awaited(request.hint.wait_tokens // block_tokens, request.limit)
    return awaited if awaited > request.local_blocks else 0


def promise_end(request: RequestState, awaited: int, block_tokens: int) -> int:
    """Promised is what leaves a token to compute."""
    return min(awaited, max(0, request.prompt_tokens - 1) // block_tokens)


def verifies(
    request: RequestState, tokens: int, block_tokens: int, sampler: ShadowSampler, now_s: float, draw: float
) -> bool:
    """Whether a hit is computed and compared. A decode leg loads what was computed a moment ago for it."""
    if request.running or request.hint.role is LegRole.DECODE or not sampler.takes(tokens, now_s, draw):
        return False
    request.verify_end, request.loads_off = tokens // block_tokens, True
    request.choice.reason = VERIFIED
    return True


def answered(request: RequestState, groups: KvGroups, present: Sequence[bool], places: Sequence[str]) -> None:
    """Note which blocks the pool has, and where, by its answer for the keys of `ask`."""
    assert request.chain is not None
    if request.order:
        present = put_back(present, request.order, default=False)
        places = put_back(places, request.order, default="")
    request.known = [bytearray(request.chain.whole(present, group)) for group in range(len(groups))]
    request.choice.places = request.chain.together(places, groups.lead)
