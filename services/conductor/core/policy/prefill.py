"""Prefill selection: what every candidate would cost, by every way it has of coming by the prefix.

Source: Mooncake (FAST'25), Algorithm 1, with two changes. Its balancing threshold is gone: both branches
(fetch the longer prefix, or compute what is missing) are priced and the cheaper is taken. A fetch overlaps
with queueing, so the cost is `max(queue, fetch) + prefill` instead of the sum. A third branch waits for
blocks that another request is computing.
"""

from __future__ import annotations

from mooncache.conductor.core.policy.types import Awaited, Branch, InstanceFacts, PrefillOption, Request


def price(request: Request, facts: InstanceFacts) -> PrefillOption:
    """Return the candidate with all its branches priced; equal costs prefer local to fetch to wait."""
    branches = [_branch(request, facts, "local", facts.local_tokens, 0, 0.0, None)]
    shares = facts.pool and facts.group == request.group
    have = facts.local_tokens
    if shares and request.pool_tokens > have:
        fetch = request.pool_tokens - have
        ready_s = facts.transfer.seconds(fetch)
        branches.append(_branch(request, facts, "fetch", request.pool_tokens, fetch, ready_s, None))
    reach = max(have, request.pool_tokens if shares else 0)
    for awaited in request.awaited:
        at_home = awaited.instance_id == facts.instance_id
        if awaited.tokens <= reach or not (at_home or (shares and awaited.pool)):
            continue
        # At home the blocks are in the engine's own cache; elsewhere they come through the pool.
        fetch = 0 if at_home else awaited.tokens - have
        ready_s = awaited.ready_in_s + facts.transfer.seconds(fetch)
        branches.append(_branch(request, facts, "wait", awaited.tokens, fetch, ready_s, awaited))
    return PrefillOption(facts, tuple(branches), min(branches, key=_total))


def cheapest(options: list[PrefillOption]) -> list[PrefillOption]:
    """Return the candidates that share the lowest cost, for a tie to be broken among them."""
    if not options:
        return []
    low = min(option.best.total_s for option in options)
    bound = low * (1 + 1e-9) + 1e-12
    return [option for option in options if option.best.total_s <= bound]


def _branch(
    request: Request,
    facts: InstanceFacts,
    kind: str,
    prefix: int,
    fetch: int,
    ready_s: float,
    awaited: Awaited | None,
) -> Branch:
    compute_s = facts.prefill.seconds(request.prompt_tokens, prefix)
    total_s = max(facts.queue_s, ready_s) + compute_s
    return Branch(kind, prefix, fetch, ready_s, compute_s, total_s, awaited)


def _total(branch: Branch) -> float:
    return branch.total_s
