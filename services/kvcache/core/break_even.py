"""Load or compute: which of the two is faster for the blocks that the pool has, by what this engine measured itself.

Idea: the engine says how long its steps took that computed prompts, and how long its loads took. Of the first a low
quantile counts, because a step that also did other work says nothing about prompts; the second is a line, seconds per
load and per byte, in which old loads fade. As long as one of them is not known, everything is loaded.

- A load that would take longer than computing does not begin. Now and then a small part is loaded all the same, or a
  path that was slow once would never be tried again.
- A load that has begun must keep pace with computing (`Pace`): blocks that come later than they could have been
  computed, with some grace, are not waited for.

Invariant: all blocks are loaded, or none, or for a trial the leading ones; an estimate is never negative.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

STEP_TOKENS_MIN = 64  # a step with fewer prompt tokens measures its fixed cost
STEPS_MIN, STEPS_KEPT = 4, 64
STEP_QUANTILE = 0.25
LOADS_MIN = 3
LOAD_FADE = 0.8  # what a load's measurement weighs after the next one
# Variance of sizes over their squared mean from which two coefficients can be distinguished.
SPREAD_MIN = 0.05
REACH = 4.0  # a load so much larger than those measured is not judged
TAKEN_SHARE_MIN = 0.25  # a load that was cut counts as at most four times the time it had
MARGIN_S = 0.002
BACK_SHARE = 0.8  # of the time of computing; what was judged too slow has to be so much faster
TRIAL_EVERY_S = 5.0
TRIAL_SHARE = 0.05
SURPRISE_SHARE = 0.5  # a load so much faster than expected: the path has changed
GRACE_SHARE, GRACE_MIN_S, GRACE_UNKNOWN_S = 0.05, 0.005, 0.05
GRACE_LOADS = 3.0
FIRST_BATCH_BYTES = 8 << 20
"""A load that must keep pace begins with so much, so that a stalled path is noticed with something gained."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a load has to be: `grace_s` at once, and the time of computing each block that has come."""

    grace_s: float
    block_s: float

    def due_s(self, blocks: int) -> float:
        """Seconds after its start until which a load that has brought so many blocks may bring the next ones."""
        return self.grace_s + blocks * self.block_s


class ComputeSpeed:
    """Seconds per prompt token of steps that computed prompts."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=STEPS_KEPT)  # seconds per token, tokens
        self._token_s: float | None = None

    def observe(self, tokens: int, seconds: float) -> None:
        """A step computed so many prompt tokens."""
        if tokens >= STEP_TOKENS_MIN and seconds > 0:
            self._steps.append((seconds / tokens, tokens))
            self._token_s = None

    @property
    def token_s(self) -> float | None:
        """The low quantile over computed tokens, so that large steps count more; None while it is not known."""
        if len(self._steps) < STEPS_MIN:
            return None
        if self._token_s is None:
            left = STEP_QUANTILE * sum(tokens for _, tokens in self._steps)
            for each_s, tokens in sorted(self._steps):
                self._token_s = each_s
                left -= tokens
                if left <= 0:
                    break
        return self._token_s


class LoadSpeed:
    """Seconds of a load by its bytes: a line through the loads measured, in which old ones fade."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._count = 0

    def observe(self, size_bytes: int, seconds: float) -> None:
        """A load of so many bytes took so long."""
        expected_s = self.seconds(size_bytes)
        if expected_s is not None and seconds < SURPRISE_SHARE * expected_s:
            self._weight = self._x = self._y = self._xx = self._xy = 0.0
        x, y, fade = float(size_bytes), seconds, LOAD_FADE
        self._weight = self._weight * fade + 1
        self._x = self._x * fade + x
        self._y = self._y * fade + y
        self._xx = self._xx * fade + x * x
        self._xy = self._xy * fade + x * y
        self._count += 1

    def seconds(self, size_bytes: int) -> float | None:
        """How long a load would take; None when nothing is known of loads of that size."""
        if self._count < LOADS_MIN:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        if size_bytes > REACH * mean_x:
            return None
        variance = self._xx / self._weight - mean_x * mean_x
        if variance > SPREAD_MIN * mean_x * mean_x:
            byte_s = (self._xy / self._weight - mean_x * mean_y) / variance
            fixed_s = mean_y - byte_s * mean_x
            if byte_s >= 0 and fixed_s >= 0:
                return fixed_s + byte_s * size_bytes
        return mean_y / mean_x * size_bytes


class BreakEven:
    """What this engine knows of loading and computing, and what follows for a load.

    Args:
        block_tokens: tokens of a block.
        block_bytes: bytes of a block, of all shards together.
    """

    def __init__(self, *, block_tokens: int, block_bytes: int) -> None:
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._compute = ComputeSpeed()
        self._load = LoadSpeed()
        self._computing = False
        self._trial_at_s = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed so many prompt tokens."""
        self._compute.observe(tokens, seconds)

    def loaded(self, asked: int, came: int, seconds: float) -> None:
        """A load of `asked` blocks ended; with fewer that `came` it was cut."""
        if asked <= 0 or seconds <= 0:
            return
        share = max(TAKEN_SHARE_MIN, came / asked)
        self._load.observe(asked * self._block_bytes, seconds / share)

    def compute_s(self, blocks: int) -> float | None:
        """Seconds that these blocks take to compute; None while that is not known."""
        token_s = self._compute.token_s
        return None if token_s is None else token_s * blocks * self._block_tokens

    def load_s(self, blocks: int) -> float | None:
        """Seconds that these blocks take to load; None while that is not known."""
        return self._load.seconds(blocks * self._block_bytes)

    def pays(self, blocks: int) -> bool:
        """Whether to load these blocks. What was judged too slow has to become clearly faster."""
        compute_s, load_s = self.compute_s(blocks), self.load_s(blocks)
        if compute_s is None or load_s is None:
            return True
        limit_s = BACK_SHARE * compute_s if self._computing else compute_s + MARGIN_S
        self._computing = load_s > limit_s
        return not self._computing

    def blocks_to_load(self, blocks: int, now_s: float) -> int:
        """How many leading ones of the blocks that the pool has to load: all, none, or a few as a trial."""
        if blocks <= 0 or self.pays(blocks):
            return max(0, blocks)
        if now_s < self._trial_at_s:
            return 0
        self._trial_at_s = now_s + TRIAL_EVERY_S
        return max(1, int(blocks * TRIAL_SHARE))

    def pace(self, blocks: int) -> Pace | None:
        """The pace that a load of these blocks has to keep; None while the speed of computing is not known."""
        compute_s = self.compute_s(blocks)
        if compute_s is None:
            return None
        first_bytes = min(blocks * self._block_bytes, max(FIRST_BATCH_BYTES, self._block_bytes))
        first_s = self._load.seconds(first_bytes)
        if first_s is None:
            grace_s = max(compute_s, GRACE_UNKNOWN_S)
        else:
            enough_s = max(GRACE_SHARE * compute_s, GRACE_LOADS * first_s)
            grace_s = max(GRACE_MIN_S, min(enough_s, compute_s))
        return Pace(grace_s, compute_s / blocks if blocks else 0.0)
