"""A whole run on a store."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from mooncache.conformance.core.verdicts import ConformanceReport
from mooncache.conformance.runner import TryProgress, try_all
from mooncache.conformance.store_bench import StoreBench
from mooncache.conformance.store_contract import StoreUnderTest
from mooncache.conformance.store_promises import STORE_PROMISES


def try_store(
    store: StoreUnderTest,
    subject: str,
    seed: int,
    rounds: int = 1,
    only: Sequence[str] = (),
    progress: TryProgress | None = None,
) -> ConformanceReport:
    """Try the promises with these names, or all; the store stays open, and belongs to the caller.

    Raises:
        InvalidArgument: a name that no promise has.
    """
    shown_to = progress or TryProgress()
    bench = StoreBench(store, secrets.token_hex(4), seed, rounds, shown_to)
    try:
        return try_all(subject, seed, bench, STORE_PROMISES, only, shown_to)
    finally:
        bench.close()
