"""What is read of vLLM's own objects: of a request, and of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mooncache.connectors.vllm.core.refusals import Uncached
from mooncache.kvcache.core.break_even import STEP_TOKENS_MIN


def why_uncached(request: Any) -> Uncached:
    """Why a request's tokens do not say what its KV is."""
    if getattr(request, "prompt_embeds", None) is not None or request.prompt_token_ids is None:
        return Uncached.PROMPT_EMBEDS
    if getattr(request, "pooling_params", None) is not None:
        return Uncached.POOLING
    if getattr(request, "resumable", False):
        return Uncached.STREAMING_INPUT
    return Uncached.NO


def completed(request: Any) -> bool:
    """True when the request ended by itself: only then all of its tokens were computed as they stand."""
    status = getattr(request.status, "name", "")
    return status in {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"}


def computed_after(output: Any) -> list[tuple[str, int]]:
    """(request, tokens whose KV is there once the step is over) of all that run in it."""
    scheduled = output.num_scheduled_tokens
    found = [
        (new.req_id, new.num_computed_tokens + scheduled.get(new.req_id, 0))
        for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    found += [
        (name, computed + scheduled.get(name, 0))
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    ]
    return found


def prompt_tokens(output: Any, requests: Mapping[str, Any]) -> int:
    """Prompt tokens that a step computes; 0 when they are too few to measure, without looking at each request."""
    scheduled = output.num_scheduled_tokens
    if output.total_num_scheduled_tokens - len(scheduled) < STEP_TOKENS_MIN - 1:
        return 0
    tokens = 0
    for name, computed in computed_after(output):
        request = requests.get(name)
        if request is not None:
            end = min(computed, request.num_prompt_tokens)
            tokens += max(0, end - (computed - scheduled.get(name, 0)))
    return tokens
