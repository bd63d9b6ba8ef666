"""Where a subscriber of cache events has to connect, and where it has to bind.

vLLM's publisher binds wildcard and ipc endpoints and connects to all others; its replay socket always binds.
"""

from __future__ import annotations


def subscriber(endpoint: str, host: str) -> tuple[bool, str]:
    """(bind, endpoint) for the events of a publisher that runs on `host`."""
    if endpoint.startswith("ipc://"):
        return False, endpoint
    if "*" in endpoint or "::" in endpoint:
        return False, reachable(endpoint, host)
    return True, endpoint


def reachable(endpoint: str, host: str) -> str:
    """A bound endpoint as others connect to it."""
    if endpoint.startswith("ipc://"):
        return endpoint
    scheme, _, rest = endpoint.partition("://")
    name, _, port = rest.rpartition(":")
    return f"{scheme}://{host if name in ('*', '::', '[::]', '0.0.0.0') else name}:{port}"  # noqa: S104
