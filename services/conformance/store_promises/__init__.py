"""Promises of stores, one family a file, in the order in which they are tried: what damages the store comes last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mooncache.conformance.core.verdicts import PromiseText
from mooncache.conformance.store_bench import StoreBench
from mooncache.conformance.store_promises import content, damage, failure, identity, lifetimes, load

StoreTry = Callable[[StoreBench], str]

STORE_PROMISES: Final[dict[PromiseText, StoreTry]] = {
    **identity.PROMISES,
    **content.PROMISES,
    **lifetimes.PROMISES,
    **load.PROMISES,
    **failure.PROMISES,
    **damage.PROMISES,
}
