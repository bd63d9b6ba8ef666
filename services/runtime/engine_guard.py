"""The guard of an engine's port: whatever the path, nothing is answered without the engine's key.

Idea: engines grow routes with every version, and a list of guarded paths is behind from the first day. So the guard
stands in front of the whole application and knows no path at all. `EngineGuard` is ASGI middleware: vLLM takes it as
`--middleware mooncache.runtime.engine_guard.EngineGuard` and hands it nothing, so its key comes from the environment.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

from mooncache.errors import ConfigInvalid

KEY_VARIABLE: Final = "VLLM_API_KEY"
_MESSAGE: Final = "The key is missing or wrong; send it as Authorization: Bearer."
_BODY: Final = json.dumps(
    {"error": {"message": _MESSAGE, "type": "AuthenticationError", "param": None, "code": 401}}
).encode()
_HEADERS: Final = [
    (b"content-type", b"application/json"),
    (b"content-length", str(len(_BODY)).encode()),
    (b"www-authenticate", b"Bearer"),
    (b"connection", b"close"),  # the body was not read
]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class EngineGuard:
    """ASGI middleware: requests and websockets without the engine's key get 401, on every path.

    Raises:
        ConfigInvalid: there is no key. An engine that would let every caller in does not start.
    """

    def __init__(self, app: App, key: str = "") -> None:
        key = key or os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise ConfigInvalid(f"The engine has no key: set {KEY_VARIABLE}.")
        self._app = app
        self._key = hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._knows(scope.get("headers", ())):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before it was accepted: HTTP status 403
        else:
            await send({"type": "http.response.start", "status": 401, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": _BODY})

    def _knows(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether there is one Authorization header and it has the key. The time that it takes does not reveal its
        length."""
        given = [value for name, value in headers if name.lower() == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        right = hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._key)
        return right and scheme.lower() == b"bearer"
