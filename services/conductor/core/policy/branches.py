"""Prefill selection: what every instance would cost, by every option that it has to come by the prefix.

Source: Mooncake (FAST'25), Algorithm 1, with these changes. Its balancing threshold is gone: all branches (compute
what is missing, fetch the longer prefix from the best source, wait for blocks that another request is computing)
are priced and the cheapest is taken. A fetch overlaps with queueing, so the cost is `max(queue, fetch) + prefill`
instead of the sum. To it a share of the computing time is added when candidates are compared: an instance's time is
what the next requests queue for. Instances of a pipeline group can also compute a prompt together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from mooncache.conductor.core.policy import pipeline
from mooncache.conductor.core.policy.fetching import fetch_row_s, fetch_s
from mooncache.conductor.core.policy.fleet import Fleet
from mooncache.conductor.core.policy.types import (
    NO_ROW,
    Awaited,
    Branch,
    Floats,
    Ints,
    PrefillCost,
    PrefixSource,
    Request,
    Rules,
)


class PrefillOption(NamedTuple):
    """An option of one row to come by the prompt's KV, and what it costs; see `Choice` for the fields."""

    branch: Branch
    prefix_tokens: int
    fetch_tokens: int
    source_row: int
    ready_s: float
    compute_s: float
    total_s: float
    score_s: float
    awaited: Awaited | None = None
    members: tuple[int, ...] = ()
    chunk_tokens: int = 0


class Scores(NamedTuple):
    """The cheapest option of every row that computes alone."""

    local: Floats  # the leading tokens that each row holds
    weight: Floats  # see `weights`
    score_s: Floats  # what is compared
    total_s: Floats | None  # when the KV is there
    compute_s: Floats | None  # the computing


def scores(request: Request, fleet: Fleet, rules: Rules, *, full: bool = True) -> Scores:
    """The cheapest branch of every row, as columns; `options` has all branches of one row.

    full: with the times behind the score, which most requests have no use for.
    """
    local = request.local.astype(np.float64)
    weight = weights(fleet, rules)
    compute_s = fleet.prefill_s(request.prompt_tokens, local)
    total_s = fleet.queue_s + compute_s
    score_s = weight * compute_s
    score_s += total_s
    found = Scores(local, weight, score_s, total_s if full else None, compute_s if full else None)
    for source in _fastest(request):
        _take_longer(found, request, fleet, source, 0.0)
    if rules.waits:
        for awaited in _soonest(request):
            _take_longer(found, request, fleet, PrefixSource(awaited.row, awaited.tokens), awaited.ready_in_s)
        for awaited in request.awaited:
            _take_at_home(found, request, fleet, awaited)
    return found


def _fastest(request: Request) -> Iterable[PrefixSource]:
    """Of the sources with equally many tokens the fastest: it is the best one for all rows but itself.

    And that one needs none of them: it has the tokens.
    """
    found: dict[int, PrefixSource] = {}
    for source in request.sources:
        if source.on_host is not None or source.on_ssd is not None:
            yield source  # which one is the fastest depends on the row
            continue
        known = found.get(source.tokens)
        if known is None or source.tokens_per_s > known.tokens_per_s:
            found[source.tokens] = source
    yield from found.values()


def _soonest(request: Request) -> Iterable[Awaited]:
    """Of the requests that make equally many tokens readable the first: it is the best one for all rows but
    its own, which has them even sooner."""
    found: dict[int, Awaited] = {}
    for awaited in request.awaited:
        known = found.get(awaited.tokens)
        if awaited.pool and (known is None or awaited.ready_in_s < known.ready_in_s):
            found[awaited.tokens] = awaited
    return found.values()


