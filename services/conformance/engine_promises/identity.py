"""Prompts, salts and tenants that must not share what was computed."""

from __future__ import annotations

from typing import Final

from mooncache.conformance.core.verdicts import (
    NotOfferedError,
    PromiseBrokenError,
    PromiseFamily,
    PromiseText,
)
from mooncache.conformance.engine_bench import EngineBench, loaded_text
from mooncache.conformance.engine_target import CompletionAnswer

_WORDS: Final = 150
_SALTED_WORDS: Final = 120


def _near_prompts(bench: EngineBench) -> str:
    words = bench.words("near", _WORDS)
    places = sorted({1, 2, len(words) // 4, len(words) // 2, len(words) - 2, len(words) - 1})
    prompts = [" ".join(words)]
    prompts += [" ".join([*words[:place], "otherwise", *words[place + 1 :]]) for place in places]
    prompts += [" ".join(words[:-1]), " ".join([*words, "otherwise"]), " ".join(words[:1] + words[2:])]
    bench.truths(prompts)
    loaded = 0
    for _ in range(bench.rounds + 1):
        for prompt in bench.rng("near order").sample(prompts, len(prompts)):
            answer = bench.ask(prompt)
            bench.must_be_right(prompt, answer, "after its neighbours")
            loaded += answer.cached_tokens or 0
    return (
        f"{len(prompts)} prompts that differ in one word; {loaded:,} tokens of their common parts were loaded"
    )


def _salts(bench: EngineBench) -> str:
    prompt = " ".join(bench.words("salts", _SALTED_WORDS))
    salt, other = bench.fresh(), bench.fresh()
    bench.ask(prompt, cache_salt=salt)
    again = bench.ask(prompt, cache_salt=salt)
    if not again.cached_tokens:
        raise NotOfferedError(
            f"asked twice under one cache_salt: {loaded_text(again)}, so separation shows nothing"
        )
    for name, answer in (
        ("another salt", bench.ask(prompt, cache_salt=other)),
        ("no salt", bench.ask(prompt)),
    ):
        _must_share_nothing(name, answer)
        bench.must_be_right(prompt, answer, name)
    return f"one salt: {loaded_text(again)}; another one, and none: 0"


def _tenants(bench: EngineBench) -> str:
    other = bench.other_tenant()
    prompt = " ".join(bench.words("tenants", _SALTED_WORDS))
    bench.ask(prompt)
    again = bench.ask(prompt)
    if not again.cached_tokens:
        raise NotOfferedError(f"asked twice by one tenant: {loaded_text(again)}, so separation shows nothing")
    for salted in ({}, {"cache_salt": bench.fresh()}):
        answer = bench.within("a question", lambda s=salted: other.ask(prompt, **s))  # type: ignore[misc]
        _must_share_nothing("another tenant", answer)
        bench.must_be_right(prompt, answer, "another tenant")
    return f"one tenant: {loaded_text(again)}; another tenant: 0"


def _must_share_nothing(name: str, answer: CompletionAnswer) -> None:
    if answer.cached_tokens:
        raise PromiseBrokenError(f"{name}: {loaded_text(answer)}, which was computed for others")


PROMISES: Final = {
    PromiseText(
        "near-prompts",
        PromiseFamily.IDENTITY,
        "Prompts that differ in one word, or by one, each have their own answer, after the others were cached.",
    ): _near_prompts,
    PromiseText(
        "salts",
        PromiseFamily.IDENTITY,
        "Nothing that was computed under a cache_salt is loaded under another one.",
    ): _salts,
    PromiseText(
        "tenants", PromiseFamily.IDENTITY, "Nothing that was computed for a tenant is loaded for another one."
    ): _tenants,
}
