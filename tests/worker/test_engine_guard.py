"""No route of an engine answers without its key: neither of vLLM's own application nor of the small engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncache.config import load
from mooncache.errors import ConfigInvalid
from mooncache.runtime.engine_guard import EngineGuard
from mooncache.worker.adapters.base import Launch
from mooncache.worker.adapters.vllm import VllmAdapter

KEY = "the-engine-key"
WRONG: list[list[tuple[bytes, bytes]]] = [
    [],
    [(b"authorization", b"Bearer wrong")],
    [(b"authorization", KEY.encode())],
    [(b"authorization", b"Basic " + KEY.encode())],
    [(b"authorization", b"Bearer " + KEY.encode()), (b"authorization", b"Bearer x")],
    [(b"authorization", b"Bearer " + KEY.encode() + b"\xff")],
]
RIGHT = [(b"authorization", b"Bearer " + KEY.encode())]


def ask(
    app: Any, method: str, path: str, headers: list[tuple[bytes, bytes]], kind: str = "http"
) -> dict[str, Any]:
    """What the application sends first."""
    sent: list[dict[str, Any]] = []
    scope = {
        "type": kind,
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]


async def _anything(_: Any, __: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


def test_only_the_key_opens_and_no_key_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = EngineGuard(_anything, KEY)
    for headers in WRONG:
        assert ask(guard, "GET", "/health", headers)["status"] == 401, headers
        assert ask(guard, "OPTIONS", "/v1/models", headers)["status"] == 401
        assert ask(guard, "GET", "/v1/realtime", headers, "websocket")["type"] == "websocket.close"
    assert ask(guard, "GET", "/health", RIGHT)["status"] == 200
    assert ask(guard, "GET", "/", [(b"Authorization", b"bearer " + KEY.encode())])["status"] == 200
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ConfigInvalid, match="VLLM_API_KEY"):
        EngineGuard(_anything)


def launch(folder: Path, **changes: Any) -> Launch:
    values: dict[str, Any] = {
        "instance_id": "i-1",
        "model": str(folder),
        "model_name": "tiny",
        "host": "10.0.0.6",
        "port": 8000,
        "engine_key": KEY,
        "passport_path": folder / "passport.json",
        "state_dir": folder,
    }
    return Launch(**values | changes)


@pytest.fixture
def vllm_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's application as `vllm serve` makes it from the adapter's arguments, with every optional route there is."""
    pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = VllmAdapter(load(env={}, overrides={})).command(launch(tmp_path))
    monkeypatch.setenv("VLLM_API_KEY", str(command.env["VLLM_API_KEY"]))
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    serve = command.arguments.index("serve")
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([*command.arguments[serve + 1 :]])
    return build_app(args, ("generate", "embed", "classify", "transcription", "realtime"))


def paths(routes: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(method, path) of every route, websockets as method WEBSOCKET, mounted applications with a path inside."""
    for route in routes:
        inner = getattr(route, "routes", None) or getattr(
            getattr(route, "original_router", None), "routes", None
        )
        path = prefix + getattr(route, "path", "")
        for method in getattr(route, "methods", None) or (() if inner else ("GET",)):
            yield method, path
        if type(route).__name__ in {"APIWebSocketRoute", "WebSocketRoute"}:
            yield "WEBSOCKET", path
        yield from paths(inner or (), path)


@pytest.mark.filterwarnings("ignore")
def test_no_route_of_vllm_answers_without_the_key(vllm_app: Any) -> None:
    found = set(paths(vllm_app.routes))
    names = {path for _, path in found}
    assert {"/invocations", "/tokenize", "/load", "/docs", "/openapi.json", "/v1/chat/completions"} <= names
    assert {"/collective_rpc", "/scale_elastic_ep", "/health", "/version"} <= names
    assert any(name.startswith("/metrics") for name in names)
    for method, path in sorted(found | {("GET", "/nothing"), ("OPTIONS", "/invocations")}):
        for headers in WRONG[:2]:
            kind = "websocket" if method == "WEBSOCKET" else "http"
            answer = ask(vllm_app, method, path, headers, kind)
            if kind == "websocket":
                assert answer["type"] == "websocket.close", path
            else:
                assert answer["status"] == 401, f"{method} {path} answers {answer['status']} without the key"
    assert ask(vllm_app, "GET", "/version", RIGHT)["status"] == 200


def test_the_key_is_not_on_the_command_line(tmp_path: Path) -> None:
    command = VllmAdapter(load(env={}, overrides={})).command(launch(tmp_path))
    assert KEY not in " ".join(command.arguments)
    assert command.env["VLLM_API_KEY"] == KEY
    assert os.environ.get("VLLM_API_KEY") != KEY
