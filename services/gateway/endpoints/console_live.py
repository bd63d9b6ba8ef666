"""GET /console/live?topic=...: what the collector sees, as server-sent events, until the page leaves.

It also ends with the session, with the gateway, and when the page takes events too slowly; the page connects again.
"""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import parse_qs

from mooncache.errors import InvalidArgument
from mooncache.gateway.console.viewers import Topic, Viewer
from mooncache.gateway.shell.exchange import ClientGone, Exchange
from mooncache.gateway.state import GatewayState

SEND_S: Final = 10.0  # for one event; a page that takes longer is dropped
_SILENCE_S: Final = 15.0
_KEEP_ALIVE: Final = b": still here\n\n"
_QUERY_CHARS_MAX: Final = 256


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises InvalidArgument: no such topic; LimitExceeded: too many pages are open."""
    console = state.require_console()
    topic = _topic(exchange)
    until_s = state.clock.now_s() + console.left_s(exchange)
    task = asyncio.current_task()
    assert task is not None
    await exchange.read_body(0, SEND_S)  # from here on a page that leaves cancels this task
    viewer = console.viewers.enter(topic)
    try:
        await exchange.begin_stream()
        while (left_s := until_s - state.clock.now_s()) > 0:
            event = await _next(viewer, min(_SILENCE_S, left_s))
            if event is None:
                break
            async with asyncio.timeout(SEND_S):
                await exchange.write(event)
        await exchange.end()
    except TimeoutError:
        viewer.dropped = True
        raise ClientGone from None
    except asyncio.CancelledError:
        if not exchange.gone:
            raise
        task.uncancel()  # a page that was closed is no failure
    finally:
        if viewer.dropped:
            state.stats.console_dropped.inc()
        console.viewers.leave(viewer)


async def _next(viewer: Viewer, wait_s: float) -> bytes | None:
    """The next event, or a sign of life; None at the end."""
    try:
        async with asyncio.timeout(wait_s):
            return await viewer.next()
    except TimeoutError:
        return _KEEP_ALIVE


def _topic(exchange: Exchange) -> Topic:
    query = exchange.scope.get("query_string", b"")[:_QUERY_CHARS_MAX].decode("latin-1")
    asked = parse_qs(query).get("topic", [""])[0]
    if asked not in set(Topic):
        raise InvalidArgument(f"topic has to be one of {', '.join(Topic)}.")
    return Topic(asked)
