"""The instances of one model at one moment, a column for each property and a row for each instance.

Policies compute with whole columns: one formula for one instance and for a thousand. They never write to a
column: `FleetBook.view` hands out its own arrays. Masks and costs that no request changes are in `FleetSummary`, made
once and used by all decisions until an instance changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mooncache.conductor.core.policy.types import Bools, Floats, Ints, PrefillCost
from mooncache.kvcache.instance_role import InstanceRole

# A column holds numbers: these stand for roles there.
PREFILL, DECODE, BOTH, NO_ROLE = 0, 1, 2, -1
ROLES = {InstanceRole.PREFILL: PREFILL, InstanceRole.DECODE: DECODE, InstanceRole.BOTH: BOTH}
ROLE_NAMES = {number: role for role, number in ROLES.items()}

Even = Floats | float  # a column, or the one number that it holds in all rows: formulas are the same for both


class FleetSummary(NamedTuple):
    """What follows from the columns that requests do not change.

    Costs have the names of their columns in `Fleet`.
    """

    prefillers: Bools  # rows that may compute prompts for others
    decoders: Bools  # rows that may generate
    eligible: Bools  # prefillers and decoders
    both: Bools  # rows that have both roles
    away: tuple[tuple[Bools, Floats], ...]
    """For each mask of prefillers, decoders, eligible: the mask, a column of zeros that is infinite outside of it."""
    groups: tuple[tuple[int, Bools, Bools], ...]
    """Of each passport group: its number, its rows, those of them that share the pool."""
    prefill_a: Even
    prefill_b: Even
    prefill_c: Even
    prefill_d: Even
    fetch_latency_s: Even
    decode_base_s: Even
    decode_per_sequence_s: Even
    decode_per_token_s: Even
    nothing: Floats  # a column of zeros
    can_generate: bool
    any_both: bool
    any_pipeline: bool
    hands_over: bool  # some hand-over takes time
    tails: bool  # some row computes the tail
    all_share: bool  # all ready rows share one pool
    sequences_least: float  # the least limit that some row has, infinite when none has one
    kv_tokens_least: float  # the same for kv_capacity_tokens

    @classmethod
    def of(cls, fleet: Fleet) -> FleetSummary:
        """The columns derived from a fleet's columns."""
        role, ready = fleet.role, fleet.ready
        both: Bools = role == BOTH
        decoders = ready & ((role == DECODE) | both)
        here = role != NO_ROLE
        groups = []
        for group in np.unique(fleet.group[ready]).tolist():
            members = fleet.group == group
            groups.append((group, members, members & fleet.pool))
        prefillers: Bools = ready & (role == PREFILL) & fleet.pool
        eligible: Bools = prefillers | decoders
        delays: Bools = here & ((fleet.handover_s != 0.0) | (fleet.handover_tokens_per_s != np.inf))
        return cls(
            prefillers=prefillers,
            decoders=decoders,
            eligible=eligible,
            both=both,
            away=tuple((mask, np.where(mask, 0.0, np.inf)) for mask in (prefillers, decoders, eligible)),
            groups=tuple(groups),
            prefill_a=_even(fleet.prefill_a, here),
            prefill_b=_even(fleet.prefill_b, here),
            prefill_c=_even(fleet.prefill_c, here),
            prefill_d=_even(fleet.prefill_d, here),
            fetch_latency_s=_even(fleet.fetch_latency_s, here),
            decode_base_s=_even(fleet.decode_base_s, here),
            decode_per_sequence_s=_even(fleet.decode_per_sequence_s, here),
            decode_per_token_s=_even(fleet.decode_per_token_s, here),
            nothing=np.zeros(len(fleet)),
            can_generate=bool(decoders.any()),
            any_both=bool(both.any()),
            any_pipeline=bool((fleet.pipeline >= 0).any()),
            hands_over=bool(delays.any()),
            tails=bool(fleet.tail.any()),
            all_share=len(groups) == 1 and not (ready & ~groups[0][2]).any(),
            sequences_least=_least_limit(fleet.sequences_max),
            kv_tokens_least=_least_limit(fleet.kv_capacity_tokens),
        )

    def outside(self, mask: Bools) -> Floats | None:
        """Zeros, infinite outside of the mask; None for a mask that is none of this object's own."""
        for known, column in self.away:
            if known is mask:
                return column
        return None

    def readers(self, group: int, fleet: Fleet) -> Bools:
        """The rows that can read the blocks of a passport group."""
        for number, _, sharing in self.groups:
            if number == group:
                return sharing
        others: Bools = fleet.pool & (fleet.group == group)
        return others


