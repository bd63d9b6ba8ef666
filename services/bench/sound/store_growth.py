"""Growth of the store's index: the longest put while a node fills up with small blocks.

By the clock a put also takes as long as the operating system gives the processor to others. How long that is
tells a loop that does nothing but read the clock, for as long a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mooncache.client.native_call import call_native
from mooncache.reporting.rows import Row, bar_row

_FROM_BLOCKS = 100_000
_TO_BLOCKS = 10_000_000
_QUICK_BLOCKS = 2_000_000
_LONGEST_PUT_MS = 5.0


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Put one block after the other into a store that starts empty."""
    from mooncache import _native

    to_blocks = _QUICK_BLOCKS if quick else _TO_BLOCKS
    progress(f"{to_blocks:,} blocks")
    began_s = time.perf_counter()
    found = call_native(_native.store_growth_benchmark, _FROM_BLOCKS, to_blocks)
    took_s = time.perf_counter() - began_s
    progress("a loop that does nothing, as long")
    pause_ms = _longest_pause_s(took_s) * 1e3
    span = f"{_FROM_BLOCKS:,} to {to_blocks:,} blocks"
    return [
        bar_row(
            f"longest put, processor time, {span}", found["longest_put_ms"], "ms", at_most=_LONGEST_PUT_MS
        ),
        bar_row(f"longest put by the clock, other work included, {span}", found["longest_wall_ms"], "ms"),
        bar_row("longest pause of a loop that only reads the clock, as long (no Mooncache)", pause_ms, "ms"),
        bar_row(f"mean put, {span}", found["mean_put_us"], "us"),
    ]


def _longest_pause_s(seconds: float) -> float:
    last_s = time.perf_counter()
    end_s, longest_s = last_s + seconds, 0.0
    while last_s < end_s:
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return longest_s
