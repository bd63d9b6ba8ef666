"""Token counts of one request, from one leg or from two.

With a prefill leg the prompt was looked up and computed there: the decode leg finds nearly all of it in the cache,
which is no saving of the client's. So `cached_tokens` is what the prefill leg found, and the prefill leg's own output
token never shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mooncache.kvcache.leg_hint import CacheReport


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one request; `cached_tokens` None: the engine did not say."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None


def read(usage: Any) -> TokenUsage:
    """From an engine's `usage` object; fields that are missing or invalid count as 0."""
    if not isinstance(usage, dict):
        return TokenUsage()
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return TokenUsage(
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        cached_tokens=_count(cached) if isinstance(cached, int) else None,
    )


def cached_of_leg(usage: TokenUsage | None, cache: CacheReport | None) -> int | None:
    """What one leg says about its cache: its usage when it has the number, otherwise its connector."""
    if usage is not None and usage.cached_tokens is not None:
        return usage.cached_tokens
    return cache.hit_tokens if cache is not None else None


def settle(own: int | None, prefill: int | None, planned: int | None) -> int | None:
    """The request's cached tokens.

    Args:
        own: what the decode leg found; that includes what a prefill leg computed for it a moment ago.
        prefill: what the prefill leg found, when it has said so.
        planned: while a prefill leg has not: what caches held when the request was planned. None: no such leg.
    """
    if prefill is not None:
        return prefill
    return min(own, planned) if own is not None and planned is not None else own


def merge(usage: dict[str, Any], cached_tokens: int | None) -> dict[str, Any]:
    """The client's `usage`: the decode leg's with `cached_tokens` put in; None leaves the leg's own number."""
    if cached_tokens is None:
        return usage
    details = usage.get("prompt_tokens_details")
    details = dict(details) if isinstance(details, dict) else {}
    details["cached_tokens"] = min(cached_tokens, _count(usage.get("prompt_tokens")))
    return {**usage, "prompt_tokens_details": details}


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
