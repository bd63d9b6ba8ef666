"""Promises of engines, one family a file, in the order in which they are tried: what breaks something comes last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mooncache.conformance.core.verdicts import PromiseText
from mooncache.conformance.engine_bench import EngineBench
from mooncache.conformance.engine_promises import answers, failure, identity, lifetimes, load

EngineTry = Callable[[EngineBench], str]

ENGINE_PROMISES: Final[dict[PromiseText, EngineTry]] = {
    **answers.PROMISES,
    **identity.PROMISES,
    **lifetimes.PROMISES,
    **load.PROMISES,
    **failure.PROMISES,
}
