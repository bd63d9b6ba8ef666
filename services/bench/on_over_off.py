"""Gets and puts of a pool with something turned on over the same pool without it, in turn within one run."""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median
from typing import Final

from mooncache.bench.store.ours import OurClient
from mooncache.reporting.rows import Row, bar_row

_OVER_OFF: Final = 0.97
_SMALL, _LARGE = 4 << 10, 1 << 20
_BATCH: Final = 16
_KINDS: Final = ("get of 4 KiB", "put of 4 KiB", "get of 16 x 1 MiB", "put of 16 x 1 MiB")


def on_over_off(
    clients: dict[bool, OurClient], what: str, rounds: int, calls: int, progress: Callable[[str], None]
) -> list[Row]:
    """Rows for each kind of call, with `what` on over off; the pools have turns within each round."""
    found: dict[str, dict[bool, list[float]]] = {kind: {False: [], True: []} for kind in _KINDS}
    for number in range(rounds):
        progress(f"on and off, round {number + 1} of {rounds}")
        for on in (bool(number % 2), not number % 2):
            for kind, calls_per_s in _round(clients[on], calls).items():
                found[kind][on].append(calls_per_s)
    rows: list[Row] = []
    for kind, rates in found.items():
        off = median(rates[False])
        rows.append(Row(f"{kind}, {what} off", off, "1/s"))
        rows.append(
            bar_row(
                f"{kind}, {what} on",
                median(rates[True]),
                "1/s",
                against=f"{what} off",
                reference=off,
                at_least=_OVER_OFF,
            )
        )
    return rows


def _round(client: OurClient, calls: int) -> dict[str, float]:
    """Calls a second of each kind, one after the other, on blocks that are gone afterwards."""
    small = [os.urandom(32) for _ in range(calls)]
    large = [os.urandom(32) for _ in range(_BATCH)]
    body = memoryview(bytearray(os.urandom(_LARGE)))
    bodies = [body] * _BATCH
    target = memoryview(bytearray(_SMALL))
    targets = [memoryview(bytearray(_LARGE)) for _ in large]
    large_calls = max(2, calls // 50)
    put_s = sum(client.put_s(key, body[:_SMALL]) for key in small)
    get_s = sum(client.get_s(key, target) for key in small)
    client.remove(small)
    large_put_s, large_get_s = 0.0, 0.0
    for _ in range(large_calls):
        large_put_s += client.put_batch_s(large, bodies)
        large_get_s += client.get_batch_s(large, targets)
        client.remove(large)
    rates = (calls / get_s, calls / put_s, large_calls / large_get_s, large_calls / large_put_s)
    return dict(zip(_KINDS, rates, strict=True))
