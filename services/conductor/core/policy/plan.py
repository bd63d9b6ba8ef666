"""The whole decision: candidates in, one choice out.

Per passport group the cheapest prefill candidate is paired with the best decode candidate; computing the
prompt on a decode instance itself is one more candidate, without hand-over but with the delay that it causes
to the sequences running there. Whatever ends first is taken, then admission is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mooncache.conductor.core.policy import admission, decode, prefill
from mooncache.conductor.core.policy.facts import (
    ROLE_BOTH,
    ROLE_DECODE,
    ROLE_PREFILL,
    Choice,
    DecodeOption,
    InstanceFacts,
    PrefillOption,
    Request,
    Rules,
)

if TYPE_CHECKING:
    import random


def choose(request: Request, instances: Sequence[InstanceFacts], rules: Rules, rng: random.Random) -> Choice:
    """Decide. `rng` breaks ties only."""
    usable = [facts for facts in instances if facts.ready and facts.instance_id not in request.exclude]
    decoders = [facts for facts in usable if facts.role in (ROLE_DECODE, ROLE_BOTH)]
    prefillers = [facts for facts in usable if facts.role == ROLE_PREFILL and facts.pool]
    if request.no_prefill or not decoders:
        prefillers = []
    # Better a wrong role than no answer: any engine can do both.
    decoders = decoders or usable
    if request.keep_decode:
        decoders = [f for f in decoders if f.instance_id == request.keep_decode] or decoders
    if not decoders:
        return Choice(False, "no_instance", retry_after_s=1.0)
    options = [prefill.price(request, facts) for facts in prefillers]
    pairs = _pairs(request, options, decoders, rng)
    inlines = _inlines(request, decoders, rules, paired=bool(pairs))
    best_pair = min(pairs, key=lambda pair: pair[2], default=None)
    best_inline = _pick_inline(request, inlines, rng)
    if best_inline is not None and (best_pair is None or best_inline[2] <= best_pair[2]):
        option, generator, _ = best_inline
        chosen_prefill, inline = None, option
        first_s = option.best.total_s + generator.wait_s
    else:
        assert best_pair is not None, "without pairs every decoder is an inline candidate"
        option, generator, _ = best_pair
        chosen_prefill, inline = option, None
        first_s = option.best.total_s + generator.wait_s + generator.handover_s
    queue_s = option.best.total_s - option.best.compute_s
    if option.best.kind != "wait":
        queue_s = min(queue_s, option.facts.queue_s)
    reason, retry_s = admission.refusal(request, rules, first_s, queue_s, generator)
    return Choice(
        admitted=not reason,
        reason=reason or "admitted",
        prefill=chosen_prefill,
        decode=generator,
        inline=inline,
        ttft_s=first_s,
        queue_s=queue_s,
        retry_after_s=retry_s,
        prefill_options=tuple(options),
        decode_options=tuple(pair[1] for pair in pairs) or tuple(item[1] for item in inlines),
        inline_options=tuple(item[0] for item in inlines),
    )


Scored = tuple[PrefillOption, DecodeOption, float]


def _pairs(
    request: Request, options: list[PrefillOption], decoders: list[InstanceFacts], rng: random.Random
) -> list[Scored]:
    """Return (prefill, decode, time to the end) of every decode candidate with its group's cheapest
    prefill."""
    pairs: list[Scored] = []
    for group in sorted({option.facts.group for option in options}):
        lowest = prefill.cheapest([option for option in options if option.facts.group == group])
        at_s = lowest[0].best.total_s
        priced = [
            decode.price(request, facts, at_s, inline=False)
            for facts in decoders
            if facts.group == group and facts.pool
        ]
        best = decode.cheapest(request, priced)
        if not best:
            continue
        first = best[rng.randrange(len(best))] if len(best) > 1 else best[0]
        giver = lowest[rng.randrange(len(lowest))] if len(lowest) > 1 else lowest[0]
        # The winner first: `min` keeps the first of equals, and the others stay in the record.
        before_s = giver.best.score_s
        rest = [(giver, option, before_s + option.score_s + _late(request, option)) for option in priced]
        pairs.append((giver, first, before_s + first.score_s + _late(request, first)))
        pairs += [pair for pair in rest if pair[1] is not first]
    return pairs


def _inlines(request: Request, decoders: list[InstanceFacts], rules: Rules, *, paired: bool) -> list[Scored]:
    """Return (branches, decode, time to the end) of decode candidates that may compute the prompt themselves.

    While prefill instances are there a decode instance only takes what is short (arXiv, section 3: inlined
    when it needs no chunking and breaks no TBT).
    """
    found: list[Scored] = []
    for facts in decoders:
        option = prefill.price(request, facts)
        left = request.prompt_tokens - option.best.prefix_tokens
        if paired and facts.role != ROLE_BOTH and left > rules.inline_tokens_max:
            continue
        generator = decode.price(request, facts, option.best.total_s, inline=True)
        stalls = facts.sequences > 0 and option.best.compute_s + generator.tbt_s > request.tbt_slo_s
        if paired and stalls:
            continue
        delay_s = option.best.compute_s * facts.sequences  # what the sequences running there lose together
        score_s = option.best.score_s + generator.score_s + delay_s + _late(request, generator)
        found.append((option, generator, score_s))
    return found


def _pick_inline(request: Request, inlines: list[Scored], rng: random.Random) -> Scored | None:
    if not inlines:
        return None
    low = min(item[2] for item in inlines)
    equal = [item for item in inlines if item[2] <= low * (1 + 1e-9) + 1e-12]
    return equal[rng.randrange(len(equal))] if len(equal) > 1 else equal[0]


def _late(request: Request, option: DecodeOption) -> float:
    """Return a penalty that puts candidates beyond the TBT promise behind all others."""
    return 1e6 if option.tbt_s > request.tbt_slo_s else 0.0
