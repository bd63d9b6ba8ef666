"""Answers that are the same, whatever part of their prompt was loaded."""

from __future__ import annotations

from typing import Final

from mooncache.conformance.core.verdicts import (
    NotOfferedError,
    PromiseBrokenError,
    PromiseFamily,
    PromiseText,
)
from mooncache.conformance.engine_bench import EngineBench, differs, shown
from mooncache.conformance.engine_target import CompletionAnswer

_LENGTHS: Final = (1, 3, 7, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200, 256)
_TURNS: Final = 6
_TURN_WORDS: Final = 24
_FEW_WORDS: Final = 50


def _loaded(bench: EngineBench) -> str:
    prompts = [" ".join(bench.words("loaded", words)) for words in _LENGTHS for _ in range(bench.rounds)]
    bench.truths(prompts)
    loaded = total = 0
    for number, prompt in enumerate(prompts):
        bench.progress.work(f"{number} of {len(prompts)} prompts")
        bench.must_be_right(prompt, bench.ask(prompt), "asked for the first time")
        again = bench.ask(prompt)
        bench.must_be_right(prompt, again, "asked again")
        loaded, total = loaded + (again.cached_tokens or 0), total + again.prompt_tokens
    _must_have_loaded(loaded)
    return f"{len(prompts)} prompts asked twice: {loaded:,} of {total:,} tokens were loaded the second time"


def _turns(bench: EngineBench) -> str:
    loaded = total = 0
    for _ in range(2 * bench.rounds):
        prompt = " ".join(bench.words("turns", _FEW_WORDS))
        for number in range(_TURNS):
            answer = bench.ask(prompt)
            bench.must_be_right(prompt, answer, f"turn {number + 1}")
            loaded, total = loaded + (answer.cached_tokens or 0), total + answer.prompt_tokens
            prompt += answer.text + " " + " ".join(bench.words("turn", _TURN_WORDS))
    _must_have_loaded(loaded)
    return f"{2 * bench.rounds} conversations of {_TURNS} turns: {loaded:,} of {total:,} tokens were loaded"


def _must_have_loaded(tokens: int) -> None:
    if not tokens:
        raise NotOfferedError("all answers are right, but the engine names no token that it has loaded")


def _streamed(bench: EngineBench) -> str:
    prompts = [" ".join(bench.words("streamed", _FEW_WORDS)) for _ in range(4 * bench.rounds)]
    bench.truths(prompts)
    for prompt in prompts:
        for when in ("streamed", "streamed again"):
            found = bench.within("a stream", lambda p=prompt: bench.engine.stream(p))  # type: ignore[misc]
            assert found is not None, "nothing cut it off"
            bench.must_be_right(prompt, found, when)
    return f"{len(prompts)} prompts, streamed twice each"


def _counted(bench: EngineBench) -> str:
    prompt = " ".join(bench.words("counted", _FEW_WORDS))
    answers: dict[str, CompletionAnswer] = {"first": bench.ask(prompt), "again": bench.ask(prompt)}
    streamed = bench.within("a stream", lambda: bench.engine.stream(prompt))
    assert streamed is not None, "nothing cut it off"
    answers["streamed"] = streamed
    first = answers["first"]
    for name, answer in answers.items():
        if answer.prompt_tokens != first.prompt_tokens:
            raise PromiseBrokenError(
                f"{name}: {answer.prompt_tokens} prompt tokens, and {first.prompt_tokens} the first time"
            )
        if answer.cached_tokens is not None and not 0 <= answer.cached_tokens <= answer.prompt_tokens:
            raise PromiseBrokenError(
                f"{name}: {answer.cached_tokens} of {answer.prompt_tokens} tokens cached"
            )
        if not 0 < answer.completion_tokens <= bench.engine.settings.max_tokens:
            raise PromiseBrokenError(
                f"{name}: {answer.completion_tokens} tokens where {bench.engine.settings.max_tokens} were asked for"
            )
    if first.cached_tokens:
        raise PromiseBrokenError(
            f"{first.cached_tokens} tokens of a prompt that was never asked are said to be cached"
        )
    one = bench.ask(prompt, max_tokens=1)
    if one.completion_tokens != 1 or not first.text.startswith(one.text):
        raise PromiseBrokenError(f"one token was asked for: {one.completion_tokens}, {shown(one.text)}")
    return f"{first.prompt_tokens} prompt tokens each time; cached: {answers['again'].cached_tokens}"


def _repeatable(bench: EngineBench) -> str:
    prompt = " ".join(bench.words("repeatable", _FEW_WORDS))
    right = bench.truth(prompt)
    if wrong := differs(bench.ask(prompt), right):
        raise PromiseBrokenError(f"a prompt that was never asked: {wrong}")
    return f"{shown(right.text)} each time"


PROMISES: Final = {
    PromiseText(
        "repeatable",
        PromiseFamily.ANSWERS,
        "A prompt that is computed anew has the same greedy answer each time, with or without cache_salt.",
    ): _repeatable,
    PromiseText(
        "loaded",
        PromiseFamily.ANSWERS,
        "A prompt of any length whose start is loaded has the answer that it has when it is computed.",
    ): _loaded,
    PromiseText(
        "turns",
        PromiseFamily.ANSWERS,
        "Each turn of a conversation has the answer that its prompt has when it is computed as a whole.",
    ): _turns,
    PromiseText(
        "streamed", PromiseFamily.ANSWERS, "A streamed answer is the whole answer, with the same counts."
    ): _streamed,
    PromiseText(
        "counted",
        PromiseFamily.ANSWERS,
        "Tokens of prompt and answer are counted the same way each time, and never more are cached than there are.",
    ): _counted,
}
