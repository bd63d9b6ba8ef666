"""Decode selection: who generates soonest and fastest at the moment the prompt's KV is there.

Source: Mooncake (arXiv 2407.00079, section 7): the load that counts is the one when the prefill ends. The score is
the time to the end of the answer (waiting for a place, hand-over, every expected token at the predicted time
between tokens); candidates beyond the promised time between tokens come behind all others.

Waiting: an instance has places, memory for KV, and the time of a step that the promise leaves. While all that was
sent there needs more than one of these, places are taken in order and come free as answers end, the whole of it once
every `stay_s`. So a newcomer's place is there when the excess has ended: a fact of what was sent and has not
ended, which corrects itself where the curves of what generates later (`Fleet.decode_at`) would add up their errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mooncache.conductor.core.policy.common import most
from mooncache.conductor.core.policy.fleet import Even, Fleet
from mooncache.conductor.core.policy.types import Bools, Floats, Request

LATE_S = 1e6  # behind all that keep the promise
HELD_AT = (
    0.98  # share of the promised time between tokens at which newcomers are held: steps grow with answers
)


class Placements(NamedTuple):
    """What each row would do for the request, as columns."""

    tbt_s: Floats
    wait_s: Floats
    score_s: Floats


# What of a batch (sequences, KV tokens: columns or numbers) a limit is about.
Amount = Floats | float
Need = Callable[[Amount, Amount, Fleet], Amount]


def price(
    request: Request, fleet: Fleet, at_s: float, handover_s: Floats | float, *, holds: bool = False
) -> Placements:
    """Every row priced for `at_s` seconds from now, which is when the KV is there.

    holds: newcomers are held where steps would be longer than promised (`Rules.holds`).
    """
    sequences, kv_tokens = fleet.decode_at(at_s)
    wait_s, share = _waits(request, fleet, at_s, holds=holds)
    if wait_s is not None:
        # Who waits comes into a full batch.
        waits = wait_s > 0
        sequences = np.where(waits, fleet.sequences * share, sequences)
        kv_tokens = np.where(waits, fleet.kv_tokens * share, kv_tokens)
    tbt_s = fleet.tbt_s(sequences + request.sequences, kv_tokens + request.kv_tokens)
    if holds:
        alone_s = fleet.summary.decode_base_s + _work_s(request.sequences, request.kv_tokens, fleet)
        np.minimum(tbt_s, np.maximum(alone_s, HELD_AT * request.tbt_slo_s), out=tbt_s)
    nothing = fleet.summary.nothing
    score_s = request.output_tokens * tbt_s
    if wait_s is None:
        wait_s = nothing
        if handover_s is not nothing:
            score_s += handover_s
    else:
        score_s += wait_s + handover_s
    if not most(tbt_s) <= request.tbt_slo_s:
        score_s += LATE_S * (tbt_s > request.tbt_slo_s)
    return Placements(tbt_s, wait_s, score_s)


def _waits(
    request: Request, fleet: Fleet, at_s: float, *, holds: bool
) -> tuple[Floats | None, Floats | float]:
    """The wait for a place, None without one, and the share of the sent requests that fits."""
    limits = _limits(request, fleet, holds=holds)
    over: list[tuple[Floats, Need, Even]] = []
    share: Floats | float = 1.0
    for need, limit in limits:
        sent = need(fleet.sequences, fleet.kv_tokens, fleet)
        own = need(request.sequences, request.kv_tokens, fleet)
        wanted = sent + own
        full: Bools = np.asarray((wanted > limit) & (limit > 0))
        full &= sent > 0
        if full.any():
            over.append((np.where(full, np.minimum(wanted - limit, sent), 0.0), need, limit))
            share = np.minimum(np.where(full, limit / wanted, 1.0), share)
    if not over:
        return None, 1.0
    return _waiting_s(request, fleet, at_s, over, share), share


def _waiting_s(
    request: Request, fleet: Fleet, at_s: float, over: list[tuple[Floats, Need, Even]], share: Floats | float
) -> Floats:
    """The wait for a place; over: the excess over each limit, which may be 0."""
    # What stayed so far was in emptier batches, and long answers have not ended yet.
    full_step_s = fleet.tbt_s(fleet.sequences * share, fleet.kv_tokens * share)
    stay_s = np.maximum(fleet.stay_s, request.output_tokens * full_step_s)
    wait_s = np.zeros(len(fleet))
    for excess, need, limit in over:
        # Until then the batch fills: less comes free than of a full one.
        batch = need(fleet.batch_sequences, fleet.batch_kv_tokens, fleet)
        freed_s = at_s * (1 + np.minimum(batch / limit, 1.0)) / 2
        wait_s = np.maximum(wait_s, np.where(excess > 0, excess / limit * stay_s - freed_s, 0.0))
    return wait_s


def _limits(request: Request, fleet: Fleet, *, holds: bool) -> list[tuple[Need, Even]]:
    """The limits that some row could exceed with the request.

    Where even the most of everything that any row was sent would be within the least limit, no row is over it.
    """
    summary = fleet.summary
    sequences, kv_tokens = most(fleet.sequences), most(fleet.kv_tokens)
    limits: list[tuple[Need, Even]] = []
    if not sequences + request.sequences <= summary.sequences_least:
        limits.append((_sequences, fleet.sequences_max))
    if not kv_tokens + request.kv_tokens <= summary.kv_tokens_least:
        limits.append((_kv_tokens, fleet.kv_capacity_tokens))
    if holds:
        limit = HELD_AT * request.tbt_slo_s - summary.decode_base_s
        sent = _work_s(sequences, kv_tokens, fleet)
        own = _work_s(request.sequences, request.kv_tokens, fleet)
        within = sent + own <= limit
        if within is not True and not np.all(within):
            limits.append((_work_s, limit))
    return limits


def _sequences(sequences: Amount, kv_tokens: Amount, fleet: Fleet) -> Amount:
    return sequences


def _kv_tokens(sequences: Amount, kv_tokens: Amount, fleet: Fleet) -> Amount:
    return kv_tokens


def _work_s(sequences: Amount, kv_tokens: Amount, fleet: Fleet) -> Amount:
    """The time that this load adds to a step."""
    summary = fleet.summary
    return summary.decode_per_sequence_s * sequences + summary.decode_per_token_s * kv_tokens
