"""How fast a model answers, learned from requests that ended: what a request costs whose end was not seen.

A client that leaves gets no usage, and the engine's own count ends with it. Its tenant is charged what an answer of
that age had on average, so that leaving early does not get around a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MODEL_COUNT_MAX: Final = 10_000
_SHARE: Final = 0.05


@dataclass(slots=True)
class _Pace:
    s_per_token: float = 0.05
    tokens_per_event: float = 1.0


class Paces:
    """Moving averages by model."""

    def __init__(self) -> None:
        self._models: dict[str, _Pace] = {}

    def learn(self, model: str, tokens: int, elapsed_s: float, events: int) -> None:
        """A request of one sequence ended well. events: of its stream, 0 when it was not streamed."""
        if tokens < 1:
            return
        if model not in self._models and len(self._models) >= MODEL_COUNT_MAX:
            return
        pace = self._models.setdefault(model, _Pace())
        pace.s_per_token += _SHARE * (elapsed_s / tokens - pace.s_per_token)
        if events:
            pace.tokens_per_event += _SHARE * (tokens / events - pace.tokens_per_event)

    def of_time(self, model: str, elapsed_s: float) -> int:
        """Tokens of one sequence after so long."""
        return round(elapsed_s / max(1e-6, self._models.get(model, _Pace()).s_per_token))

    def of_events(self, model: str, events: int) -> int:
        """Tokens of a stream of so many events."""
        return round(events * max(1.0, self._models.get(model, _Pace()).tokens_per_event))
