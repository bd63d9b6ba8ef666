"""/console/session: GET says who is signed in, POST signs in with `Authorization: Bearer`, DELETE signs out.

The key comes in a header and never in a form or an address, so another site's page cannot send one, and no log has it.
"""

from __future__ import annotations

from typing import get_args

import msgspec

from mooncache._version import __version__
from mooncache.config.serving import PolicyName
from mooncache.errors import InvalidArgument, PermissionDenied
from mooncache.gateway.console.console import Console
from mooncache.gateway.core import faults
from mooncache.gateway.core.console_session import CLUSTER, ConsoleSession, tenant_key_of
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises Unauthenticated or PermissionDenied for a key that does not open the console."""
    console = state.require_console()
    if exchange.method in ("GET", "HEAD"):
        session = console.session(exchange)
        cookie = console.renew(session) if session is not None else ""
        if cookie:
            exchange.reply_headers["set-cookie"] = cookie
        await exchange.reply(200, _document(console, session))
        return
    require_own_page(exchange)
    if exchange.method == "POST":
        begun, cookie = console.sign_in(exchange.headers.get("authorization", ""))
        exchange.reply_headers["set-cookie"] = cookie
        await exchange.reply(200, _document(console, begun))
        return
    exchange.reply_headers["set-cookie"] = console.sign_out()
    await exchange.reply(200, _document(console, None))


def require_own_page(exchange: Exchange) -> None:
    """Raises PermissionDenied for what a page of another site had sent."""
    if exchange.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise PermissionDenied("Only the console's own page may ask for this.")


def require_json(exchange: Exchange) -> None:
    """Raises Refusal for a body that a page of another site could send without being asked."""
    if exchange.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise faults.refuse(InvalidArgument("This is asked for as application/json."), status=415)


def _document(console: Console, session: ConsoleSession | None) -> bytes:
    if session is None:
        return msgspec.json.encode({"signed_in": False, "version": __version__})
    key = tenant_key_of(session.who)
    who = "the cluster token" if session.who == CLUSTER else f"key {session.who[:8]}…"
    if key is not None:
        who = f"tenant {key.tenant}"
    return msgspec.json.encode(
        {
            "signed_in": True,
            "who": who,
            "tenant": key.tenant if key is not None else None,
            "until_s": session.until_s,
            "acts": console.may_act(session.who),
            "version": __version__,
            "policies": get_args(PolicyName) if key is None else (),
        }
    )
