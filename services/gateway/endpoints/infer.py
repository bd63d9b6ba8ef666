"""What chat and text completions have in common: read, check, know the prompt, drive."""

from __future__ import annotations

from mooncache.auth import cache_salt
from mooncache.errors import ConductorUnavailable, NoInstances
from mooncache.gateway.core import body, faults, plan
from mooncache.gateway.core.capture import Prompt
from mooncache.gateway.shell.drive import Drive
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState


async def infer(state: GatewayState, exchange: Exchange, *, chat: bool) -> None:
    """Serve one request for tokens. Raises Refusal and MooncacheError for the wrapper to answer."""
    settings, caller = state.config.gateway, exchange.caller
    assert caller is not None
    data = await exchange.read_body(
        settings.body_bytes_max, settings.write_timeout_s, settings.request_timeout_s
    )
    inquiry = body.parse(data, chat=chat, choice_count_max=settings.choice_count_max)
    model = state.fleet.models.get(inquiry.model)
    if model is None:
        if not state.fleet.known:
            raise ConductorUnavailable("The gateway has not heard from the conductor yet.")
        raise plan.unknown_model(inquiry.model)
    if not model.instances:
        raise NoInstances(f"No instance that serves {model.name} is ready.")
    salt = cache_salt(state.token, caller.tenant, inquiry.cache_salt)
    known = await state.readers.know(inquiry, model, salt)
    if known is not None:
        longest = max(map(len, known.prompts))
        refusal: faults.Refusal | None = plan.too_long(
            model.max_model_tokens, longest, inquiry.max_output_tokens, chat=chat
        )
        if refusal is not None:
            raise refusal
    drive = Drive(state, exchange, inquiry, known, salt=salt, body_bytes=len(data))
    if state.capture is None:
        await drive.run()
        return
    prompts = () if known is None else [Prompt(each, salt, known.public_tokens) for each in known.prompts]
    ticket = state.capture.begin(
        prompts, tenant=caller.tenant, session=inquiry.session, now_s=exchange.started_s
    )
    try:
        await drive.run()
    finally:
        if ticket is not None:
            state.capture.end(ticket, exchange.notes.get("output_tokens", 0))