def _least_limit(column: Floats) -> float:
    """The least limit; 0 is none."""
    return float(column[column > 0].min(initial=np.inf))


def _even(column: Floats, here: Bools) -> Even:
    """The number that all rows with an instance have, or the column when they differ."""
    values = column[here]
    return float(values[0]) if len(values) and bool((values == values[0]).all()) else column


@dataclass(slots=True)
class Fleet:
    """Columns; see the module's text. A row without an instance has no name, is not ready and has NO_ROLE."""

    now_s: float
    names: Sequence[str]
    role: Ints
    ready: Bools
    group: Ints
    pool: Bools
    prefill_a: Floats
    prefill_b: Floats
    prefill_c: Floats
    prefill_d: Floats
    fetch_latency_s: Floats
    fetch_tokens_per_s: Floats  # what one more fetch into the instance would get of its links
    host_tokens_per_s: Floats  # from the memory of its own host
    ssd_tokens_per_s: Floats  # of what lies on a disk
    queue_s: Floats  # prompts in front of a newcomer, by time
    queue_tokens: Floats  # the same prompts, by uncached tokens
    queue_prompts: Ints  # the same prompts, by count
    decode_base_s: Floats
    decode_per_sequence_s: Floats
    decode_per_token_s: Floats
    sequences: Floats  # all that were sent there to be decoded and have not ended
    sequences_max: Floats
    kv_tokens: Floats  # of all these sequences
    kv_capacity_tokens: Floats
    batch_sequences: Floats  # what is being decoded now
    batch_kv_tokens: Floats  # of the sequences that are being decoded now
    stay_s: Floats
    handover_s: Floats  # fixed time from the end of a prefill to the first decode step
    handover_tokens_per_s: Floats  # rate of what is loaded then
    tail: Bools  # the decode instance computes what is behind the last complete block
    pipeline: Ints  # number of the group that can compute one prompt together, -1 for none
    predict: Callable[[Sequence[float]], Floats]
    """(moments, in seconds from now) -> table: moment, (sequences, KV tokens) that are being decoded then, row."""
    generating_s: float = 0.0  # time that all answers so far were expected to add to steps of their batches
    cached_summary: FleetSummary | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.role)

    @property
    def summary(self) -> FleetSummary:
        """What follows from the columns that requests do not change."""
        if self.cached_summary is None:
            self.cached_summary = FleetSummary.of(self)
        return self.cached_summary

    def decode_at(self, after_s: float) -> tuple[Floats, Floats]:
        """The sequences and their KV tokens that each row will decode in `after_s` seconds."""
        (sequences, kv_tokens), *_ = self.predict((after_s,))
        return sequences, kv_tokens

    def prefill_s(self, n: int, p: Ints | Floats) -> Floats:
        """The time of a prompt of n tokens of which each row has p; at least one is computed."""
        have = np.minimum(p, n - 1).astype(np.float64, copy=False)
        summary = self.summary
        # The formula of `prefill_same_s` with as few columns made on the way as possible.
        seconds: Floats = n - have
        seconds *= summary.prefill_b
        seconds += summary.prefill_a
        part = have * have
        np.subtract(float(n) * n, part, out=part)
        part *= summary.prefill_c
        seconds += part
        np.multiply(summary.prefill_d, have, out=part)
        seconds += part
        return seconds

    def prefill_same_s(self, n: int, p: int) -> Even:
        """The same for one prefix that all rows have: one number where all rows compute equally fast."""
        summary, have = self.summary, float(max(0, min(p, n - 1)))
        seconds: Even = (
            summary.prefill_a
            + summary.prefill_b * (n - have)
            + summary.prefill_c * (float(n) * n - have * have)
            + summary.prefill_d * have
        )
        return seconds

    def prefill_cost(self, row: int) -> PrefillCost:
        """The cost model of one row."""
        return PrefillCost(
            float(self.prefill_a[row]),
            float(self.prefill_b[row]),
            float(self.prefill_c[row]),
            float(self.prefill_d[row]),
        )

    def tbt_s(self, sequences: Floats, kv_tokens: Floats) -> Floats:
        """The step time of each row with such a batch."""
        summary = self.summary
        seconds: Floats = summary.decode_per_sequence_s * sequences
        seconds += summary.decode_base_s
        seconds += summary.decode_per_token_s * kv_tokens
        return seconds
