"""POST /v1/chat/completions and /v1/completions at Envoy: the gateway's own way of a request, but for the decode leg.

Envoy sends a request once. So a decode leg that fails is not sent again from here: Envoy tries the fallback endpoints
where it cannot connect, if its route says so, and the client hears of everything else. A prefill leg that fails is not
sent again either; the conductor ends the waits for its blocks, and the decode instance computes them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import msgspec

from mooncache.errors import MooncacheError, NoInstances
from mooncache.gateway.core import faults
from mooncache.gateway.core.body import MODEL_CHARS_MAX, InferenceRequest, Prepared
from mooncache.gateway.core.fleet import EngineInstance, FleetModel
from mooncache.gateway.endpoints.completions import Intake, RequestDriver, infer
from mooncache.gateway.picker.endpoints import fallbacks, host_and_port, outside, token_of
from mooncache.gateway.picker.messages import MODEL_REWRITE
from mooncache.gateway.picker.stream import SCOPE_KEY, ProcessorStream, ResponseHead
from mooncache.gateway.shell.engines import DecodeSender, EngineAnswer, raise_refusal
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.shell.leg_runner import AnyLeg, LegRunner
from mooncache.gateway.state import GatewayState
from mooncache.kvcache.leg_hint import LegRole
from mooncache.runtime import tracing
from mooncache.runtime.grpc_server import address

_RESOLVE_S: Final = 2.0
_NOT_FOR_ENGINES: Final = (
    "accept-encoding",
    MODEL_REWRITE,
    "expect",
    "x-vllm-priority",  # vLLM reads these two before the body: a client would choose its place in the queue
    "x-data-parallel-rank",
)


async def handle_chat(state: GatewayState, exchange: Exchange) -> None:
    """POST /v1/chat/completions."""
    await infer(state, exchange, chat=True, reads=RoutedIntake, drives=RoutedDriver)


async def handle_text(state: GatewayState, exchange: Exchange) -> None:
    """POST /v1/completions."""
    await infer(state, exchange, chat=False, reads=RoutedIntake, drives=RoutedDriver)


def stream_of(exchange: Exchange) -> ProcessorStream:
    """Envoy's stream of a request."""
    return cast("ProcessorStream", exchange.scope[SCOPE_KEY])


