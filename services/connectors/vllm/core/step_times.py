"""How long the engine's steps take, as its scheduler sees them."""

from __future__ import annotations

_STEPS_OPEN_MAX = 16


class StepTimes:
    """How long steps take that compute prompts, from their schedule to their end. Steps may be scheduled ahead: then a
    step begins with the end of the one before."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, float]] = {}
        self._number = 0
        self._ended_s = 0.0

    def begin(self, prompt_tokens: int, now_s: float) -> int:
        """A step was scheduled. Returns its number, 0 when it is not measured."""
        if not prompt_tokens:
            return 0
        self._number += 1
        self._open[self._number] = (prompt_tokens, now_s)
        self._open.pop(self._number - _STEPS_OPEN_MAX, None)
        return self._number

    def end(self, number: int, now_s: float) -> tuple[int, float] | None:
        """A step ended: its prompt tokens and seconds, if it was measured."""
        tokens, begun_s = self._open.pop(number, (0, 0.0))
        before_s, self._ended_s = self._ended_s, now_s
        return (tokens, now_s - max(begun_s, before_s)) if tokens else None
