"""Growth of the store's index: the longest put while a node fills up with small blocks."""

from __future__ import annotations

from collections.abc import Callable

from mooncache.bench.rows import Row, bar_row
from mooncache.client.native_call import call_native

_FROM_BLOCKS = 100_000
_TO_BLOCKS = 10_000_000
_QUICK_BLOCKS = 2_000_000
_LONGEST_PUT_MS = 5.0


def run(quick: bool, tell: Callable[[str], None]) -> list[Row]:
    """Put one block after the other into a store that starts empty."""
    from mooncache import _native

    to_blocks = _QUICK_BLOCKS if quick else _TO_BLOCKS
    tell(f"{to_blocks:,} blocks")
    found = call_native(_native.store_growth_benchmark, _FROM_BLOCKS, to_blocks)
    span = f"{_FROM_BLOCKS:,} to {to_blocks:,} blocks"
    return [
        bar_row(
            f"longest put, processor time, {span}", found["longest_put_ms"], "ms", at_most=_LONGEST_PUT_MS
        ),
        bar_row(f"longest put by the clock, other work included, {span}", found["longest_wall_ms"], "ms"),
        bar_row(f"mean put, {span}", found["mean_put_us"], "us"),
    ]
