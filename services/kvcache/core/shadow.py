"""Which hits are verified: a share of them, as far as the budget of tokens goes.

Idea: a verified hit is not loaded. The engine computes it as if the pool had nothing, and what it computed is compared
with what the pool has. That costs the engine what the hit would have spared it, so the budget is in tokens a second, in
a bucket that is full at the start. Time and the drawn number are arguments.
"""

from __future__ import annotations

from typing import Final, Self

from mooncache.config.serving import ConnectorSection

VERIFIED: Final = "computed to verify the pool's blocks"
"""Why a request was not served from the pool, as its cache report says it."""
BURST_S: Final = 10.0
"""The bucket holds the tokens of so many seconds; a longer hit is never verified."""


class ShadowSampler:
    """Decides for one engine.

    Args:
        share: of the hits that may be verified, 0 to 1.
        tokens_per_s: the budget.
    """

    def __init__(self, share: float, tokens_per_s: float) -> None:
        self._share = share
        self._rate = tokens_per_s
        self._left = tokens_per_s * BURST_S
        self._as_of_s: float | None = None

    @classmethod
    def of(cls, section: ConnectorSection) -> Self:
        """As it is configured."""
        return cls(section.shadow_share, section.shadow_tokens_per_s)

    def takes(self, tokens: int, now_s: float, draw: float) -> bool:
        """Whether a hit of so many tokens is verified; then they are paid for. `draw` is uniform from 0 to below 1."""
        elapsed_s = 0.0 if self._as_of_s is None else max(0.0, now_s - self._as_of_s)
        self._as_of_s = now_s
        self._left = min(self._rate * BURST_S, self._left + self._rate * elapsed_s)
        if tokens <= 0 or draw >= self._share or tokens > self._left:
            return False
        self._left -= tokens
        return True
