"""Admission: refuse at arrival what would miss its promise, and say when it is worth coming back.

Source: Mooncake (arXiv 2407.00079, section 7), early rejection with prediction: a request is judged by the
TTFT and TBT predicted for the moment it reaches decode, not by the load now, so that no prefill is wasted and
load does not oscillate. A promise that an idle instance could not keep either is no reason to refuse, unless
the caller made it: waiting would not help. So on a slow machine the limit is a multiple of what an idle
instance would do; otherwise long prompts would be refused for as long as anybody else is served.
"""

from __future__ import annotations

from mooncache.conductor.core.policy.facts import DecodeOption, Request, Rules

PATIENCE = 2.0
PRIORITY_STEP = 0.25
PRIORITY_MIN, PRIORITY_MAX = 0.5, 2.0


def headroom(priority: int) -> float:
    """Return the factor on the limits: more important requests are still taken when others are refused
    already."""
    return min(PRIORITY_MAX, max(PRIORITY_MIN, 1.0 + PRIORITY_STEP * priority))


def refusal(
    request: Request, rules: Rules, ttft_s: float, queue_s: float, decode: DecodeOption
) -> tuple[str, float]:
    """Return (reason, seconds to wait), or ("", 0.0) when the request is to be taken.

    ttft_s: predicted time to the first token, queue_s of it waiting for others.
    """
    if not rules.admission:
        return "", 0.0
    factor = headroom(request.priority)
    ttft_limit_s = request.ttft_slo_s * factor
    if not request.ttft_strict:
        ttft_limit_s = max(ttft_limit_s, PATIENCE * max(0.0, ttft_s - queue_s - decode.wait_s))
    if ttft_s > ttft_limit_s and (queue_s + decode.wait_s > 0 or request.ttft_strict):
        reason = "capacity" if decode.wait_s > queue_s else "ttft"
        return reason, _clamp(min(ttft_s - ttft_limit_s, queue_s + decode.wait_s), rules)
    tbt_limit_s = request.tbt_slo_s * factor
    if not request.tbt_strict:
        kv_tokens = request.prompt_tokens + request.sequences * request.output_tokens
        tbt_limit_s = max(tbt_limit_s, PATIENCE * decode.facts.decode.tbt_s(request.sequences, kv_tokens))
    if decode.tbt_s > tbt_limit_s and (decode.facts.sequences > 0 or request.tbt_strict):
        # One place in the batch becomes free every turnover / sequences.
        return "tbt", _clamp(decode.facts.turnover_s / max(1.0, decode.facts.sequences), rules)
    return "", 0.0


def _clamp(seconds: float, rules: Rules) -> float:
    return min(rules.retry_after_max_s, max(rules.retry_after_min_s, seconds))
