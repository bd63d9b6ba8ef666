"""Which endpoint answers at which path."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import Route, Router

from mooncache.gateway.shell.exchange import App, Receive, Scope, Send

_ENDS = ("", "/")  # not every client follows a redirect


class Paths:
    """An ASGI application of endpoints by their paths, each with and without a slash at its end.

    Nearly all requests are for a fixed path, which is found at once. Starlette matches the paths with names in them.

    Args:
        unknown: answers at every other path.
    """

    def __init__(self, endpoints: Sequence[tuple[str, App]], unknown: App) -> None:
        self._fixed = {
            path + end: endpoint for path, endpoint in endpoints if "{" not in path for end in _ENDS
        }
        named = [(path, endpoint) for path, endpoint in endpoints if "{" in path]
        routes = [
            Route(path + end, endpoint)
            for path, endpoint in named
            for end in _ENDS
            if not (end and path.endswith(":path}"))  # which takes the slash as well
        ]
        self._named = Router(routes, redirect_slashes=False, default=unknown)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._fixed.get(scope["path"], self._named)(scope, receive, send)
