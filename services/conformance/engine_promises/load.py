"""Many requests at a time."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import Final

from mooncache.conformance.core.verdicts import PromiseBrokenError, PromiseFamily, PromiseText
from mooncache.conformance.engine_bench import EngineBench
from mooncache.conformance.limits import together

_THREADS: Final = 6
_QUESTIONS: Final = 8
_PROMPTS: Final = 8
_COMMON_WORDS: Final = 90
_OWN_WORDS: Final = 30
_CUT_OF: Final = 5  # one of so many requests is cut off


def _mixed_load(bench: EngineBench) -> str:
    common = bench.words("common", _COMMON_WORDS)
    prompts = [" ".join([*common, *bench.words("own", _OWN_WORDS)]) for _ in range(_PROMPTS)]
    bench.truths(prompts)
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def work(number: int) -> None:
        rng = bench.rng(f"load {number}")
        for _ in range(_QUESTIONS * bench.rounds):
            prompt = rng.choice(prompts)
            if rng.randrange(_CUT_OF) == 0:
                bench.engine.stream(prompt, cut_after=rng.randrange(3))
                loaded, ended = 0, "cut off"
            else:
                answer = bench.engine.stream(prompt) if rng.random() < 0.5 else bench.engine.ask(prompt)
                if answer is None:
                    raise PromiseBrokenError("a stream that was not cut off has no answer")
                bench.must_be_right(prompt, answer, f"beside {_THREADS - 1} others")
                loaded, ended = answer.cached_tokens or 0, "right"
            with lock:
                counts[ended] += 1
                counts["loaded"] += loaded

    works = [partial(work, number) for number in range(_THREADS)]
    limit_s = bench.hang_s * _QUESTIONS * bench.rounds
    together(limit_s, "questions side by side", works)
    return (
        f"{_THREADS} at a time: {counts['right']} answers right, {counts['cut off']} cut off, "
        f"{counts['loaded']:,} tokens loaded"
    )


PROMISES: Final = {
    PromiseText(
        "mixed-load",
        PromiseFamily.LOAD,
        "Beside others with the same start, some of which are cut off, each answer is right.",
    ): _mixed_load,
}
