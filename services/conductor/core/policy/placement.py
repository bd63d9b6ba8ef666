"""Decode selection: who generates soonest and fastest at the moment the prompt's KV is there.

Source: Mooncake (arXiv 2407.00079, section 7): the load that counts is the one when the prefill ends. The score is
the time to the end of the answer (waiting for a place, hand-over, every expected token at the predicted time
between tokens); candidates beyond the promised time between tokens come behind all others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mooncache.conductor.core.policy.common import QUIET
from mooncache.conductor.core.policy.fleet import Fleet
from mooncache.conductor.core.policy.types import Floats, Request

LATE_S = 1e6  # behind everybody who keeps the promise


class Placements(NamedTuple):
    """What each row would do for the request, as columns."""

    tbt_s: Floats
    wait_s: Floats
    score_s: Floats


@QUIET
def price(request: Request, fleet: Fleet, at_s: float, handover_s: Floats | float) -> Placements:
    """Return every row priced for `at_s` seconds from now, which is when the KV is there."""
    sequences, kv_tokens = fleet.decode_at(at_s)
    sequences = sequences + request.sequences
    kv_tokens = kv_tokens + request.kv_tokens
    wait_s = np.zeros(len(fleet))
    over = sequences - np.where(fleet.sequences_max > 0, fleet.sequences_max, np.inf)
    full = over > 0
    if full.any():
        there = np.maximum(sequences - request.sequences, 1e-9)
        wait_s = np.where(full, np.minimum(over / there, 1.0) * fleet.stay_s, 0.0)
    over = kv_tokens - np.where(fleet.kv_capacity_tokens > 0, fleet.kv_capacity_tokens, np.inf)
    full = (over > 0) & (fleet.kv_tokens > 0)
    if full.any():
        there = np.maximum(kv_tokens - request.kv_tokens, 1e-9)
        wait_s = np.maximum(wait_s, np.where(full, np.minimum(over / there, 1.0) * fleet.stay_s, 0.0))
    tbt_s = fleet.tbt_s(sequences, kv_tokens)
    score_s = (
        wait_s + handover_s + request.output_tokens * tbt_s + np.where(tbt_s > request.tbt_slo_s, LATE_S, 0.0)
    )
    return Placements(tbt_s, wait_s, score_s)
