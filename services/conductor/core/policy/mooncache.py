"""The policy of this project: price everything, at the moment when it will happen, and take the cheapest.

Per passport group the cheapest prefill candidate (`branches`) is paired with the best decode candidate at the
moment when the KV will be there (`placement`); computing the prompt on a decode instance itself is one more
candidate, without hand-over but with the delay that it causes to the sequences running there. Whatever ends first
is taken, then admission is asked (`overload`). A request that is refused because it would wait too long is looked at
once more: the cheapest pair may be one where much is queued for a cache, and another may still be in time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mooncache.conductor.core.policy import branches, inlining, overload, placement
from mooncache.conductor.core.policy.branches import PrefillOption
from mooncache.conductor.core.policy.common import (
    NO_INSTANCE,
    QUIET,
    candidates,
    cleaned,
    handovers_s,
    least,
)
from mooncache.conductor.core.policy.fleet import Fleet
from mooncache.conductor.core.policy.placement import Placements
from mooncache.conductor.core.policy.types import (
    NO_ROW,
    Bools,
    Branch,
    Choice,
    Floats,
    InlineVerdict,
    Inlining,
    Reason,
    Request,
    Rules,
)

if TYPE_CHECKING:
    import random


class _Pair(NamedTuple):
    """A priced option for the prompt and a place for the answer. `end_s` is compared."""

    prefill: int
    decode: int
    option: PrefillOption
    placed: Placements
    handover_s: float
    end_s: float
    decode_scores: Floats


class Mooncache:
    """The policy of this project: the cheapest of all priced branches."""

    name = "mooncache"

    @QUIET
    def choose(self, request: Request, fleet: Fleet, rules: Rules, rng: random.Random) -> Choice:
        """Choose the cheapest branch that keeps the promise; the contract is `Policy.choose`."""
        choice = self._cheapest(request, fleet, rules, rng)
        if choice.reason not in (Reason.TTFT, Reason.CAPACITY):
            return choice
        soonest = self._cheapest(request, fleet, replace(rules, work_weight=0.0, queue_weight=0.0), rng)
        return soonest if soonest.admitted else choice

    def _cheapest(self, request: Request, fleet: Fleet, rules: Rules, rng: random.Random) -> Choice:
        """The cheapest branch, admitted or refused."""
        prefillers, decoders = candidates(request, fleet)
        summary = fleet.summary
        all_there = prefillers is summary.prefillers and decoders is summary.decoders
        if not (summary.can_generate if all_there else decoders.any()):
            return NO_INSTANCE
        eligible = summary.eligible if all_there else prefillers | decoders
        priced = branches.scores(request, fleet, rules, full=False)
        scores, invalid = cleaned(priced.score_s, eligible, summary)
        alone, _ = cleaned(scores, prefillers, summary)
        pair = self._paired(request, fleet, rules, rng, alone, decoders)
        inline, refused = self._inline(request, fleet, rules, rng, decoders, paired=pair is not None)
        here_s, apart_s = (each.end_s if each is not None else None for each in (inline, pair))
        found = inlining.verdict(here_s, apart_s, refused)
        best = inline if found.verdict in (InlineVerdict.ONLY, InlineVerdict.CHEAPER) else pair
        if best is None:
            return replace(NO_INSTANCE, invalid_costs=invalid)
        decode_scores = (pair or best).decode_scores
        inline_scores = inline.decode_scores if inline is not None else None
        choice = _choice(fleet, best, scores, decode_scores, inline_scores, found, invalid)
        return overload.judged(request, fleet, rules, choice)

    def _paired(
        self,
        request: Request,
        fleet: Fleet,
        rules: Rules,
        rng: random.Random,
        scores: Floats,
        decoders: Bools,
    ) -> _Pair | None:
        """The best prefill instance (or pipeline) with the best decode instance that can read its blocks."""
        best: _Pair | None = None
        handover_s = handovers_s(request, fleet)
        groups = fleet.summary.groups
        for _, members, sharing in groups:
            own = scores if len(groups) == 1 else np.where(members, scores, np.inf)
            row = least(own, rng)
            if row == NO_ROW:
                continue
            option = branches.cheapest(branches.options(request, fleet, rules, row))
            option = branches.together(request, fleet, rules, own, option) or option
            placed = placement.price(request, fleet, option.total_s, handover_s, holds=overload.holds(rules))
            mask = decoders if fleet.summary.all_share else decoders & sharing
            measured, _ = cleaned(placed.score_s, mask, fleet.summary)
            decode = least(measured, rng)
            if decode == NO_ROW:
                continue
            end_s = option.score_s + float(measured[decode])
            if best is None or end_s < best.end_s:
                prefill = option.members[0] if option.members else row
                best = _Pair(prefill, decode, option, placed, float(handover_s[decode]), end_s, measured)
        return best

    def _inline(
        self,
        request: Request,
        fleet: Fleet,
        rules: Rules,
        rng: random.Random,
        decoders: Bools,
        *,
        paired: bool,
    ) -> tuple[_Pair | None, InlineVerdict | None]:
        """The best decode instance that computes the prompt itself, or why none may.

        While prefill instances are there it only takes what is short and keeps the promise of those that run there
        (arXiv 2407.00079, section 3: inlined when it needs no chunking and breaks no promise).
        """
        mask = decoders
        if paired:
            mask = inlining.short_enough(request, fleet, rules, mask)
            if not mask.any():
                return None, InlineVerdict.TOO_LONG
        priced = branches.scores(request, fleet, rules)
        assert priced.total_s is not None, "requested"
        assert priced.compute_s is not None, "requested"
        placed = placement.price(
            request, fleet, float(np.min(priced.total_s[mask])), 0.0, holds=overload.holds(rules)
        )
        if paired:
            stalls = (fleet.sequences > 0) & (priced.compute_s + placed.tbt_s > request.tbt_slo_s)
            mask = mask & ~stalls
        ends, _ = cleaned(
            priced.score_s + placed.score_s + inlining.delay_s(fleet, priced.compute_s, has_choice=paired),
            mask,
        )
        row = least(ends, rng)
        if row == NO_ROW:
            return None, InlineVerdict.STEPS
        option = branches.cheapest(branches.options(request, fleet, rules, row))
        return _Pair(NO_ROW, row, option, placed, 0.0, float(ends[row]), ends), None


def _choice(
    fleet: Fleet,
    pair: _Pair,
    scores: Floats,
    decode_scores: Floats,
    inline_scores: Floats | None,
    inlined: Inlining,
    invalid: int,
) -> Choice:
    """The pair as a choice, before admission."""
    option, row = pair.option, pair.decode
    prefiller = pair.prefill if pair.prefill != NO_ROW else row
    wait_s = float(pair.placed.wait_s[row])
    queue_s = option.total_s - option.compute_s
    if option.branch is not Branch.WAIT:
        queue_s = min(queue_s, float(fleet.queue_s[prefiller]))
    return Choice(
        admitted=True,
        reason=Reason.ADMITTED,
        prefill=pair.prefill,
        decode=row,
        branch=option.branch,
        prefix_tokens=option.prefix_tokens,
        fetch_tokens=option.fetch_tokens,
        source_row=option.source_row,
        awaited=option.awaited,
        members=option.members,
        chunk_tokens=option.chunk_tokens,
        ttft_s=option.total_s + wait_s + pair.handover_s,
        queue_s=queue_s,
        ready_s=option.ready_s,
        compute_s=option.compute_s,
        handover_s=pair.handover_s,
        wait_s=wait_s,
        tbt_s=float(pair.placed.tbt_s[row]),
        scores=scores,
        decode_scores=decode_scores,
        inline_scores=inline_scores,
        inlining=inlined,
        invalid_costs=invalid,
    )
