"""The paper's scheduling: Algorithm 1 of Mooncake (FAST'25), and its baselines without transfers.

The prefix is fetched when the best one is longer than the own one by more than a threshold, else what is missing is
computed; transfer, queue and prefill are added up. The decode instance is the one with the least predicted time
between tokens. Corners as they must be: the ratio of a prefix to none is infinite, of none to none is one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

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
from mooncache.conductor.core.policy.fetching import fetch_s
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


class Prefixes(NamedTuple):
    """How each row comes by the beginning of the prompt, as columns."""

    tokens: Ints  # leading ones that are there when it computes
    fetch_tokens: Ints  # those of them that it fetches from `source`
    ready_s: Floats  # how long it fetches them
    source: PrefixSource | None = None


class Compared(NamedTuple):
    """What was compared to choose who computes the prompt."""

    prefixes: Prefixes
    scores: Floats
    invalid_costs: int  # how many of the scores were not numbers
    decode_scores: Floats | None = None
    """What is compared to choose who generates; None: the time between tokens."""


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
        prefixes = prefixes_of(request, fleet, source, rules.threshold)
        total_s = prefixes.ready_s + fleet.queue_s + fleet.prefill_s(request.prompt_tokens, prefixes.tokens)
        scores, invalid = cleaned(total_s, eligible)
        row = least(scores, rng)
        if row == NO_ROW:
            return replace(NO_INSTANCE, invalid_costs=invalid)
        return paired(request, fleet, rules, rng, row, Compared(prefixes, scores, invalid))


def best_source(request: Request) -> PrefixSource | None:
    """The source of the longest prefix, of several the fastest."""
    return max(request.sources, key=lambda source: (source.tokens, source.tokens_per_s), default=None)


def own_prefixes(request: Request, fleet: Fleet) -> Prefixes:
    """What each row holds itself; nothing is fetched."""
    nothing = np.zeros(len(fleet))
    return Prefixes(held(request), nothing.astype(np.int64), nothing)


def prefixes_of(request: Request, fleet: Fleet, source: PrefixSource | None, threshold: float) -> Prefixes:
    """The prefix of each row by the threshold's rule."""
    if source is None or not source.tokens:
        return own_prefixes(request, fleet)
    have = held(request)
    fetches: Bools = fleet.pool & (fleet.group == request.group) & (source.tokens > have * threshold)
    if source.row != NO_ROW:
        fetches[source.row] = False
    fetch: Ints = np.where(fetches, source.tokens - have, 0)
    fetched_s = fetch_s(fleet, source, fetch.astype(np.float64))
    ready_s: Floats = np.where(fetches, fleet.fetch_latency_s + fetched_s, 0.0)
    return Prefixes(np.where(fetches, source.tokens, have), fetch, ready_s, source)


def paired(
    request: Request, fleet: Fleet, rules: Rules, rng: random.Random, row: int, compared: Compared
) -> Choice:
    """The choice of `row` for the prompt with the decode instance of the least score."""
    prefillers, decoders = candidates(request, fleet)
    prefixes = compared.prefixes
    prefix, fetch, ready_s = int(prefixes.tokens[row]), int(prefixes.fetch_tokens[row]), prefixes.ready_s[row]
    compute_s = fleet.prefill_cost(row).seconds(request.prompt_tokens, prefix)
    queue_s = float(fleet.queue_s[row])
    tbt_s = fleet.tbt_s(fleet.sequences + request.sequences, fleet.kv_tokens + request.kv_tokens)
    inline = not prefillers[row]
    group = fleet.group == fleet.group[row]
    decode_scores = tbt_s if compared.decode_scores is None else compared.decode_scores
    measured, invalid = cleaned(decode_scores, decoders & fleet.pool & group)
    compared = compared._replace(invalid_costs=compared.invalid_costs + invalid)
    decode = row if inline else least(measured, rng)
    if decode == NO_ROW:
        # No other instance can read what the row would compute: a decode instance does both.
        other = least(cleaned(tbt_s, decoders)[0], rng)
        if other == NO_ROW:
            return replace(NO_INSTANCE, invalid_costs=compared.invalid_costs)
        return paired(request, fleet, rules, rng, other, compared._replace(decode_scores=None))
    handover_s = 0.0 if inline else float(handovers_s(request, fleet)[decode])
    ttft_s = float(ready_s) + queue_s + compute_s + handover_s
    choice = Choice(
        admitted=True,
        reason=Reason.ADMITTED,
        prefill=NO_ROW if inline else row,
        decode=decode,
        branch=Branch.FETCH if fetch else Branch.LOCAL,
        prefix_tokens=prefix,
        fetch_tokens=fetch,
        source_row=prefixes.source.row if prefixes.source is not None and fetch else NO_ROW,
        ttft_s=ttft_s,
        queue_s=queue_s,
        ready_s=float(ready_s),
        compute_s=compute_s,
        handover_s=handover_s,
        tbt_s=float(tbt_s[decode]),
        scores=compared.scores,
        decode_scores=measured,
        invalid_costs=compared.invalid_costs,
    )
    return overload.judged(request, fleet, rules, choice)
