"""What chat and text completions have in common: read, check, tokenise, drive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncache.gateway.core.capture import CapturedPrompt
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.shell.intake import Intake
from mooncache.gateway.shell.request_driver import RequestDriver
from mooncache.gateway.state import GatewayState

if TYPE_CHECKING:
    from mooncache.gateway.shell.capture import Ticket


async def infer(state: GatewayState, exchange: Exchange, *, chat: bool) -> None:
    """Serve one request for tokens. Raises Refusal and MooncacheError for the wrapper to answer."""
    drive, ticket = await _prepare(state, exchange, chat=chat)
    try:
        await drive.run()
    finally:
        if state.capture is not None and ticket is not None:
            state.capture.end(ticket, exchange.notes.get("output_tokens", 0))


async def _prepare(
    state: GatewayState, exchange: Exchange, *, chat: bool
) -> tuple[RequestDriver, Ticket | None]:
    """The request as its drive needs it; the body and all that was made of it is gone when this returns."""
    intake = Intake(state, exchange)
    prepared = await intake.take(chat=chat)
    drive = RequestDriver(state, exchange, prepared, salt=intake.salt, body_bytes=intake.body_bytes)
    if state.capture is None:
        return drive, None
    tokenized = prepared.tokenized
    prompts = (
        ()
        if tokenized is None
        else [CapturedPrompt(each, intake.salt, tokenized.public_tokens) for each in tokenized.prompts]
    )
    ticket = state.capture.begin(
        prompts,
        tenant=exchange.require_caller().tenant,
        session=prepared.request.session,
        now_s=exchange.started_s,
    )
    return drive, ticket
