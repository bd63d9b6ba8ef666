"""Requests that end early, and caches that are full."""

from __future__ import annotations

from functools import partial
from typing import Final

from mooncache.conformance.core.verdicts import PromiseFamily, PromiseText
from mooncache.conformance.engine_bench import EngineBench
from mooncache.conformance.limits import together

_CUTS: Final = (0, 1, 2, 0)
_CUT_WORDS: Final = 160
_MANY_WORDS: Final = 180


def _aborted(bench: EngineBench) -> str:
    prompts = [" ".join(bench.words("aborted", _CUT_WORDS)) for _ in range(len(_CUTS) * bench.rounds)]
    bench.truths(prompts)
    for number, prompt in enumerate(prompts):
        cut = _CUTS[number % len(_CUTS)]
        bench.within("a stream that is cut off", lambda p=prompt, c=cut: bench.engine.stream(p, c))  # type: ignore[misc]
        bench.must_be_right(prompt, bench.ask(prompt), f"after a stream that was cut off at its event {cut}")
    works = [
        partial(bench.engine.stream, prompt, _CUTS[number % len(_CUTS)])
        for number, prompt in enumerate(prompts)
    ]
    together(bench.hang_s, "streams that are cut off", works)
    for prompt in prompts:
        bench.must_be_right(prompt, bench.ask(prompt), "after streams that were cut off side by side")
    return f"{2 * len(prompts)} streams cut off before, at and after their first event"


def _many_prompts(bench: EngineBench) -> str:
    count = bench.engine.settings.many * bench.rounds
    prompts = [" ".join(bench.words("many", _MANY_WORDS)) for _ in range(count)]
    bench.truths(prompts)
    loaded = whole = 0
    for lap in range(2):
        for number, prompt in enumerate(bench.rng("many order").sample(prompts, count)):
            bench.progress.work(f"{lap * count + number} of {2 * count} questions")
            answer = bench.ask(prompt)
            bench.must_be_right(prompt, answer, f"one of {count} prompts")
            if lap:
                loaded, whole = loaded + (answer.cached_tokens or 0), whole + answer.prompt_tokens
    return f"{count} prompts asked twice: {loaded:,} of {whole:,} tokens were still there the second time"


PROMISES: Final = {
    PromiseText(
        "aborted",
        PromiseFamily.LIFETIMES,
        "A request that its client cuts off, at any moment, changes no later answer.",
    ): _aborted,
    PromiseText(
        "many-prompts",
        PromiseFamily.LIFETIMES,
        "With more prompts than caches may hold, each answer is right.",
    ): _many_prompts,
}
