"""Stored KV that changes behind the connector's back."""

from __future__ import annotations

from collections import Counter
from typing import Final

from mooncache.conformance.connector_bench import ConnectorBench
from mooncache.conformance.core.verdicts import (
    NotOfferedError,
    PromiseBrokenError,
    PromiseFamily,
    PromiseText,
)
from mooncache.conformance.engine_bench import loaded_text

_PROMPTS: Final = 24
_WORDS: Final = 120


def _flipped(bench: ConnectorBench) -> str:
    if bench.damage is None:
        raise NotOfferedError("nothing says how to damage what is stored: --set damage_command=...")
    prompts = [" ".join(bench.words("flipped", _WORDS)) for _ in range(_PROMPTS * bench.rounds)]
    bench.truths(prompts)
    before = after = 0
    for prompt in prompts:
        bench.ask(prompt)
    for prompt in prompts:
        saved = bench.until_saved(bench.target, prompt)
        before += saved.cached_tokens or 0
    if not before:
        raise NotOfferedError(f"asked twice: {loaded_text(saved)}, so damage shows nothing")
    harmed = bench.damage(bench.rng("flipped"))
    ends: Counter[str] = Counter()
    for prompt in prompts:
        found = bench.ask(prompt)
        bench.must_be_right(prompt, found, "after stored bits had changed")
        after += found.cached_tokens or 0
        ends["whole" if found.cached_tokens else "computed anew"] += 1
    if after >= before:
        raise PromiseBrokenError(f"{harmed} bits changed, and as much is loaded as before: nothing is shown")
    seen = ", ".join(f"{count} {name}" for name, count in sorted(ends.items()))
    return f"{harmed} bits changed: {before:,} tokens loaded before, {after:,} after it; prompts: {seen}"


PROMISES: Final = {
    PromiseText(
        "flipped-kv",
        PromiseFamily.BYTES,
        "KV of which a stored bit changed is computed anew, and never used.",
    ): _flipped,
}
