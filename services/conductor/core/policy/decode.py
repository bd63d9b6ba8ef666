"""Decode selection: who generates soonest and fastest at the moment the prompt's KV is there.

Source: Mooncake (arXiv 2407.00079, section 7): the load that counts is the one when the prefill ends,
predicted at system level: every sequence stays for a turnover time, ages are spread evenly, so a share `t /
turnover` has left after t. The score is the time to the end of the answer: hand-over, waiting for a place,
and every expected token at the predicted TBT.
"""

from __future__ import annotations

from mooncache.conductor.core.policy.facts import DecodeOption, InstanceFacts, Request


def price(request: Request, facts: InstanceFacts, at_s: float, *, inline: bool) -> DecodeOption:
    """Return the candidate priced for `at_s` seconds from now.

    inline: the instance computes the prompt itself, so that nothing is handed over.
    """
    turnover_s = max(facts.turnover_s, 1e-3)
    staying = max(0.0, 1.0 - at_s / turnover_s)
    sequences = facts.sequences * staying + request.sequences
    needed = request.prompt_tokens + request.sequences * request.output_tokens
    kv_tokens = facts.kv_used_tokens * staying + needed
    wait_s = 0.0
    if facts.sequences_max and sequences > facts.sequences_max and facts.sequences:
        excess = min(sequences - facts.sequences_max, facts.sequences)
        wait_s = excess / facts.sequences * turnover_s
    if facts.kv_capacity_tokens and kv_tokens > facts.kv_capacity_tokens and facts.kv_used_tokens > 0:
        excess = kv_tokens - facts.kv_capacity_tokens
        wait_s = max(wait_s, excess / facts.kv_used_tokens * turnover_s)
    tbt_s = facts.decode.tbt_s(sequences, kv_tokens)
    handover_s = 0.0 if inline else handover(request, facts)
    score_s = wait_s + handover_s + request.output_tokens * tbt_s
    return DecodeOption(facts, tbt_s, wait_s, handover_s, score_s)


def handover(request: Request, facts: InstanceFacts) -> float:
    """Return the time from the end of the prefill to the first token: load what is not there yet, compute the
    rest."""
    load_s = facts.transfer.seconds(request.cacheable_tokens - facts.local_tokens)
    prefix = max(request.cacheable_tokens, facts.local_tokens)
    return load_s + facts.prefill.seconds(request.prompt_tokens, prefix)


def cheapest(request: Request, options: list[DecodeOption]) -> list[DecodeOption]:
    """Return the best candidates: those within the TBT promise first, then by score; several when they are
    equal."""
    if not options:
        return []
    kept = [option for option in options if option.tbt_s <= request.tbt_slo_s] or options
    low = min(option.score_s for option in kept)
    bound = low * (1 + 1e-9) + 1e-12
    return [option for option in kept if option.score_s <= bound]
