"""Overload: refuse at arrival what would miss its promise, and say when it is worth coming back.

Source: Mooncake (arXiv 2407.00079, section 7). Load is a share of the promise: predicted TTFT over its limit,
predicted time between tokens over its limit, the newcomer counted. The modes (Rules.admission):

none       no request is refused
ttft_tbt   Algorithm 1, line 23: the chosen pair would miss a promise
baseline   the prefill load at arrival; the decode load only when the prompt is computed, whose work is wasted then
early      both at arrival, the decode load as it is now: stale by the prefill's time, which makes load swing
predicted  both at arrival, the decode load predicted for the end of this prefill, every answer lasting equally long
learned    both at arrival for the chosen instances, with learnt answer lengths (they are in `Fleet.decode_at`) and
           what predictions of waiting were late by so far, priorities and fair shares; a promise that an idle
           instance could not keep either is not a reason to refuse, unless the caller made it: waiting would not help

When a prompt is computed, the paper's modes look at its decode instance again (`PAPERS`, the double check) and refuse
it there. With `learned` the decode instance holds it back instead while steps would be longer than
promised (`holds`): the excess is little, its time was counted at arrival, and the prompt's work is not wasted.
"""

from __future__ import annotations

import numpy as np

from mooncache.conductor.core.policy.common import clamp_retry, headroom
from mooncache.conductor.core.policy.fleet import BOTH, DECODE, Fleet
from mooncache.conductor.core.policy.types import AdmissionMode, Choice, Floats, Reason, Request, Rules

PAPERS = frozenset(AdmissionMode) - {AdmissionMode.NONE, AdmissionMode.LEARNED}
_SHARE_MAX = 4.0


def holds(rules: Rules) -> bool:
    """True when decode instances hold newcomers while steps would exceed the TBT limit."""
    return rules.holds and rules.admission is AdmissionMode.LEARNED


def judged(request: Request, fleet: Fleet, rules: Rules, choice: Choice) -> tuple[Reason | None, float]:
    """(reason, seconds of Retry-After); the reason is None for an admitted request."""
    mode = rules.admission
    if mode is AdmissionMode.NONE:
        return None, 0.0
    if mode is AdmissionMode.LEARNED:
        return _learned(request, fleet, rules, choice)
    if choice.ttft_s > request.ttft_slo_s:
        return Reason.TTFT, clamp_retry(choice.ttft_s - request.ttft_slo_s, rules)
    if mode is AdmissionMode.TTFT_TBT and choice.tbt_s > request.tbt_slo_s:
        return Reason.TBT, _place_free_s(fleet, choice, rules)
    if (
        mode is AdmissionMode.EARLY
        and decode_load(fleet, fleet.batch_sequences, fleet.batch_kv_tokens, request) > 1
    ):
        return Reason.TBT, _place_free_s(fleet, choice, rules)
    if mode is AdmissionMode.PREDICTED:
        sequences, kv_tokens = fleet.decode_at(choice.ttft_s)
        if decode_load(fleet, sequences, kv_tokens, request) > 1:
            return Reason.TBT, _place_free_s(fleet, choice, rules)
    return None, 0.0


def decode_load(fleet: Fleet, sequences: Floats, kv_tokens: Floats, request: Request) -> float:
    """The mean over decode instances of the time between tokens with the request, over the promise."""
    mask = fleet.ready & ((fleet.role == DECODE) | (fleet.role == BOTH))
    if not mask.any():
        return 0.0
    tbt_s = fleet.tbt_s(sequences + request.sequences, kv_tokens + request.prompt_tokens)
    return float(np.mean(tbt_s[mask])) / request.tbt_slo_s


def _learned(request: Request, fleet: Fleet, rules: Rules, choice: Choice) -> tuple[Reason | None, float]:
    factor = headroom(request.priority, rules) / min(_SHARE_MAX, max(1.0, request.tenant_share))
    ttft_limit_s = request.ttft_slo_s * factor
    waiting_s = choice.waiting_s
    # Nothing is later than predicted where nothing is waited for.
    ttft_s = choice.ttft_s * (1 + request.lateness) if waiting_s > 0 else choice.ttft_s
    if not request.ttft_strict:
        ttft_limit_s = max(ttft_limit_s, rules.patience * max(0.0, choice.ttft_s - waiting_s))
    if ttft_s > ttft_limit_s and (waiting_s > 0 or request.ttft_strict):
        reason = Reason.CAPACITY if choice.wait_s > choice.queue_s else Reason.TTFT
        return reason, clamp_retry(min(ttft_s - ttft_limit_s, waiting_s), rules)
    tbt_limit_s = request.tbt_slo_s * factor
    row = choice.decode
    if not request.tbt_strict:
        alone_s = (
            fleet.decode_base_s[row]
            + fleet.decode_per_sequence_s[row] * request.sequences
            + fleet.decode_per_token_s[row] * request.kv_tokens
        )
        tbt_limit_s = max(tbt_limit_s, rules.patience * float(alone_s))
    if choice.tbt_s > tbt_limit_s and (fleet.sequences[row] > 0 or request.tbt_strict):
        return Reason.TBT, _place_free_s(fleet, choice, rules)
    return None, 0.0


def _place_free_s(fleet: Fleet, choice: Choice, rules: Rules) -> float:
    """One place in the batch becomes free every stay / sequences."""
    row = choice.decode
    return clamp_retry(float(fleet.stay_s[row]) / max(1.0, float(fleet.sequences[row])), rules)
