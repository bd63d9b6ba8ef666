"""What is read of vLLM's own object of a request."""

from __future__ import annotations

from typing import Any

from mooncache.connectors.vllm.core.request import Uncached


def why_uncached(request: Any) -> Uncached:
    """Why a request's tokens do not say what its KV is."""
    if getattr(request, "mm_features", None):
        return Uncached.MULTIMODAL
    if getattr(request, "prompt_embeds", None) is not None or request.prompt_token_ids is None:
        return Uncached.PROMPT_EMBEDS
    if getattr(request, "lora_request", None) is not None:
        return Uncached.LORA
    if getattr(request, "pooling_params", None) is not None:
        return Uncached.POOLING
    if getattr(request, "resumable", False):
        return Uncached.STREAMING_INPUT
    return Uncached.NO


def completed(request: Any) -> bool:
    """True when the request ended by itself: only then all of its tokens were computed as they stand."""
    status = getattr(request.status, "name", "")
    return status in {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"}
