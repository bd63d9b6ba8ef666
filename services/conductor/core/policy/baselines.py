"""Simple baselines, kept for comparison: whom they give the prompt to does not follow from a price.

They use what the chosen instance holds itself and never fetch; the decode instance is the one with the least
predicted time between tokens, as in Algorithm 1, so that only the prefill side differs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mooncache.conductor.core.policy.algorithm1 import Compared, own_prefixes, paired
from mooncache.conductor.core.policy.common import NO_INSTANCE, QUIET, candidates, cleaned, held, least
from mooncache.conductor.core.policy.fleet import Fleet
from mooncache.conductor.core.policy.types import NO_ROW, Bools, Choice, Floats, Request, Rules

if TYPE_CHECKING:
    import random


class Scored:
    """A policy that only measures the instances that may compute the prompt; the least measure is taken."""

    name = ""

    def measure(
        self, request: Request, fleet: Fleet, rules: Rules, mask: Bools, rng: random.Random
    ) -> Floats:
        """A measure for each row."""
        raise NotImplementedError

    def measure_decode(self, request: Request, fleet: Fleet, rules: Rules) -> Floats | None:
        """A measure for each row as decode instance, None for the time between tokens."""
        return None

    @QUIET
    def choose(self, request: Request, fleet: Fleet, rules: Rules, rng: random.Random) -> Choice:
        """Choose the prefill instance by a simple rule; the contract is `Policy.choose`."""
        prefillers, decoders = candidates(request, fleet)
        mask = prefillers if prefillers.any() else decoders
        scores, invalid = cleaned(self.measure(request, fleet, rules, mask, rng), mask)
        row = least(scores, rng)
        if row == NO_ROW:
            return replace(NO_INSTANCE, invalid_costs=invalid)
        decode_scores = self.measure_decode(request, fleet, rules)
        compared = Compared(own_prefixes(request, fleet), scores, invalid, decode_scores)
        return paired(request, fleet, rules, rng, row, compared)


class Random(Scored):
    """Any instance."""

    name = "random"

    def measure(
        self, request: Request, fleet: Fleet, rules: Rules, mask: Bools, rng: random.Random
    ) -> Floats:
        """All are equal: the tie is broken at random."""
        return np.zeros(len(fleet))


class RoundRobin(Scored):
    """One after another."""

    name = "round_robin"

    def measure(
        self, request: Request, fleet: Fleet, rules: Rules, mask: Bools, rng: random.Random
    ) -> Floats:
        """The instance whose turn it is by the request's number."""
        rows = np.flatnonzero(mask)
        found = np.ones(len(fleet))
        if len(rows):
            found[rows[request.number % len(rows)]] = 0.0
        return found


class LeastLoad(Scored):
    """Load balancing: the shortest queue by time, caches do not count."""

    name = "least_load"

    def measure(
        self, request: Request, fleet: Fleet, rules: Rules, mask: Bools, rng: random.Random
    ) -> Floats:
        """Seconds of computing in front."""
        return fleet.queue_s


class LongestPrefix(Scored):
    """The longest own prefix, of equals the shortest queue: herds onto the holder of a common beginning."""

    name = "longest_prefix"

    def measure(
        self, request: Request, fleet: Fleet, rules: Rules, mask: Bools, rng: random.Random
    ) -> Floats:
        """Prefix first; the queue is squeezed below one token."""
        return -held(request).astype(np.float64) + fleet.queue_s / (1.0 + fleet.queue_s)
