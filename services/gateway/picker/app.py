"""The endpoint picker's application: the gateway's endpoints, of which two leave the engine's call to Envoy."""

from __future__ import annotations

from mooncache.gateway.app import Access, Endpoint
from mooncache.gateway.endpoints import model, models, not_found
from mooncache.gateway.picker import pick
from mooncache.gateway.shell.exchange import App
from mooncache.gateway.shell.paths import Paths
from mooncache.gateway.state import GatewayState

_POST = ("POST",)
_ANY = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def build_picker_app(state: GatewayState) -> App:
    """The application of one endpoint picker."""
    return Paths(
        [
            (
                "/v1/chat/completions",
                Endpoint(state, "chat_completions", pick.handle_chat, methods=_POST, limited=True),
            ),
            (
                "/v1/completions",
                Endpoint(state, "completions", pick.handle_text, methods=_POST, limited=True),
            ),
            ("/v1/models", Endpoint(state, "models", models.handle)),
            ("/v1/models/{model:path}", Endpoint(state, "model", model.handle)),
        ],
        Endpoint(state, "unknown", not_found.handle, methods=_ANY, access=Access.OPEN),
    )
