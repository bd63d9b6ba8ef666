"""Each endpoint answers at its path, with and without a slash, and at no other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mooncache.gateway.shell.exchange import Receive, Scope, Send
from mooncache.gateway.shell.paths import Paths

PATHS = ("/health", "/v1/files", "/v1/files/{file_id}", "/v1/models", "/v1/models/{model:path}")


class Anything:
    """As an endpoint is: an object that is an ASGI application."""

    def __init__(self, serve: Any) -> None:
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, receive, send)


def answer_of(path: str) -> tuple[str, dict[str, Any]]:
    """The endpoint that answers there, by its own path, and the names found in the path."""
    found: list[tuple[str, dict[str, Any]]] = []

    def endpoint(name: str) -> Any:
        async def serve(scope: Scope, _receive: Receive, _send: Send) -> None:
            found.append((name, dict(scope.get("path_params", {}))))

        return Anything(serve)

    paths = Paths([(each, endpoint(each)) for each in PATHS], endpoint("unknown"))

    async def never(*_: Any) -> Any:
        raise AssertionError

    scope = {"type": "http", "method": "DELETE", "path": path, "root_path": "", "headers": []}
    asyncio.run(paths(scope, never, never))
    (one,) = found
    return one


@pytest.mark.parametrize(
    ("path", "name", "params"),
    [
        ("/health", "/health", {}),
        ("/health/", "/health", {}),
        ("/v1/files/", "/v1/files", {}),
        ("/v1/files/f-1", "/v1/files/{file_id}", {"file_id": "f-1"}),
        ("/v1/files/f-1/", "/v1/files/{file_id}", {"file_id": "f-1"}),
        ("/v1/models/", "/v1/models", {}),
        ("/v1/models/org/name/", "/v1/models/{model:path}", {"model": "org/name/"}),
        ("/v1/files/f-1/more", "unknown", {}),
        ("/v1/files/{file_id}", "/v1/files/{file_id}", {"file_id": "{file_id}"}),
        ("/health//", "unknown", {}),
        ("", "unknown", {}),
        ("/", "unknown", {}),
    ],
)
def test_a_path_leads_to_its_endpoint(path: str, name: str, params: dict[str, str]) -> None:
    assert answer_of(path) == (name, params)
