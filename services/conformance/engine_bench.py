"""An engine on the bench: prompts that were never asked, the right answer of each, and answers that are compared."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from mooncache.conformance.core.verdicts import NotOfferedError, PromiseBrokenError
from mooncache.conformance.engine_target import CompletionAnswer, EngineTarget, key_of
from mooncache.conformance.limits import attempt, within
from mooncache.conformance.runner import TryProgress

HANG_FACTOR: Final = 2
"""A question that takes so many times its limit hangs."""
_WORDS: Final = (
    "amber",
    "barley",
    "copper",
    "daisy",
    "ember",
    "forest",
    "garnet",
    "harbor",
    "island",
    "juniper",
)
_REPEATED: Final = 3
_REPEATED_WORDS: Final = 40
T = TypeVar("T")


@dataclass
class EngineBench:
    """What each try of a promise gets. `run` keeps its prompts apart from those of other runs."""

    engine: EngineTarget
    run: str
    seed: int
    rounds: int = 1
    progress: TryProgress = field(default_factory=TryProgress)
    reference: EngineTarget | None = None
    _truths: dict[str, CompletionAnswer] = field(default_factory=dict)
    _number: int = 0
    _repeats: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def rng(self, what: str) -> random.Random:
        """Randomness for one purpose, the same for each run with this seed."""
        return random.Random(f"{self.seed} {what}")

    def words(self, what: str, count: int) -> list[str]:
        """Words of a prompt that was never asked; the first one says so to every cache."""
        with self._lock:
            self._number += 1
            number = self._number
        return [f"{self.run}-{number}", *self.rng(f"{what} {number}").choices(_WORDS, k=count)]

    def fresh(self) -> str:
        """A salt that was never used."""
        with self._lock:
            self._number += 1
            return f"conformance {self.run} {self._number}"

    @property
    def hang_s(self) -> float:
        """A question that takes longer hangs."""
        return HANG_FACTOR * self.engine.settings.call_limit_s

    def within(self, what: str, call: Callable[[], T]) -> T:
        """What a call answers or raises. Raises PromiseBrokenError: it hangs."""
        return within(self.hang_s, what, call)

    def ask(self, prompt: str, **changes: Any) -> CompletionAnswer:
        """The engine's answer."""
        return self.within("a question", lambda: self.engine.ask(prompt, **changes))

    def other_tenant(self) -> EngineTarget:
        """The engine as another tenant asks it. Raises NotOfferedError."""
        settings = self.engine.settings
        if not settings.other_key_file:
            raise NotOfferedError("no other tenant's key: --set other_key_file=FILE")
        own = replace(settings, model=self.engine.model)
        return EngineTarget(self.engine.url, own, key_of(settings.other_key_file))

    # --- the right answers --------------------------------------------------------------------------------------

    def truth(self, prompt: str) -> CompletionAnswer:
        """The right answer of a prompt, computed as if nothing were cached.

        Raises:
            NotOfferedError: this engine cannot be asked for it.
        """
        if self._repeats is None:
            self._repeats = self._why_not_repeatable()
        if self._repeats:
            raise NotOfferedError(self._repeats)
        return self._known(prompt)

    def truths(self, prompts: Iterable[str]) -> list[CompletionAnswer]:
        """Right answers of several prompts. Raises NotOfferedError: they are alike, so that they show nothing."""
        found = [self.truth(prompt) for prompt in prompts]
        if len({answer.text for answer in found}) < 2:
            raise NotOfferedError("all right answers are alike, so that they show nothing: raise max_tokens")
        return found

    def _known(self, prompt: str) -> CompletionAnswer:
        if prompt not in self._truths:
            self._truths[prompt] = self._computed(prompt)
        return self._truths[prompt]

    def _computed(self, prompt: str) -> CompletionAnswer:
        if self.reference is not None:
            reference = self.reference
            return self.within("a question to the reference", lambda: reference.ask(prompt))
        found = self.ask(prompt, cache_salt=self.fresh())
        if found.cached_tokens:
            raise NotOfferedError(
                "the engine loads what another cache_salt computed, so it cannot be asked for an answer without its "
                "cache: --set reference=URL of an engine without one"
            )
        return found

    def _why_not_repeatable(self) -> str:
        for _ in range(_REPEATED):
            prompt = " ".join(self.words("repeated", _REPEATED_WORDS))
            one, other = self._computed(prompt), self._computed(prompt)
            if differs(one, other):
                return (
                    "the same prompt, computed anew, has another answer each time, so that answers cannot be "
                    f"compared ({differs(one, other)}); float32 and one processor repeat"
                )
        return ""

    # --- checked answers ----------------------------------------------------------------------------------------

    def must_be_right(self, prompt: str, found: CompletionAnswer, when: str) -> None:
        """Raises PromiseBrokenError: the answer differs from the right one."""
        if wrong := differs(found, self.truth(prompt)):
            raise PromiseBrokenError(f"{when}: {wrong}; {loaded_text(found)}; prompt {shown(prompt)}")

    def may_answer(self, prompt: str, when: str) -> str:
        """A question while something is broken: "right", or the name of what it raised.

        Raises:
            PromiseBrokenError: it hangs, or the answer is wrong.
        """
        got = attempt(lambda: self.ask(prompt))
        if got.answer is None:
            return got.ended
        self.must_be_right(prompt, got.answer, when)
        return "right"


def differs(found: CompletionAnswer, right: CompletionAnswer) -> str:
    """How an answer differs from the right one, for people; "" when it does not."""
    if found.text != right.text:
        return f"the answer is {shown(found.text)} where {shown(right.text)} is right"
    if found.finish != right.finish:
        return f"the answer ends for {found.finish!r} where {right.finish!r} is right"
    if found.completion_tokens != right.completion_tokens:
        return f"the answer has {found.completion_tokens} tokens where {right.completion_tokens} are right"
    return ""


def loaded_text(answer: CompletionAnswer) -> str:
    """How much of a prompt was loaded, for people."""
    if answer.cached_tokens is None:
        return "it does not say what it loaded"
    return f"{answer.cached_tokens} of {answer.prompt_tokens} tokens were loaded"


def shown(text: str) -> str:
    """A text for people."""
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}..."
