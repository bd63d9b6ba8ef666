"""Engines that are killed, and requests that lose their memory while they are computed."""

from __future__ import annotations

from functools import partial
from typing import Final

from mooncache.conformance.connector_bench import ConnectorBench
from mooncache.conformance.core.verdicts import (
    NotOfferedError,
    PromiseBrokenError,
    PromiseFamily,
    PromiseText,
)
from mooncache.conformance.engine_bench import differs, loaded_text, shown
from mooncache.conformance.engine_target import CompletionAnswer
from mooncache.conformance.limits import together

_PROMPTS: Final = 4
_WORDS: Final = 120
_GROWING: Final = 8
_GROWING_WORDS: Final = 50
_GROWING_TOKENS: Final = 200
_PREEMPTIONS: Final = "vllm:num_preemptions_total"


def _fresh_engine(bench: ConnectorBench) -> str:
    prompts = [" ".join(bench.words("fresh", _WORDS)) for _ in range(_PROMPTS * bench.rounds)]
    bench.truths(prompts)
    for prompt in prompts:
        saved = bench.until_saved(bench.target, prompt)
    if not saved.cached_tokens:
        raise NotOfferedError(f"asked twice of one engine: {loaded_text(saved)}, so a restart shows nothing")
    bench.progress.work("killing the engine, and starting it anew")
    bench.restart()
    loaded = total = 0
    for prompt in prompts:
        found = bench.until_saved(bench.target, prompt) if prompt is prompts[0] else bench.ask(prompt)
        bench.must_be_right(prompt, found, "asked of an engine that was started anew")
        loaded, total = loaded + (found.cached_tokens or 0), total + found.prompt_tokens
    return f"{len(prompts)} prompts, engine killed and started anew: {loaded:,} of {total:,} tokens loaded"


def _preempted(bench: ConnectorBench) -> str:
    reference = bench.reference
    assert reference is not None, "a connector's bench has one"
    prompts = [" ".join(bench.words("growing", _GROWING_WORDS)) for _ in range(_GROWING * bench.rounds)]
    long = {"max_tokens": _GROWING_TOKENS, "ignore_eos": True}
    bench.progress.work("computing the right answers")
    right = {prompt: bench.within("a question", partial(reference.ask, prompt, **long)) for prompt in prompts}
    before = bench.engines.server.metric(_PREEMPTIONS)
    found: dict[str, CompletionAnswer] = {}

    def ask(prompt: str) -> None:
        found[prompt] = bench.target.ask(prompt, **long)

    for lap in range(2):
        bench.progress.work(f"lap {lap + 1} of 2, {len(prompts)} at a time")
        together(bench.hang_s * len(prompts), "long answers", [partial(ask, prompt) for prompt in prompts])
        for prompt in prompts:
            if wrong := differs(found[prompt], right[prompt]):
                raise PromiseBrokenError(
                    f"beside others that take its blocks, lap {lap + 1}: {wrong}; {loaded_text(found[prompt])}; "
                    f"prompt {shown(prompt)}"
                )
    count = bench.engines.server.metric(_PREEMPTIONS) - before
    if not count:
        raise NotOfferedError("all answers are right, but no request was preempted: --set blocks=fewer")
    return f"{2 * len(prompts)} answers of {_GROWING_TOKENS} tokens, {count:.0f} times preempted"


PROMISES: Final = {
    PromiseText(
        "fresh-engine",
        PromiseFamily.LIFETIMES,
        "What one engine has saved gives the right answers in another one, after the first was killed.",
    ): _fresh_engine,
    PromiseText(
        "preempted",
        PromiseFamily.LIFETIMES,
        "Requests that lose their blocks to others and are computed anew have the right answers.",
    ): _preempted,
}
