"""Cost rules that others published, behind the same interface, for comparison.

dynamo    NVIDIA Dynamo's KV router: w * (blocks left to compute there, the newcomer's included) + blocks decoded there
lmetric   LMetric (arXiv 2603.15202): tokens left to compute there, times the size of the batch; no weights
dualmap   DualMap (arXiv 2602.06502): two hashes of the prefix give two candidates; the one with the longer prefix
          while it keeps the promised time, else the less busy one, and when both are too busy the least busy of all
preble    Preble (ICLR'25), the rule E2: where most of the prompt is cached, else where it costs least

All of them were made for engines that do both prefill and decode; here they choose the prefill instance by their rule
and the decode instance by its decode part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mooncache.conductor.core.policy.baselines import Scored
from mooncache.conductor.core.policy.common import held
from mooncache.conductor.core.policy.fleet import Fleet
from mooncache.conductor.core.policy.types import Bools, Floats, Request, Rules

if TYPE_CHECKING:
    import random

BLOCK_TOKENS = 512.0
_MASK = (1 << 64) - 1
_SEEDS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)


class Dynamo(Scored):
    """The cost rule of NVIDIA Dynamo's KV router."""

    name = "dynamo"

    def measure(
        self, request: Request, fleet: Fleet, rules: Rules, mask: Bools, rng: random.Random
    ) -> Floats:
        """Blocks to compute, queued ones and the newcomer's, and blocks in decode."""
        left = np.maximum(fleet.queue_tokens + request.prompt_tokens - held(request), 0.0)
        found: Floats = (rules.overlap_weight * left + _decoding(fleet)) / BLOCK_TOKENS
        return found

    def measure_decode(self, request: Request, fleet: Fleet, rules: Rules) -> Floats | None:
        """Blocks in decode."""
        return fleet.kv_tokens


class LMetric(Scored):
    """The cost rule of LMetric: tokens left to compute times the size of the batch."""

    name = "lmetric"

    def measure(
        self, request: Request, fleet: Fleet, rules: Rules, mask: Bools, rng: random.Random
    ) -> Floats:
        """Tokens to compute times requests there."""
        left = fleet.queue_tokens + request.prompt_tokens - held(request)
        there = np.where(fleet.role == 0, fleet.queue_prompts, fleet.sequences)
        found: Floats = left * (1.0 + there)
        return found

    def measure_decode(self, request: Request, fleet: Fleet, rules: Rules) -> Floats | None:
        """The batch, and what waits to be computed there."""
        found: Floats = (1.0 + fleet.queue_tokens) * (1.0 + fleet.sequences)
        return found


class DualMap(Scored):
    """The rule of DualMap: two hashes of the prefix name two candidates."""

    name = "dualmap"

    def measure(
        self, request: Request, fleet: Fleet, rules: Rules, mask: Bools, rng: random.Random
    ) -> Floats:
        """0 for the one that the rule takes, more for the others."""
        rows = np.flatnonzero(mask)
        found = np.full(len(fleet), 2.0)
        if not len(rows) or not request.affinity:
            return fleet.queue_s
        key = request.affinity[min(rules.affinity_depth, len(request.affinity) - 1)]
        pair = [int(rows[mixed(key, seed) % len(rows)]) for seed in _SEEDS]
        total_s = fleet.queue_s + fleet.prefill_s(request.prompt_tokens, held(request))
        local = held(request)
        near = max(pair, key=lambda row: (int(local[row]), -float(total_s[row])))
        idle = min(pair, key=lambda row: float(total_s[row]))
        if total_s[near] <= request.ttft_slo_s:
            found[near] = 0.0
        elif total_s[idle] <= request.ttft_slo_s:
            found[idle] = 0.0
        else:
            return total_s
        return found


class Preble(Scored):
    """The rule of Preble: the cached instance for cached prompts, else the cheapest."""

    name = "preble"

    def measure(
        self, request: Request, fleet: Fleet, rules: Rules, mask: Bools, rng: random.Random
    ) -> Floats:
        """Exploit where at least half of the prompt is cached, else explore by cost."""
        local = np.where(mask, held(request), 0)
        longest = int(local.max(initial=0))
        if 2 * longest >= request.prompt_tokens:
            return np.where(local == longest, fleet.queue_s, np.inf)
        return fleet.queue_s + fleet.prefill_s(request.prompt_tokens, held(request))


def mixed(key: int, seed: int) -> int:
    """A well mixed 64-bit number of a key (splitmix64); the same in every process."""
    value = (key ^ seed) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)


def _decoding(fleet: Fleet) -> Floats:
    """KV tokens in decode on instances that do both; prefill instances decode nothing."""
    return np.where(fleet.role == 0, 0.0, fleet.kv_tokens)