def with_model(fields: bytes, model: str) -> bytes:
    """A body, a JSON object, that names another model."""
    found = msgspec.json.decode(fields, type=dict[str, msgspec.Raw])
    found["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(found)


class RoutedIntake(Intake):
    """A body, of a model that Envoy's route may have renamed."""

    def __init__(self, state: GatewayState, exchange: Exchange) -> None:
        super().__init__(state, exchange)
        self._rewrite = stream_of(exchange).model_rewrite

    async def take(self, *, chat: bool) -> Prepared:
        """As the gateway does. Raises Refusal, MooncacheError, ClientGone."""
        if len(self._rewrite) > MODEL_CHARS_MAX:
            raise faults.bad_request(f"{MODEL_REWRITE} has more than {MODEL_CHARS_MAX} characters.")
        prepared = await super().take(chat=chat)
        if not self._rewrite:
            return prepared
        request = replace(prepared.request, model=self._rewrite)
        return Prepared(request, with_model(prepared.forward, self._rewrite), prepared.tokenized)

    def _resolve(self, request: InferenceRequest) -> None:
        super()._resolve(replace(request, model=self._rewrite) if self._rewrite else request)


class RoutedAnswer(EngineAnswer):
    """An engine's answer that comes through Envoy."""

    def __init__(self, stream: ProcessorStream, status: int) -> None:
        self._stream = stream
        self.status = status

    def close(self) -> None:
        """Nothing to give back: Envoy has the connection, and the end of its stream closes it."""

    async def read_some(self) -> bytes:
        """What has come; b"" at the end. Raises EngineFailed when Envoy ended it early."""
        return await self._stream.read_answer()


class RoutedLegs(LegRunner):
    """Legs of which Envoy sends the decode leg; `LegRunner` sends the prefill leg and looks after both."""

    def __init__(self, state: GatewayState, exchange: Exchange, *more: Any) -> None:
        super().__init__(state, exchange, *more)
        self._stream = stream_of(exchange)

    def _sender(self) -> DecodeSender:
        return self

    async def post(self, url: str, path: str, body: bytes, request_id: str) -> EngineAnswer:
        """Let Envoy send the decode leg. Raises what `Engines.post` does."""
        headers = {
            ":path": path,
            "authorization": f"Bearer {self._stream.setup.engine_key(self._engine_token())}",
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": request_id,
        }
        tracing.inject(headers)
        endpoints = [await resolved(url), *await self._fallbacks()]
        head = await self._stream.route(headers, _NOT_FOR_ENGINES, ",".join(endpoints), body)
        await self._note_served(head, endpoints)
        answer = RoutedAnswer(self._stream, head.status)
        if answer.status != 200:
            await raise_refusal(answer)
        return answer

    def _engine_token(self) -> str:
        model = self._state.fleet.models.get(self._request.model)
        return token_of(model.instances, self._planner.plan.decode.instance_id) if model else ""

    async def _fallbacks(self) -> list[str]:
        count = self._stream.setup.fallback_count
        model = self._state.fleet.models.get(self._request.model)
        if not count or model is None:
            return []
        chosen, excluded = self._planner.plan.decode.instance_id, self._planner.attempts.exclude
        others = fallbacks(model.instances, chosen, excluded, count)
        return list((await addresses_of(others)).values())

    async def _note_served(self, head: ResponseHead, endpoints: Sequence[str]) -> None:
        """The leg's record names who answered, where Envoy took one of the fallbacks."""
        model = self._state.fleet.models.get(self._request.model)
        if model is None or head.served in ("", endpoints[0]):
            return
        for instance_id, endpoint in (await addresses_of(model.instances)).items():
            if endpoint == head.served:
                self.decode.record.instance = instance_id

    async def _replace(self, leg: AnyLeg, error: faults.Refusal | MooncacheError | None) -> None:
        """A leg failed, or its instance is suspect (`error` None). Nothing is sent again: Envoy has the decode leg."""
        if error is None:
            self._no_better.add(leg.record.instance)
        elif leg.role is LegRole.DECODE:
            raise error

    async def _look_for_blocks(self) -> None:
        """The decode instance's own limit ends its wait."""

    def _may_prefill_again(self, error: BaseException) -> bool:
        return False


class RoutedDriver(RequestDriver):
    """Serves one request of which Envoy sends the decode leg."""

    legs_class = RoutedLegs

    async def _serve(self) -> None:
        stream = stream_of(self._exchange)
        model = self._state.fleet.models.get(self._request.model)
        if stream.subset is not None and model is not None:
            await self._keep_to(stream.subset, model)
        await super()._serve()

    async def _keep_to(self, subset: frozenset[str], model: FleetModel) -> None:
        """Leave out instances that the subset hint does not name. Raises Refusal when none is left."""
        left_out = outside(model.instances, await addresses_of(model.instances), subset)
        if not [one for one in model.instances if one.can_generate and one.instance_id not in left_out]:
            text = f"No instance that serves {model.name} is among the endpoints that may be chosen."
            raise faults.refuse(NoInstances(text))
        self._planner.attempts.exclude.extend(left_out)


async def addresses_of(instances: Iterable[EngineInstance]) -> dict[str, str]:
    """Endpoint of each instance, by its id."""
    return {one.instance_id: await resolved(one.url) for one in instances}


async def resolved(url: str) -> str:
    """An engine's URL as `ip:port`; the name as it is where it cannot be resolved in time."""
    host, port = host_and_port(url)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_RESOLVE_S):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            host = str(found[0][4][0])
        except (OSError, TimeoutError, UnicodeError):
            pass
    return address(host, port)
