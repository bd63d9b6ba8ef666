"""Bodies of the two legs of a request, made from the client's body and the conductor's plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from mooncache.gateway.core.body import INTERNAL, INTERNAL_PREFIX, Inquiry
from mooncache.kvcache.params import FIELD, Ask


def decode_body(inquiry: Inquiry, salt: str, ask: Ask) -> bytes:
    """The client's body for the engine that generates: internal fields replaced, all others as they came."""
    fields = {
        name: value
        for name, value in inquiry.raw.items()
        if name not in INTERNAL and not name.startswith(INTERNAL_PREFIX)
    }
    fields["cache_salt"] = _raw(salt)
    fields[FIELD] = _raw(ask.to_params())
    if inquiry.stream and not inquiry.wants_usage:
        # Counted for the tenant and for metrics; the client does not see it.
        options = inquiry.body.get("stream_options") or {}
        fields["stream_options"] = _raw({**options, "include_usage": True, "continuous_usage_stats": False})
    elif not inquiry.stream:
        fields.pop("stream_options", None)  # engines refuse it without a stream
    return msgspec.json.encode(fields)


def prefill_body(model: str, prompts: Sequence[Any], salt: str, ask: Ask) -> bytes:
    """The prompt alone, as tokens, for the engine that only fills the pool: one token is generated and thrown away.

    Everything else of the client's request (sampling, stop words, tools) is about tokens that this leg never makes.
    """
    lists = [tokens.tolist() if hasattr(tokens, "tolist") else list(tokens) for tokens in prompts]
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": lists[0] if len(lists) == 1 else lists,
            "max_tokens": 1,
            "temperature": 0,
            "stream": False,
            "cache_salt": salt,
            FIELD: ask.to_params(),
        }
    )


def complete_tokens(prompts: Sequence[Any], block_tokens: int) -> int:
    """Tokens of complete blocks of the longest prompt: what a decode leg may wait for."""
    if block_tokens < 1:
        return 0
    return max((len(tokens) // block_tokens * block_tokens for tokens in prompts), default=0)


def _raw(value: Any) -> Raw:
    return Raw(msgspec.json.encode(value))