def _take_longer(
    found: Scores, request: Request, fleet: Fleet, source: PrefixSource, ready_in_s: float
) -> None:
    """Take the longer prefix of a source, which can be read in `ready_in_s`, where that is cheaper."""
    summary = fleet.summary
    gain = source.tokens - found.local
    # All who gain compute the same rest: one prefix for the whole column.
    compute_s = fleet.prefill_same_s(request.prompt_tokens, source.tokens)
    total_s = fetch_s(fleet, source, gain)
    total_s += ready_in_s + summary.fetch_latency_s
    np.maximum(fleet.queue_s, total_s, out=total_s)
    total_s += compute_s
    score_s = found.weight * compute_s
    score_s += total_s
    wins = score_s < found.score_s
    wins &= gain > 0
    wins &= summary.readers(request.group, fleet)
    if source.row != NO_ROW:
        wins[source.row] = False
    np.copyto(found.score_s, score_s, where=wins)
    if found.total_s is not None and found.compute_s is not None:
        np.copyto(found.total_s, total_s, where=wins)
        np.copyto(found.compute_s, compute_s, where=wins)


def _take_at_home(found: Scores, request: Request, fleet: Fleet, awaited: Awaited) -> None:
    """Where the other request runs, its blocks are in the engine's own cache: nothing is fetched."""
    row = awaited.row
    if not 0 <= row < len(fleet) or awaited.tokens <= request.local[row]:
        return
    compute_s = fleet.prefill_cost(row).seconds(request.prompt_tokens, awaited.tokens)
    total_s = max(float(fleet.queue_s[row]), awaited.ready_in_s) + compute_s
    score_s = total_s + float(found.weight[row]) * compute_s
    if score_s < found.score_s[row]:
        found.score_s[row] = score_s
        if found.total_s is not None and found.compute_s is not None:
            found.total_s[row], found.compute_s[row] = total_s, compute_s


def weights(fleet: Fleet, rules: Rules) -> Floats:
    """The seconds of delay that one second of computing saved is worth on each row.

    Those who come next queue for it, and the more prompts queue already, the more come before the queue ends.
    """
    worth: Floats = rules.work_weight + rules.queue_weight * fleet.queue_prompts.astype(np.float64)
    return worth


def options(request: Request, fleet: Fleet, rules: Rules, row: int) -> list[PrefillOption]:
    """All branches of one row, the local one first; `scores` has the least of them."""
    n, have, queue_s = request.prompt_tokens, int(request.local[row]), float(fleet.queue_s[row])
    weight = rules.work_weight + rules.queue_weight * float(fleet.queue_prompts[row])
    cost = fleet.prefill_cost(row)

    def option(
        branch: Branch, prefix: int, fetch: int, source: int, ready_s: float, awaited: Awaited | None
    ) -> PrefillOption:
        compute_s = cost.seconds(n, prefix)
        total_s = max(queue_s, ready_s) + compute_s
        score_s = total_s + weight * compute_s
        return PrefillOption(branch, prefix, fetch, source, ready_s, compute_s, total_s, score_s, awaited)

    found = [option(Branch.LOCAL, have, 0, NO_ROW, 0.0, None)]
    reader = bool(fleet.pool[row]) and int(fleet.group[row]) == request.group
    for source in request.sources:
        if reader and source.tokens > have and source.row != row:
            ready_s = fetch_row_s(fleet, row, source, source.tokens - have)
            found.append(option(Branch.FETCH, source.tokens, source.tokens - have, source.row, ready_s, None))
    for awaited in request.awaited if rules.waits else ():
        if awaited.tokens <= have:
            continue
        if awaited.row == row:
            found.append(option(Branch.WAIT, awaited.tokens, 0, NO_ROW, awaited.ready_in_s, awaited))
        elif reader and awaited.pool:
            coming = PrefixSource(awaited.row, awaited.tokens)
            ready_s = awaited.ready_in_s + fetch_row_s(fleet, row, coming, awaited.tokens - have)
            found.append(
                option(Branch.WAIT, awaited.tokens, awaited.tokens - have, awaited.row, ready_s, awaited)
            )
    return found


def cheapest(found: list[PrefillOption]) -> PrefillOption:
    """The cheapest branch; equal costs prefer the earlier one (local, fetch, wait)."""
    return min(found, key=lambda option: option.score_s)


