"""The paper's scheduling: Algorithm 1 of Mooncake (FAST'25), and its baselines without transfers.

The prefix is fetched when the best one is longer than the own one by more than a threshold, else what is missing is
computed; transfer, queue and prefill are added up. The decode instance is the one with the least predicted time
between tokens. Corners as they must be: the ratio of a prefix to none is infinite, of none to none is one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mooncache.conductor.core.policy import overload
from mooncache.conductor.core.policy.common import (
    NO_INSTANCE,
    QUIET,
    candidates,
    cleaned,
    handovers_s,
    held,
    least,
)
from mooncache.conductor.core.policy.fleet import Fleet
from mooncache.conductor.core.policy.types import (
    NO_ROW,
    Bools,
    Branch,
    Choice,
    Floats,
    Ints,
    PrefixSource,
    Reason,
    Request,
    Rules,
)

if TYPE_CHECKING:
    import random


class Algorithm1:
    """`fetches` False is the paper's local cache-aware baseline: the threshold is infinite."""

    def __init__(self, name: str, *, fetches: bool) -> None:
        self.name = name
        self._fetches = fetches

    @QUIET
    def choose(self, request: Request, fleet: Fleet, rules: Rules, rng: random.Random) -> Choice:
        """Choose by Algorithm 1; the contract is `Policy.choose`."""
        prefillers, decoders = candidates(request, fleet)
        eligible = prefillers if prefillers.any() else decoders
        source = best_source(request) if self._fetches else None
        prefix, fetch, ready_s = prefixes(request, fleet, source, rules.threshold)
        total_s = ready_s + fleet.queue_s + fleet.prefill_s(request.prompt_tokens, prefix)
        scores, odd = cleaned(total_s, eligible)
        row = least(scores, rng)
        if row == NO_ROW:
            return replace(NO_INSTANCE, invalid_costs=odd)
        return paired(
            request, fleet, rules, rng, row, (prefix, fetch, ready_s), source, scores, odd, ready_s[row]
        )


def best_source(request: Request) -> PrefixSource | None:
    """The source of the longest prefix, of several the fastest."""
    return max(request.sources, key=lambda source: (source.tokens, source.tokens_per_s), default=None)


def prefixes(
    request: Request, fleet: Fleet, source: PrefixSource | None, threshold: float
) -> tuple[Ints, Ints, Floats]:
    """For each row (prefix, tokens to fetch, seconds of fetching) by the threshold's rule."""
    have = held(request)
    nothing = np.zeros(len(fleet))
    if source is None or not source.tokens:
        return have, nothing.astype(np.int64), nothing
    fetches: Bools = fleet.pool & (fleet.group == request.group) & (source.tokens > have * threshold)
    if source.row != NO_ROW:
        fetches[source.row] = False
    fetch: Ints = np.where(fetches, source.tokens - have, 0)
    rate = np.minimum(fleet.fetch_tokens_per_s, source.tokens_per_s)
    ready_s: Floats = np.where(fetches, fleet.fetch_latency_s + fetch / rate, 0.0)
    return np.where(fetches, source.tokens, have), fetch, ready_s


def paired(
    request: Request,
    fleet: Fleet,
    rules: Rules,
    rng: random.Random,
    row: int,
    prefix_fetch_ready: tuple[Ints, Ints, Floats],
    source: PrefixSource | None,
    scores: Floats,
    odd: int,
    added_s: float,
    decode_scores: Floats | None = None,
) -> Choice:
    """The choice of `row` for the prompt with the decode instance of the least time between tokens.

    added_s: what the transfer adds to the time to the first token. decode_scores: another measure of the decode
    instances.
    """
    prefillers, decoders = candidates(request, fleet)
    prefix, fetch, ready_s = (column[row] for column in prefix_fetch_ready)
    compute_s = fleet.prefill_cost(row).seconds(request.prompt_tokens, int(prefix))
    queue_s = float(fleet.queue_s[row])
    tbt_s = fleet.tbt_s(fleet.sequences + request.sequences, fleet.kv_tokens + request.kv_tokens)
    inline = not prefillers[row]
    group = fleet.group == fleet.group[row]
    measured, more = cleaned(tbt_s if decode_scores is None else decode_scores, decoders & fleet.pool & group)
    decode = row if inline else least(measured, rng)
    if decode == NO_ROW:
        # No other instance can read what the row would compute: a decode instance does both.
        other = least(cleaned(tbt_s, decoders)[0], rng)
        if other == NO_ROW:
            return replace(NO_INSTANCE, invalid_costs=odd + more)
        added_s = float(prefix_fetch_ready[2][other])
        return paired(
            request, fleet, rules, rng, other, prefix_fetch_ready, source, scores, odd + more, added_s
        )
    handover_s = 0.0 if inline else float(handovers_s(request, fleet)[decode])
    ttft_s = float(added_s) + queue_s + compute_s + handover_s
    choice = Choice(
        admitted=True,
        reason=Reason.ADMITTED,
        prefill=NO_ROW if inline else row,
        decode=decode,
        branch=Branch.FETCH if fetch else Branch.LOCAL,
        prefix_tokens=int(prefix),
        fetch_tokens=int(fetch),
        source_row=source.row if source is not None and fetch else NO_ROW,
        ttft_s=ttft_s,
        queue_s=queue_s,
        ready_s=float(ready_s),
        compute_s=compute_s,
        handover_s=handover_s,
        tbt_s=float(tbt_s[decode]),
        scores=scores,
        decode_scores=measured,
        invalid_costs=odd + more,
    )
    reason, retry_s = overload.judged(request, fleet, rules, choice)
    return replace(choice, admitted=False, reason=reason, retry_after_s=retry_s) if reason else choice
