"""How much later than predicted first tokens come that had to wait, learnt from those whose waiting mattered.

A request is taken when its promise will be kept, so an error of the prediction is a broken promise. How late first
tokens come, as a share of what was predicted, is followed at its 95th percentile: up by a step times .95 when one was
later than that, down by a step times .05 when not, which stands still where one in twenty is later. Requests that
hardly waited say nothing: what they take is computing, which has a model of its own.
"""

from __future__ import annotations

import math

SHARE = 0.95
STEP = 0.02
FIRST = 0.5  # believed before anything was seen
MOST = 1.0
MATTERS = 0.1  # waiting of this share of the promise says something


class Lateness:
    """The margin of the predicted TTFT. `value`: the share by which waiting requests may be later than predicted."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = FIRST

    def observe(self, predicted_s: float, waiting_s: float, late_s: float, promised_s: float) -> None:
        """Take in a first token that was predicted after `predicted_s`, `waiting_s` of it waiting, and came `late_s`
        after that."""
        if not (predicted_s >= waiting_s >= MATTERS * promised_s > 0 and math.isfinite(late_s)):
            return
        step = STEP * SHARE if late_s > self.value * predicted_s else -STEP * (1.0 - SHARE)
        self.value = min(MOST, max(0.0, self.value + step))
