"""What has to hold for all rows of a trace together. Each check names the first line that breaks it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from mooncache.errors import TraceInvalid
from mooncache.traces.trace import BLOCK_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A person (or a tool) needs at least this long from one turn to the next, in the median of all conversations.
_TURN_LEAST_S = 0.5
_TURNS_TO_JUDGE = 20
# Stamps that begin later than this are not times since the beginning of a trace, but of a calendar.
_EPOCH_S = 10 * 86_400.0
# With fewer rows and blocks than these many sizes fit by chance.
_ROWS_TO_JUDGE = 4
_BLOCKS_TO_JUDGE = 16
_BLOCK_SIZES = (512, 16, 32, 64, 128, 256, 1024, 2048, 4096)


def check_blocks(
    name: str,
    lines: NDArray[np.int64],
    inputs: NDArray[np.int64],
    counts: NDArray[np.int64],
    block_tokens: int | None,
) -> int:
    """Every request has ceil(input / block) ids. Returns the tokens of a block: given, 512, or what fits all rows."""
    if block_tokens is not None and block_tokens < 1:
        raise TraceInvalid(f"block_tokens is {block_tokens}, it has to be 1 or more")
    can_tell = len(inputs) >= _ROWS_TO_JUDGE and int(counts.sum()) >= _BLOCKS_TO_JUDGE
    sizes = (block_tokens,) if block_tokens else _BLOCK_SIZES if can_tell else (BLOCK_TOKENS,)
    wrong: dict[int, NDArray[np.int64]] = {}
    for size in sizes:
        wrong[size] = np.flatnonzero(-(-inputs // size) != counts)
        if not len(wrong[size]):
            return size
    # The size that most rows have is what the file means; the row that differs is what is wrong with it.
    size = min(sizes, key=lambda each: (len(wrong[each]), each != BLOCK_TOKENS))
    row = int(wrong[size][0])
    expected = -(-int(inputs[row]) // size)
    raise TraceInvalid(
        f"{name}, line {lines[row]}: hash_ids has {counts[row]} ids, but input_length {inputs[row]} needs {expected} "
        f"blocks of {size} tokens ({len(wrong[size]):,} of {len(inputs):,} lines are like this; if blocks have "
        "another size, say --block-tokens)"
    )


def check_parents(
    name: str, lines: NDArray[np.int64], ids: NDArray[np.int64], offsets: NDArray[np.int64]
) -> None:
    """Every id has one predecessor everywhere: an id names a block together with all that is before it."""
    if not len(ids):
        return
    before = np.r_[-1, ids[:-1]]
    before[offsets[:-1][offsets[:-1] < len(ids)]] = -1
    keys = compact(ids)
    parent = np.full(int(keys.max()) + 1, -1, np.int64)
    # Assigned from the last place to the first: what stays is the predecessor at the first place.
    parent[keys[::-1]] = before[::-1]
    conflict = np.flatnonzero(parent[keys] != before)
    if not len(conflict):
        return
    place = int(conflict[0])
    row = int(np.searchsorted(offsets, place, side="right")) - 1
    first_row = int(np.searchsorted(offsets, int(np.argmax(keys == keys[place])), side="right")) - 1
    raise TraceInvalid(
        f"{name}, line {lines[row]}: hash_ids[{place - int(offsets[row])}] is {ids[place]} behind "
        f"{_follows(int(before[place]))}, but on line {lines[first_row]} it is behind "
        f"{_follows(int(parent[keys[place]]))}; equal ids mean equal blocks behind equal prefixes"
    )


def check_times(
    name: str,
    lines: NDArray[np.int64],
    stamps: NDArray[np.float64],
    ids: NDArray[np.int64],
    offsets: NDArray[np.int64],
    unit: str,
) -> NDArray[np.float64]:
    """Arrival times in seconds: they ascend, and their unit can be true. Stamps of a calendar count from the first."""
    back = np.flatnonzero(np.diff(stamps) < 0)
    if len(back):
        row = int(back[0]) + 1
        raise TraceInvalid(
            f"{name}, line {lines[row]}: timestamp {stamps[row]:.16g} is before that of the request above it "
            f"({stamps[row - 1]:.16g}); requests stand in order of arrival, sort the file by timestamp"
        )
    scale = 1.0 if unit == "s" else 1000.0
    arrival_s = stamps / scale
    if arrival_s[0] >= _EPOCH_S:
        arrival_s = (stamps - stamps[0]) / scale
    if not unit:
        pause_s = _turn_pause_s(arrival_s, ids, offsets)
        if pause_s < _TURN_LEAST_S and arrival_s[-1] - arrival_s[0] < 86_400 / 20:
            raise TraceInvalid(
                f"{name}: field timestamp looks like seconds, it has to be milliseconds: with milliseconds the median "
                f"conversation goes on after {pause_s * 1000:.3g} ms. Say --time-unit s, or ms if it is right"
            )
    return arrival_s


def _turn_pause_s(
    arrival_s: NDArray[np.float64], ids: NDArray[np.int64], offsets: NDArray[np.int64]
) -> float:
    """Median time from one request of a conversation to the next; infinite when there are too few to tell.

    Blocks that two requests share are a system prompt as likely as a conversation, so only blocks that no more than
    a few requests have are asked.
    """
    if not len(ids):
        return math.inf
    keys = compact(ids)
    uses = np.bincount(keys)
    order = np.argsort(keys, kind="stable")
    at_s = np.repeat(arrival_s, np.diff(offsets))[order]
    same = (keys[order][1:] == keys[order][:-1]) & (uses[keys[order][1:]] <= 3)
    pauses = np.diff(at_s)[same]
    return float(np.median(pauses)) if len(pauses) >= _TURNS_TO_JUDGE else math.inf


def compact(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids as small numbers: themselves when they are small already, else their rank."""
    if len(ids) and int(ids.max()) < 4 * len(ids) + 1024:
        return ids
    _, ranks = np.unique(ids, return_inverse=True)
    return ranks.astype(np.int64)


def _follows(parent: int) -> str:
    return "nothing (the first block)" if parent < 0 else str(parent)
