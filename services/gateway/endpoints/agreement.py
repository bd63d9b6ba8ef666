"""POST /agreement: one prompt, read by this gateway and by each of its engines; needs the cluster token.

`mooncache doctor` asks. The engines compute the prompt and save it. So whether the pool has the gateway's keys then
says whether both make the same keys; the caller looks there, and removes the blocks. The body is {"model": NAME}, or
{} for all models. With "read_back_ms" (the caller's time for all of it) each engine's blocks are also loaded by
another engine through its connector, or by the same one where no other shares them.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from mooncache.client.keys import KEY_BYTES
from mooncache.errors import MooncacheError
from mooncache.gateway.core import body, faults
from mooncache.gateway.core.agreement import (
    EngineTokens,
    InstanceAgreement,
    ModelAgreement,
    answer_tokens,
    first_difference,
    probe_fields,
    tokens_said,
)
from mooncache.gateway.core.body import TokenizedPrompt
from mooncache.gateway.core.faults import Refusal
from mooncache.gateway.core.fleet import EngineInstance, FleetModel
from mooncache.gateway.core.read_back import (
    ReadBack,
    expected_tokens,
    read_back_fields,
    reader_of,
    report_said,
    wait_ms,
)
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState
from mooncache.kvcache.leg_hint import CacheReport

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
    read_back_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 0


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
    until_s = state.clock.now_s() + wanted.read_back_ms / 1e3 if wanted.read_back_ms else 0.0
    asking = _Asking(state, exchange, until_s)
    found = await asyncio.gather(*(_of_model(asking, model) for model in models[:_MODELS_MAX]))
    await exchange.reply(200, msgspec.json.encode({"models": found}))


class _Asking(NamedTuple):
    """Who asks engines, for which request, and until when blocks are read back (of the gateway's clock; 0: never)."""

    state: GatewayState
    exchange: Exchange
    until_s: float

    async def engine(self, to: EngineInstance, fields: dict[str, Any], limit_s: float) -> bytes | str:
        """The engine's answer, or why there is none."""
        try:
            async with asyncio.timeout(limit_s):
                asked = msgspec.json.encode(fields)
                answer = await self.state.engines.post(to.url, _CHAT, asked, self.exchange.request_id)
                async with answer:
                    return await answer.read_all(_ANSWER_BYTES_MAX)
        except TimeoutError:
            return f"it did not answer within {limit_s:.3g} s"
        except Refusal as error:
            return error.fault.message
        except MooncacheError as error:
            return error.message


class _Trial(NamedTuple):
    """One engine and what it is asked."""

    instance: EngineInstance
    model: FleetModel
    asked: dict[str, Any]


async def _of_model(asking: _Asking, model: FleetModel) -> ModelAgreement:
    passport = model.passport
    if passport is None:
        return ModelAgreement(model.name, reason="its engines have no passport")
    block_tokens = passport.block_tokens
    trials = [
        _Trial(
            one, model, probe_fields(model.name, secrets.token_hex(16), block_tokens, model.max_model_tokens)
        )
        for one in model.instances[:_INSTANCES_MAX]
    ]
    ours = [await _tokenized(asking.state, trial) for trial in trials]
    reason = next((text for text in ours if isinstance(text, str)), "")
    if reason:
        return ModelAgreement(model.name, 0, block_tokens, reason)
    pairs = [(trial, mine) for trial, mine in zip(trials, ours, strict=True) if not isinstance(mine, str)]
    found = await asyncio.gather(*(_tried(asking, trial, mine, block_tokens) for trial, mine in pairs))
    return ModelAgreement(
        model.name,
        max((len(mine.prompts[0]) for _, mine in pairs), default=0),
        block_tokens,
        "",
        tuple(compared for compared, _ in found),
        tuple(read for _, read in found if read is not None),
    )


async def _tokenized(state: GatewayState, trial: _Trial) -> TokenizedPrompt | str:
    """The prompt as this gateway reads it, or why it does not."""
    try:
        request, content = body.parse(msgspec.json.encode(trial.asked), chat=True, choice_count_max=1)
        found = await state.tokenizers.tokenize(request, content, trial.model, str(trial.asked["cache_salt"]))
    except Refusal as error:
        return error.fault.message
    except MooncacheError as error:
        return error.message
    return found if found is not None and found.prompts else _NO_KEYS


async def _tried(
    asking: _Asking, trial: _Trial, mine: TokenizedPrompt, block_tokens: int
) -> tuple[InstanceAgreement, ReadBack | None]:
    """What the engine made of the prompt, and what another one loaded of its blocks."""
    name, prompt = trial.instance.instance_id, mine.prompts[0]
    asked = {**trial.asked, "max_tokens": answer_tokens(len(prompt), block_tokens)}
    answer = await asking.engine(trial.instance, asked, _ENGINE_S)
    if isinstance(answer, str):
        return InstanceAgreement(name, error=answer), None
    try:
        theirs = tokens_said(answer)
    except ValueError as error:
        return InstanceAgreement(name, error=str(error)), None
    difference = first_difference(list(prompt), theirs.prompt)
    keys = tuple(mine.keys[at : at + KEY_BYTES].hex() for at in range(0, len(mine.keys), KEY_BYTES))
    compared = InstanceAgreement(name, len(theirs.prompt), difference, keys)
    if difference >= 0 or not keys or not asking.until_s:
        return compared, None
    return compared, await _read_back(asking, trial, asked, theirs, block_tokens)


async def _read_back(
    asking: _Asking, trial: _Trial, asked: dict[str, Any], written: EngineTokens, block_tokens: int
) -> ReadBack:
    writer = trial.instance
    reader = reader_of(writer, trial.model.instances[:_INSTANCES_MAX])
    prompt_tokens = len(written.prompt)
    found = ReadBack(writer.instance_id, reader.instance_id, expected_tokens(prompt_tokens, block_tokens))
    left_s = asking.until_s - asking.state.clock.now_s()
    limit_ms = wait_ms(left_s * 1e3)
    if not limit_ms:
        return msgspec.structs.replace(found, error="no time was left to ask it")
    own_salt = secrets.token_hex(16) if reader == writer else ""
    fields = read_back_fields(asked, prompt_tokens, block_tokens, limit_ms, own_salt=own_salt)
    answer = await asking.engine(reader, fields, left_s)
    if isinstance(answer, str):
        return msgspec.structs.replace(found, error=answer)
    report = report_said(answer) or CacheReport()
    try:
        generated = tokens_said(answer).generated
    except ValueError as error:
        return msgspec.structs.replace(found, error=str(error))
    return msgspec.structs.replace(
        found,
        loaded_tokens=report.loaded_tokens,
        local_tokens=report.local_tokens,
        outcome=str(report.outcome),
        reason=report.reason,
        waited_ms=report.waited_ms,
        load_ms=report.load_ms,
        first_difference=first_difference(written.generated, generated) if written.generated else -1,
    )
