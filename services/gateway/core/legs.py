"""Bodies of the two legs of a request, made from the client's body and the conductor's plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw

from mooncache.gateway.core.body import INTERNAL, INTERNAL_PREFIX, Content, InferenceRequest
from mooncache.kvcache.leg_hint import FIELD, LegHint

_SALT: Final = "cache_salt"


def forwarded(request: InferenceRequest, content: Content) -> bytes:
    """The client's fields as an engine gets them, a JSON object: internal ones dropped, all others as they came."""
    fields = {
        name: value
        for name, value in content.raw.items()
        if name not in INTERNAL and not name.startswith(INTERNAL_PREFIX) and name != _SALT
    }
    if request.stream and not request.wants_usage:
        # Counted for the tenant and for metrics; the client does not see it.
        options = content.fields.get("stream_options") or {}
        fields["stream_options"] = _raw({**options, "include_usage": True, "continuous_usage_stats": False})
    elif not request.stream:
        fields.pop("stream_options", None)  # engines refuse it without a stream
    return msgspec.json.encode(fields)


def decode_body(client_fields: bytes, salt: str, hint: LegHint) -> bytes:
    """What `forwarded` made, for the engine that generates: with the request's salt and what it asks of the cache."""
    ours = msgspec.json.encode({_SALT: salt, FIELD: hint.to_params()})
    return b"".join((memoryview(client_fields)[:-1], b",", ours[1:]))


def prompt_json(prompts: Sequence[Any]) -> bytes:
    """The field `prompt` of a prefill leg: token ids."""
    lists = [tokens.tolist() if hasattr(tokens, "tolist") else list(tokens) for tokens in prompts]
    return msgspec.json.encode(lists[0] if len(lists) == 1 else lists)


def prefill_body(model: str, prompt: bytes, salt: str, hint: LegHint) -> bytes:
    """The prompt alone, as tokens, for the engine that only fills the pool: one token is generated and thrown away.

    Everything else of the client's request (sampling, stop words, tools) is about tokens that this leg never makes.

    Args:
        prompt: what `prompt_json` made.
    """
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": Raw(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "stream": False,
            _SALT: salt,
            FIELD: hint.to_params(),
        }
    )


def complete_tokens(lengths: Sequence[int], block_tokens: int) -> int:
    """Tokens of complete blocks of the longest prompt: what a decode leg may wait for."""
    if block_tokens < 1:
        return 0
    return max((length // block_tokens * block_tokens for length in lengths), default=0)


def _raw(value: Any) -> Raw:
    return Raw(msgspec.json.encode(value))
