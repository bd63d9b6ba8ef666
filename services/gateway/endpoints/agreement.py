"""POST /agreement: one prompt, read by this gateway and by each of its engines; needs the cluster token.

`mooncache doctor` asks. The engines compute the prompt and save it. So whether the pool has the gateway's keys then
says whether both make the same keys; the caller looks there, and removes the blocks. The body is {"model": NAME}, or
{} for all models.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final, NamedTuple

import msgspec

from mooncache.client.keys import KEY_BYTES
from mooncache.errors import MooncacheError
from mooncache.gateway.core import body, faults
from mooncache.gateway.core.agreement import (
    InstanceAgreement,
    ModelAgreement,
    first_difference,
    probe_body,
    tokens_said,
)
from mooncache.gateway.core.body import TokenizedPrompt
from mooncache.gateway.core.faults import Refusal
from mooncache.gateway.core.fleet import EngineInstance, FleetModel
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState

_BODY_BYTES_MAX: Final = 4096
_BODY_S: Final = 5.0
_ENGINE_S: Final = 6.0
_ANSWER_BYTES_MAX: Final = 4 << 20
_MODELS_MAX: Final = 16
_INSTANCES_MAX: Final = 64
_CHAT: Final = "/v1/chat/completions"
_NO_KEYS: Final = "the gateway cannot tell the tokens of its prompts; metric no_keys_total says why"


class _Wanted(msgspec.Struct):
    model: str = ""


async def handle(state: GatewayState, exchange: Exchange) -> None:
    """Raises Refusal for a body that makes no sense, or a model that is not known."""
    data = b"".join(await exchange.read_body(_BODY_BYTES_MAX, _BODY_S, _BODY_S))
    try:
        wanted = msgspec.json.decode(data or b"{}", type=_Wanted)
    except (msgspec.DecodeError, RecursionError) as error:
        raise faults.bad_request(f'Send {{"model": "NAME"}} or {{}}: {error}.') from None
    models = [model for model in state.fleet.models.values() if model.instances]
    if wanted.model:
        models = [model for model in models if model.name == wanted.model]
        if not models:
            raise faults.unknown_model(wanted.model)
    found = await asyncio.gather(*(_of_model(state, exchange, model) for model in models[:_MODELS_MAX]))
    await exchange.reply(200, msgspec.json.encode({"models": found}))


async def _of_model(state: GatewayState, exchange: Exchange, model: FleetModel) -> ModelAgreement:
    passport = model.passport
    if passport is None:
        return ModelAgreement(model.name, reason="its engines have no passport")
    trials = [
        _Trial(one, model, probe_body(model.name, salt, passport.block_tokens, model.max_model_tokens), salt)
        for one in model.instances[:_INSTANCES_MAX]
        for salt in (secrets.token_hex(16),)
    ]
    ours = [await _tokenized(state, trial) for trial in trials]
    reason = next((text for text in ours if isinstance(text, str)), "")
    if reason:
        return ModelAgreement(model.name, 0, passport.block_tokens, reason)
    pairs = [(trial, mine) for trial, mine in zip(trials, ours, strict=True) if not isinstance(mine, str)]
    instances = await asyncio.gather(*(_compared(state, exchange, trial, mine) for trial, mine in pairs))
    return ModelAgreement(
        model.name,
        max((len(mine.prompts[0]) for _, mine in pairs), default=0),
        passport.block_tokens,
        "",
        tuple(instances),
    )


class _Trial(NamedTuple):
    """One engine and what it is asked."""

    instance: EngineInstance
    model: FleetModel
    asked: bytes
    salt: str


async def _tokenized(state: GatewayState, trial: _Trial) -> TokenizedPrompt | str:
    """The prompt as this gateway reads it, or why it does not."""
    try:
        request, content = body.parse(trial.asked, chat=True, choice_count_max=1)
        found = await state.tokenizers.tokenize(request, content, trial.model, trial.salt)
    except Refusal as error:
        return error.fault.message
    except MooncacheError as error:
        return error.message
    return found if found is not None and found.prompts else _NO_KEYS


async def _compared(
    state: GatewayState, exchange: Exchange, trial: _Trial, mine: TokenizedPrompt
) -> InstanceAgreement:
    name = trial.instance.instance_id
    try:
        async with asyncio.timeout(_ENGINE_S):
            answer = await state.engines.post(trial.instance.url, _CHAT, trial.asked, exchange.request_id)
            async with answer:
                theirs = tokens_said(await answer.read_all(_ANSWER_BYTES_MAX))
    except TimeoutError:
        return InstanceAgreement(name, error=f"it did not answer within {_ENGINE_S:g} s")
    except Refusal as error:
        return InstanceAgreement(name, error=error.fault.message)
    except MooncacheError as error:
        return InstanceAgreement(name, error=error.message)
    except ValueError as error:
        return InstanceAgreement(name, error=str(error))
    difference = first_difference(list(mine.prompts[0]), theirs)
    keys = tuple(mine.keys[at : at + KEY_BYTES].hex() for at in range(0, len(mine.keys), KEY_BYTES))
    return InstanceAgreement(name, len(theirs), difference, keys)
