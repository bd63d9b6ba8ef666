"""Engines whose blocks mean something else, though their prompts and shapes are the same."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final

from mooncache.conformance.connector_bench import ConnectorBench, ConnectorTarget
from mooncache.conformance.core.verdicts import (
    NotOfferedError,
    PromiseBrokenError,
    PromiseFamily,
    PromiseText,
)
from mooncache.conformance.engine_bench import loaded_text

_PROMPTS: Final = 4
_WORDS: Final = 120


def _other_weights(bench: ConnectorBench) -> str:
    return _must_not_share(bench, bench.engines.other_weights(), "an engine with other weights")


def _other_type(bench: ConnectorBench) -> str:
    return _must_not_share(bench, bench.engines.other_type(), "an engine with another type of numbers")


def _must_not_share(
    bench: ConnectorBench, beside: AbstractContextManager[ConnectorTarget], whose: str
) -> str:
    prompts = [" ".join(bench.words("foreign", _WORDS)) for _ in range(_PROMPTS * bench.rounds)]
    bench.truths(prompts)
    bench.progress.work(f"starting {whose}")
    with beside as other:
        for prompt in prompts:
            again = bench.until_saved(other, prompt)
        if not again.cached_tokens:
            raise NotOfferedError(f"{whose}, asked twice: {loaded_text(again)}, so separation shows nothing")
        for prompt in prompts:
            found = bench.ask(prompt)
            bench.must_be_right(prompt, found, f"after {whose} had saved the same prompt")
            if found.cached_tokens:
                raise PromiseBrokenError(f"{loaded_text(found)}, which {whose} had computed")
    return f"{len(prompts)} prompts saved by {whose} ({loaded_text(again)} there); here 0"


PROMISES: Final = {
    PromiseText(
        "other-weights",
        PromiseFamily.IDENTITY,
        "Nothing that was computed with other weights of the same shapes is loaded.",
    ): _other_weights,
    PromiseText(
        "other-type",
        PromiseFamily.IDENTITY,
        "Nothing that was computed in another type of numbers is loaded.",
    ): _other_type,
}
