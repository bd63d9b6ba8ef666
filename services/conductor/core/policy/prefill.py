"""Prefill selection: what every candidate would cost, by every way it has of coming by the prefix.

Source: Mooncake (FAST'25), Algorithm 1, with two changes. Its balancing threshold is gone: both branches
(fetch the longer prefix, or compute what is missing) are priced and the cheaper is taken. A fetch overlaps
with queueing, so the cost is `max(queue, fetch) + prefill` instead of the sum. A third branch waits for
blocks that another request is computing.
"""

from __future__ import annotations

from mooncache.conductor.core.policy.facts import Branch, InstanceFacts, PrefillOption, Request

# Seconds of delay to the first token that one second of computing saved is worth: the time of an instance is
# what the next requests queue for. Without it, two equal prompts that arrive together would both be computed.
WORK_WEIGHT = 0.1


def price(request: Request, facts: InstanceFacts) -> PrefillOption:
    """Return the candidate with all its branches priced; equal costs prefer local to fetch to wait."""
    have, queue_s, n = facts.local_tokens, facts.queue_s, request.prompt_tokens
    compute_s = facts.prefill.seconds(n, have)
    total_s = queue_s + compute_s
    best = Branch("local", have, 0, 0.0, compute_s, total_s, total_s + WORK_WEIGHT * compute_s)
    branches = [best]
    shares = facts.pool and facts.group == request.group
    reach = have
    if shares and request.pool_tokens > have:
        reach = request.pool_tokens
        fetch = reach - have
        ready_s = facts.transfer.seconds(fetch)
        compute_s = facts.prefill.seconds(n, reach)
        total_s = (ready_s if ready_s > queue_s else queue_s) + compute_s
        score_s = total_s + WORK_WEIGHT * compute_s
        branches.append(Branch("fetch", reach, fetch, ready_s, compute_s, total_s, score_s))
        if score_s < best.score_s:
            best = branches[-1]
    for awaited in request.awaited:
        at_home = awaited.instance_id == facts.instance_id
        if awaited.tokens <= reach or not (at_home or (shares and awaited.pool)):
            continue
        # At home the blocks are in the engine's own cache; elsewhere they come through the pool.
        fetch = 0 if at_home else awaited.tokens - have
        ready_s = awaited.ready_in_s + facts.transfer.seconds(fetch)
        compute_s = facts.prefill.seconds(n, awaited.tokens)
        total_s = (ready_s if ready_s > queue_s else queue_s) + compute_s
        score_s = total_s + WORK_WEIGHT * compute_s
        branches.append(Branch("wait", awaited.tokens, fetch, ready_s, compute_s, total_s, score_s, awaited))
        if score_s < best.score_s:
            best = branches[-1]
    return PrefillOption(facts, tuple(branches), best)


def cheapest(options: list[PrefillOption]) -> list[PrefillOption]:
    """Return the candidates that share the lowest cost, for a tie to be broken among them."""
    if not options:
        return []
    low = min(option.best.score_s for option in options)
    bound = low * (1 + 1e-9) + 1e-12
    return [option for option in options if option.best.score_s <= bound]
