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
           instance could not keep either is not a reason to refuse, unless the caller made it: waiting would not help.
           Who would wait leaves room to cheaper requests when those alone need more than there is (`crowding`)

When a prompt is computed, the paper's modes look at its decode instance again (`PAPERS`, the double check) and refuse
it there. With `learned` the decode instance holds it back instead while steps would be longer than
promised (`holds`): the excess is little, its time was counted at arrival, and the prompt's work is not wasted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mooncache.conductor.core.policy.common import clamp_retry, headroom
from mooncache.conductor.core.policy.crowding import room_for_cheaper_s
from mooncache.conductor.core.policy.fleet import BOTH, DECODE, Fleet
from mooncache.conductor.core.policy.types import AdmissionMode, Choice, Floats, Reason, Request, Rules

PAPERS = frozenset(AdmissionMode) - {AdmissionMode.NONE, AdmissionMode.LEARNED}
_SHARE_MAX = 4.0


def holds(rules: Rules) -> bool:
    """True when decode instances hold newcomers while steps would exceed the TBT limit."""
    return rules.holds and rules.admission is AdmissionMode.LEARNED


def judged(request: Request, fleet: Fleet, rules: Rules, choice: Choice) -> Choice:
    """The choice, refused when the mode of admission says so."""
    mode = rules.admission
    if mode is AdmissionMode.NONE:
        return choice
    if mode is AdmissionMode.LEARNED:
        return _learned(request, fleet, rules, choice)
    if choice.ttft_s > request.ttft_slo_s:
        retry_s = clamp_retry(choice.ttft_s - request.ttft_slo_s, rules)
        return _refused(choice, Reason.TTFT, retry_s, request.ttft_slo_s)
    if mode is AdmissionMode.TTFT_TBT:
        late = choice.tbt_s > request.tbt_slo_s
    elif mode is AdmissionMode.EARLY:
        late = decode_load(fleet, fleet.batch_sequences, fleet.batch_kv_tokens, request) > 1
    elif mode is AdmissionMode.PREDICTED:
        late = decode_load(fleet, *fleet.decode_at(choice.ttft_s), request) > 1
    else:
        late = False  # looked at when the prompt is computed
    return _refused(choice, Reason.TBT, _place_free_s(fleet, choice, rules)) if late else choice


def decode_load(fleet: Fleet, sequences: Floats, kv_tokens: Floats, request: Request) -> float:
    """The mean over decode instances of the time between tokens with the request, over the promise."""
    mask = fleet.ready & ((fleet.role == DECODE) | (fleet.role == BOTH))
    if not mask.any():
        return 0.0
    tbt_s = fleet.tbt_s(sequences + request.sequences, kv_tokens + request.prompt_tokens)
    return float(np.mean(tbt_s[mask])) / request.tbt_slo_s


def _learned(request: Request, fleet: Fleet, rules: Rules, choice: Choice) -> Choice:
    factor = headroom(request.priority, rules) / min(_SHARE_MAX, max(1.0, request.tenant_share))
    waiting_s = choice.waiting_s
    # Nothing is later than predicted where nothing is waited for.
    if waiting_s > 0 or request.ttft_strict:
        limit_s = _ttft_limit_s(request, fleet, rules, choice, factor)
        if choice.ttft_s > limit_s:
            reason = Reason.CAPACITY if choice.wait_s > choice.queue_s else Reason.TTFT
            retry_s = clamp_retry(min(choice.ttft_s - limit_s, waiting_s), rules)
            return _refused(choice, reason, retry_s, limit_s)
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
        return _refused(choice, Reason.TBT, _place_free_s(fleet, choice, rules))
    return choice


def _ttft_limit_s(request: Request, fleet: Fleet, rules: Rules, choice: Choice, factor: float) -> float:
    """The predicted TTFT up to which a request is taken."""
    limit_s = request.ttft_slo_s * factor
    alone_s = max(0.0, choice.ttft_s - choice.waiting_s)
    if not request.ttft_strict:
        limit_s = max(limit_s, rules.patience * alone_s)
    if choice.waiting_s <= 0:
        return limit_s
    # Where nothing is left for waiting, what does not wait is still taken.
    limit_s -= room_for_cheaper_s(request, fleet, choice)
    return max(alone_s, limit_s / (1.0 + request.lateness))


def _refused(choice: Choice, reason: Reason, retry_s: float, ttft_limit_s: float = 0.0) -> Choice:
    return replace(choice, admitted=False, reason=reason, retry_after_s=retry_s, ttft_limit_s=ttft_limit_s)


def _place_free_s(fleet: Fleet, choice: Choice, rules: Rules) -> float:
    """One place in the batch becomes free every stay / sequences."""
    row = choice.decode
    return clamp_retry(float(fleet.stay_s[row]) / max(1.0, float(fleet.sequences[row])), rules)
