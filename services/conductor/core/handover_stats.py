"""Whether what one instance prefills reaches the instance that decodes, pair by pair, and how long that takes.

The decode leg waits for blocks that the prefill leg saves. They may never come: the pool is full, the node on that host
is drained, the queue of saves overflowed. Then each request would wait until its limit and compute its prompt twice.
A pair where blocks did not come is left alone for a while, twice as long each time; what the decode instance computes
itself needs no hand-over.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncache.conductor.core.learning import Follower
from mooncache.conductor.core.policy.types import Choice
from mooncache.kvcache.leg_hint import CacheOutcome
from mooncache.runtime.backoff import step_s

AWAY_FIRST_S, AWAY_MAX_S = 30.0, 600.0
BESIDE_PRIOR_S = 0.01  # what passes of that beside the hand-over's price
_BESIDE_LEAST_S = 1e-3
LAG_PRIOR_S = 0.5  # from the end of the prefill to the first token
MARGIN_MAX_S = 2.0
UNPROVEN_MARGIN_S = 30.0
PROVEN_AFTER = 3  # prefills
WAIT_FACTOR = 3.0
WAIT_MAX_S = 600.0
_LAG_FACTOR = 4.0
_ENOUGH = 0.5  # of the awaited tokens: the last blocks of a prompt may be saved late


@dataclass(slots=True)
class _SkippedPair:
    missed: int = 0
    until_s: float = 0.0


class HandoverStats:
    """Success and time of the hand-over between pairs of one model's instances.

    margin_min_s: least time that blocks get to come after the expected end of their prefill.
    """

    def __init__(self, margin_min_s: float) -> None:
        self._margin_min_s = margin_min_s
        self._pairs: dict[tuple[str, str], _SkippedPair] = {}  # those where blocks did not come the last time
        self._lag = Follower(LAG_PRIOR_S)
        self._beside = Follower(BESIDE_PRIOR_S)

    def avoids(self, prefiller: str, decoder: str, now_s: float) -> bool:
        """Whether requests should not be sent to this pair now."""
        pair = self._pairs.get((prefiller, decoder))
        return pair is not None and now_s < pair.until_s

    def succeeded(self, prefiller: str, decoder: str) -> None:
        """The blocks came."""
        self._pairs.pop((prefiller, decoder), None)

    def failed(self, prefiller: str, decoder: str, now_s: float) -> float:
        """The blocks did not come; return for how long the pair is left alone."""
        pair = self._pairs.setdefault((prefiller, decoder), _SkippedPair())
        if now_s >= pair.until_s:  # of requests that were sent together one counts
            pair.until_s = now_s + step_s(pair.missed, AWAY_FIRST_S, AWAY_MAX_S)
            pair.missed += 1
        return pair.until_s - now_s

    def observe(self, lag_s: float) -> None:
        """A first token came so long after the end of the prefill."""
        self._lag.observe(max(1e-3, lag_s))

    def observe_beside(self, seconds: float) -> bool:
        """So much passed between the end of a prefill and the first token beside what a hand-over was taken to need."""
        return self._beside.observe(max(_BESIDE_LEAST_S, seconds))

    @property
    def beside_s(self) -> float:
        """What a hand-over takes beside loading and the tail: saving the last blocks, hearing of it, a place in a step.

        0 before it was seen.
        """
        return self._beside.value if self._beside.count else 0.0

    def without_beside_s(self, choice: Choice) -> float:
        """What a choice expects from the end of the prefill to the first token, without what is learnt of it here."""
        return choice.handover_s - self.beside_s + choice.wait_s if choice.handover_s > self.beside_s else 0.0

    def forget(self, name: str) -> None:
        """The instance is gone, or its engine was started again."""
        self._pairs = {pair: kept for pair, kept in self._pairs.items() if name not in pair}

    @property
    def margin_s(self) -> float:
        """How long after the expected end of a prefill its blocks may come."""
        learnt_s = min(MARGIN_MAX_S, _LAG_FACTOR * self._lag.value)
        return max(self._margin_min_s, learnt_s)

    def wait_s(self, expected_s: float, prefills: int) -> float:
        """The time limit of a leg that waits for blocks expected after `expected_s`.

        prefills: how many prefills have been reported as ended. Before the first reports the engine's speed is only a
        prior, and a slow machine may take a hundred times as long. Giving up early would make both engines compute the
        prompt, and each would slow the other down. A failed prefill ends the wait in any case.
        """
        margin_s = self.margin_s if prefills >= PROVEN_AFTER else UNPROVEN_MARGIN_S
        return min(WAIT_MAX_S, expected_s * WAIT_FACTOR + margin_s)


def did_arrive(hit_tokens: float, awaited_tokens: int, outcome: CacheOutcome) -> bool:
    """True when the decode leg's cache report means that the awaited blocks arrived."""
    return (
        outcome not in {CacheOutcome.TIMEOUT, CacheOutcome.FAILED} and hit_tokens >= _ENOUGH * awaited_tokens
    )
