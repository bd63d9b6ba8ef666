"""Questions that are none, and a cache below the engine that is broken."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections import Counter
from typing import Any, Final

from mooncache.conformance.core.verdicts import (
    NotOfferedError,
    PromiseBrokenError,
    PromiseFamily,
    PromiseText,
)
from mooncache.conformance.engine_bench import EngineBench
from mooncache.conformance.limits import attempt

RECOVERY_S: Final = 120.0
_COMMAND_S: Final = 60.0
_AGAIN_S: Final = 0.2
_WORDS: Final = 120
_PROMPTS: Final = 4
_LONG_WORDS: Final = 400_000


def _bad_requests(bench: EngineBench) -> str:
    known = " ".join(bench.words("bad requests", _WORDS))
    bench.ask(known)
    statuses: Counter[int] = Counter()
    for name, body in _bodies(bench, known).items():
        got = attempt(lambda b=body: bench.within(name, lambda: bench.engine.status_of(b)))  # type: ignore[misc]  # noqa: B023
        if got.answer is None:
            raise PromiseBrokenError(f"{name}: no status, {got.refusal!r}")
        if not 400 <= got.answer < 500:
            raise PromiseBrokenError(
                f"{name}: status {got.answer} where the question is to blame (400 to 499)"
            )
        statuses[got.answer] += 1
        bench.must_be_right(known, bench.ask(known), f"after {name}")
    return ", ".join(f"{count} of status {status}" for status, count in sorted(statuses.items()))


def _bodies(bench: EngineBench, known: str) -> dict[str, bytes]:
    changed: dict[str, dict[str, Any]] = {
        "an unknown model": {"model": "no-such-model"},
        "a negative number of tokens": {"max_tokens": -1},
        "a temperature that is a word": {"temperature": "warm"},
        "a prompt that is an object": {"prompt": {"text": known}},
        "a prompt that is far too long": {"prompt": "amber " * _LONG_WORDS},
    }
    found = {
        name: json.dumps(bench.engine.body(known, **fields)).encode() for name, fields in changed.items()
    }
    return {"a body that is cut off": json.dumps(bench.engine.body(known)).encode()[:-9], **found}


def _broken_cache(bench: EngineBench) -> str:
    settings = bench.engine.settings
    if not settings.break_command or not settings.mend_command:
        raise NotOfferedError(
            "nothing says how to break the cache: --set break_command=..., --set mend_command=..."
        )
    prompts = [" ".join(bench.words("broken", _WORDS)) for _ in range(2 * _PROMPTS)]
    bench.truths(prompts)
    cached, fresh = prompts[:_PROMPTS], prompts[_PROMPTS:]
    for prompt in cached:
        bench.ask(prompt)
    run_command(settings.break_command)
    counts: Counter[str] = Counter()
    try:
        for prompt in (*cached, *fresh):
            counts[bench.may_answer(prompt, "while the cache is broken")] += 1
    finally:
        run_command(settings.mend_command)
    for prompt in prompts:
        _answers_again(bench, prompt)
    ends = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return f"meanwhile {ends}; afterwards all {len(prompts)} right"


def _answers_again(bench: EngineBench, prompt: str) -> None:
    until_s = time.monotonic() + RECOVERY_S
    while (ended := bench.may_answer(prompt, "after the cache was mended")) != "right":
        if time.monotonic() > until_s:
            raise PromiseBrokenError(f"no answer within {RECOVERY_S:g} s after the cache was mended: {ended}")
        time.sleep(_AGAIN_S)


def run_command(text: str) -> None:
    """Run a command of the user's, without a shell. Raises NotOfferedError: it does not work."""
    try:
        done = subprocess.run(
            shlex.split(text), capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise NotOfferedError(f"{text}: {error}") from None
    if done.returncode:
        raise NotOfferedError(f"{text} ended with {done.returncode}: {done.stderr.strip()[-200:]}")


PROMISES: Final = {
    PromiseText(
        "bad-requests",
        PromiseFamily.FAILURE,
        "A question that is none is refused as such, in time, and changes no other answer.",
    ): _bad_requests,
    PromiseText(
        "broken-cache",
        PromiseFamily.FAILURE,
        "While the cache below is broken each answer is right, or an error in time; afterwards all work.",
    ): _broken_cache,
}
