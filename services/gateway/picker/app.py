"""The endpoint picker's application: the gateway's endpoints, of which two leave the engine's call to Envoy."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route

from mooncache.gateway.app import Access, Endpoint
from mooncache.gateway.endpoints import model, models, not_found
from mooncache.gateway.picker import pick
from mooncache.gateway.state import GatewayState

_POST = ("POST",)
_ANY = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def build_picker_app(state: GatewayState) -> Starlette:
    """The application of one endpoint picker."""
    endpoints = [
        (
            "/v1/chat/completions",
            Endpoint(state, "chat_completions", pick.handle_chat, methods=_POST, limited=True),
        ),
        ("/v1/completions", Endpoint(state, "completions", pick.handle_text, methods=_POST, limited=True)),
        ("/v1/models", Endpoint(state, "models", models.handle)),
    ]
    routes = [Route(path + end, endpoint) for path, endpoint in endpoints for end in ("", "/")]
    routes.append(Route("/v1/models/{model:path}", Endpoint(state, "model", model.handle)))
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    app.router.default = Endpoint(state, "unknown", not_found.handle, methods=_ANY, access=Access.OPEN)
    return app
