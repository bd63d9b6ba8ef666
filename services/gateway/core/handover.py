"""What a decode leg waits for of its prefill leg, and for how long once that one has ended well.

Blocks that the prefill leg did not store never arrive; those that it stored arrive soon. A decode leg without an answer
after that time may be busy, or may wait for blocks that were lost: only the pool knows which.
"""

from __future__ import annotations

from dataclasses import replace

from mooncache.gateway.core.plan import LegPlan


class Handover:
    """The blocks that one request's decode leg still waits for. Times are seconds of one monotonic clock.

    awaited_tokens: leading prompt tokens for which the present decode leg waits.
    """

    def __init__(self) -> None:
        self.awaited_tokens = 0
        self._by_s: float | None = None

    def sent(self, awaited_tokens: int) -> None:
        """A decode leg was sent."""
        self.awaited_tokens, self._by_s = awaited_tokens, None

    def prefilled(self, leg: LegPlan, held_tokens: int, now_s: float) -> LegPlan | None:
        """The prefill leg has ended well: the decode leg with less to wait for, None when it may go on waiting.

        Args:
            leg: the decode leg as planned.
            held_tokens: leading prompt tokens that the pool has or is being given; below 0: not said.
        """
        if 0 <= held_tokens < self.awaited_tokens:
            wait_ms = (leg.handover_ms or leg.wait_ms) if held_tokens else 0
            return replace(leg, wait_tokens=held_tokens, wait_ms=wait_ms)
        if self.awaited_tokens and leg.handover_ms:
            self._by_s = now_s + leg.handover_ms / 1e3
        return None

    def left_s(self, now_s: float) -> float | None:
        """Time until the pool should be asked; None: never."""
        return max(0.0, self._by_s - now_s) if self._by_s is not None else None

    def is_due(self, now_s: float) -> bool:
        """Whether to ask the pool now; True once."""
        if self._by_s is None or now_s < self._by_s:
            return False
        self._by_s = None
        return True
