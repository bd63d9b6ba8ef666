"""Paths to endpoints, each with and without a trailing slash: not every client follows a redirect."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route

from mooncache.gateway.endpoints import (
    chat_completions,
    completions,
    embeddings,
    health,
    metrics,
    model,
    models,
    not_found,
    openapi,
)
from mooncache.gateway.shell.endpoint import READ_METHODS, Endpoint
from mooncache.gateway.state import GatewayState
from mooncache.runtime.bind import is_loopback

_POST = ("POST",)
_ANY = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def build_app(state: GatewayState) -> Starlette:
    """The application of one gateway."""
    metrics_key = False if is_loopback(state.config.gateway.host) else "admin"
    endpoints: list[tuple[str, Endpoint]] = [
        (
            "/v1/chat/completions",
            Endpoint(state, "chat_completions", chat_completions.handle, methods=_POST, limited=True),
        ),
        ("/v1/completions", Endpoint(state, "completions", completions.handle, methods=_POST, limited=True)),
        ("/v1/embeddings", Endpoint(state, "embeddings", embeddings.handle, methods=_POST)),
        ("/v1/models", Endpoint(state, "models", models.handle)),
        ("/v1/models/{model:path}", Endpoint(state, "model", model.handle)),
        ("/health", Endpoint(state, "health", health.handle, needs_key=False)),
        ("/metrics", Endpoint(state, "metrics", metrics.handle, needs_key=metrics_key)),
        ("/openapi.json", Endpoint(state, "openapi", openapi.handle, needs_key=False)),
    ]
    routes = []
    for path, endpoint in endpoints:
        routes.append(Route(path, endpoint))
        if "{" not in path:
            routes.append(Route(path + "/", endpoint))
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    app.router.default = Endpoint(state, "unknown", not_found.handle, methods=_ANY, needs_key=False)
    return app


__all__ = ["READ_METHODS", "build_app"]