def together(
    request: Request, fleet: Fleet, rules: Rules, scores_s: Floats, alone: PrefillOption
) -> PrefillOption | None:
    """The best plan for the prompt as a chunked pipeline, None when none beats `alone`.

    scores_s: infinite for rows that are not candidates. Of every pipeline group the least busy instances are taken,
    two and more of them; the first reads the prefix. All groups are compared by their queues and one cost for each
    number of stages; only the best is priced in full.
    """
    if not rules.pipelines or not fleet.summary.any_pipeline or alone.compute_s < rules.pipeline_worth_s:
        return None
    rows: Ints = np.flatnonzero((scores_s < np.inf) & (fleet.pipeline >= 0))
    if len(rows) < 2:
        return None
    rows = rows[np.lexsort((fleet.queue_s[rows], fleet.pipeline[rows]))]
    groups, queue_s, prompts = fleet.pipeline[rows], fleet.queue_s[rows], fleet.queue_prompts[rows]
    begins = np.flatnonzero(np.concatenate(([True], groups[1:] != groups[:-1])))
    sizes = np.diff(np.concatenate((begins, [len(rows)])))
    prefix = max((source.tokens for source in request.sources), default=0)
    cost = PrefillCost(*(float(np.median(column[rows])) for column in _costs(fleet)))
    best: tuple[float, tuple[int, ...]] = (alone.score_s, ())
    for stages in range(2, int(sizes.max()) + 1):
        heads = begins[sizes >= stages]
        waits_s = queue_s[heads + stages - 1]  # sorted: the longest queue among the first `stages`
        at = int(np.argmin(waits_s))
        plan = pipeline.best(cost, request.prompt_tokens, prefix, stages)
        members = slice(heads[at], heads[at] + stages)
        score_s = _together_s(plan.seconds, queue_s[members], prompts[members], alone.ready_s, rules)
        if score_s < best[0]:
            best = score_s, tuple(int(row) for row in rows[heads[at] : heads[at] + stages])
    if not best[1]:
        return None
    option = _pipelined(request, fleet, rules, best[1])
    return option if option.score_s < alone.score_s else None


def _together_s(
    compute_s: float, queue_s: Floats, queue_prompts: Ints, ready_s: float, rules: Rules
) -> float:
    """The score of a pipeline: all its members are taken, from when each is free until the end.

    A member that is free before the others waits for them: that time is lost to other prompts too.
    """
    begin_s = max(float(queue_s.max()), ready_s)
    taken_s = begin_s + compute_s - queue_s
    return (
        begin_s + compute_s + float(np.dot(rules.work_weight + rules.queue_weight * queue_prompts, taken_s))
    )


def _pipelined(request: Request, fleet: Fleet, rules: Rules, members: tuple[int, ...]) -> PrefillOption:
    n, first = request.prompt_tokens, members[0]
    queue_s = max(float(fleet.queue_s[row]) for row in members)
    # The slowest stage sets the pace.
    cost = PrefillCost(
        *(max(float(column[row]) for row in members) for column in _costs(fleet)),
    )
    have = min(int(request.local[row]) for row in members)
    source: PrefixSource | None = None
    if bool(fleet.pool[first]) and int(fleet.group[first]) == request.group:
        longer = [s for s in request.sources if s.tokens > have]
        source = max(longer, key=lambda s: (s.tokens, s.tokens_per_s), default=None)
    prefix = source.tokens if source is not None else have
    fetch = prefix - have
    # Each stage reads only its own layers, so the group's links are used together.
    ready_s = fetch_row_s(fleet, first, source, fetch) if source is not None else 0.0
    plan = pipeline.best(cost, n, prefix, len(members))
    total_s = max(queue_s, ready_s) + plan.seconds
    rows = np.array(members)
    return PrefillOption(
        Branch.FETCH if fetch else Branch.LOCAL,
        prefix,
        fetch,
        source.row if source is not None else NO_ROW,
        ready_s,
        plan.seconds,
        total_s,
        _together_s(plan.seconds, fleet.queue_s[rows], fleet.queue_prompts[rows], ready_s, rules),
        members=members,
        chunk_tokens=plan.chunk_tokens,
    )


def _costs(fleet: Fleet) -> tuple[Floats, Floats, Floats, Floats]:
    return fleet.prefill_a, fleet.prefill_b, fleet.prefill_c, fleet.prefill_d
