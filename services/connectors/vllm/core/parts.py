"""Which blocks of a request's groups are loaded and saved, by the engine's block tables.

Idea: a block table says what memory the engine has for a group: 0, its empty block, stands for blocks that it does not
keep, as those in front of a window. Nothing is loaded for them and nothing can be saved of them. The block of a state
is saved where the engine has said that it is the state behind the block's last token, or where the request began.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mooncache.connectors.vllm.core.groups import FULL, BlockRange, KvGroups
from mooncache.connectors.vllm.core.request import RequestState
from mooncache.connectors.vllm.core.save_ledger import SaveLedger

EMPTY_BLOCK = 0


def to_load(tables: Sequence[Sequence[int]], first: int, end: int) -> list[BlockRange]:
    """Of each group the blocks up to `end` that the engine has memory for, behind those that it had before."""
    found = []
    for group, table in enumerate(tables):
        low = next((at for at in range(first, end) if table[at] != EMPTY_BLOCK), end)
        if low < end:
            found.append(BlockRange(group, low, end))
    return found


def positions(ranges: Iterable[BlockRange]) -> list[tuple[int, int]]:
    """(group, block) of all of them, in their order."""
    return [(part.group, block) for part in ranges for block in range(part.first, part.end)]


def named(blocks: Iterable[tuple[int, int]], groups: KvGroups) -> tuple[int, ...]:
    """Of each block its group; empty when there is one."""
    return tuple(group for group, _ in blocks) if len(groups) > 1 else ()


def to_save(
    request: RequestState,
    groups: KvGroups,
    saves: SaveLedger,
    tables: Sequence[Sequence[int]],
    end: int,
    blocks_max: int,
) -> list[tuple[int, int]]:
    """(group, block) of what the pool does not have of the complete blocks before `end`; at most so many.

    `next_save` of the request is behind all that was looked at. Blocks that are verified come by themselves, before all
    others.
    """
    assert request.chain is not None
    verifies = request.next_save < request.verify_end
    end = min(end, request.verify_end) if verifies else end
    chosen: list[tuple[int, int]] = []
    ordered: set[bytes] = set()
    while request.next_save < end and len(chosen) + len(groups) <= blocks_max:
        block = request.next_save
        for group, table in enumerate(tables):
            key = request.chain.key(block, group=group)
            is_there = not verifies and _is_there(request, saves, group, block, key)
            if is_there or key in ordered or saves.is_in_flight(key):
                continue
            if groups.has_state(group) and not _is_state(request, group, block, table[block]):
                continue
            if table[block] != EMPTY_BLOCK:
                chosen.append((group, block))
                ordered.add(key)
            elif groups.windows[group] == FULL:
                request.unsaved.add(block)
        request.next_save += 1
    return chosen


def _is_state(request: RequestState, group: int, block: int, place: int) -> bool:
    """Whether the block in that place is the state behind its last token: by the engine's word, or because the request
    went on from it."""
    return request.states.get((group, block)) == place or (
        place != EMPTY_BLOCK and block == request.local_blocks - 1
    )


def _is_there(request: RequestState, saves: SaveLedger, group: int, block: int, key: bytes) -> bool:
    """Whether the pool is believed to hold a block. What its answer to the request did not have was evicted, unless it
    was saved after that.

    A decode leg waits for what a prefill leg computes: its blocks are offered even if they were saved before, because
    the pool may have evicted them. The saver asks before it sends.
    """
    known = request.known[group] if request.known else b""
    if block < len(known) and known[block]:
        return True
    return request.trusts_saves and saves.stored_since(
        key, request.known_as_of if block < len(known) else None
    )
