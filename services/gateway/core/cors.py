"""Cross-origin headers: which browsers' pages may call, by configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_EXPOSED = "x-request-id, x-mooncache-decision, x-mooncache-plan, retry-after"
_MAX_AGE_S = "600"


def cors_headers(headers: Mapping[str, str], origins: Sequence[str]) -> dict[str, str]:
    """Headers to add to the answer for a request with these headers; empty for origins that are not allowed."""
    origin = headers.get("origin", "")
    if not origin or not origins:
        return {}
    every = "*" in origins
    if not every and origin not in origins:
        return {"vary": "origin"}
    found = {
        "access-control-allow-origin": "*" if every else origin,
        "access-control-expose-headers": _EXPOSED,
    }
    if not every:
        found["vary"] = "origin"
    if "access-control-request-method" in headers:
        found["access-control-allow-methods"] = "GET, HEAD, POST, OPTIONS"
        # Clients send many headers of their own; keys never travel in cookies, so none of them is dangerous.
        found["access-control-allow-headers"] = _header_names(
            headers.get("access-control-request-headers", "")
        )
        found["access-control-max-age"] = _MAX_AGE_S
    return found


def _header_names(text: str) -> str:
    """The asked names when they are header names, otherwise the usual ones."""
    harmless = len(text) <= 2048 and all(c.isalnum() or c in "-_, " for c in text)
    return text if text and harmless else "authorization, content-type"
