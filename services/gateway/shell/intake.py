"""From a client's body to a request that can be scheduled, within the bytes that may be in memory.

Small bodies are read in the event loop, which is the cheapest; beyond `INLINE_BYTES` another process reads them.
"""

from __future__ import annotations

from typing import Final

from mooncache.auth import cache_salt
from mooncache.errors import ConductorUnavailable, NoInstances
from mooncache.gateway.core import body, faults, legs, plan
from mooncache.gateway.core.body import InferenceRequest
from mooncache.gateway.core.fleet import FleetModel
from mooncache.gateway.core.prepared import Make, Prepared
from mooncache.gateway.shell.exchange import SILENCE_MAX_S, Exchange
from mooncache.gateway.state import GatewayState

INLINE_BYTES: Final = 256 << 10
_SPACE: Final = b" \t\r\n"
_BODY_BYTES_PER_TOKEN: Final = 16


class Intake:
    """One body. After `take`, `model` and `salt` are those of the request."""

    def __init__(self, state: GatewayState, exchange: Exchange) -> None:
        self._state, self._exchange = state, exchange
        self.model = FleetModel("")
        self.salt = ""
        self.body_bytes = 0

    async def take(self, *, chat: bool) -> Prepared:
        """Read the body and understand it. Raises Refusal, MooncacheError, ClientGone."""
        state, settings = self._state, self._state.config.gateway
        parts = await self._exchange.read_body(
            self._bytes_max(state.fleet.longest_model_tokens()),
            SILENCE_MAX_S,
            settings.request_timeout_s,
        )
        self.body_bytes = sum(map(len, parts))
        if self.body_bytes <= INLINE_BYTES:
            return await self._here(b"".join(parts), chat=chat)
        return await self._beside(parts, chat=chat)

    async def _here(self, data: bytes, *, chat: bool) -> Prepared:
        request, content = body.parse(data, chat=chat, choice_count_max=body.CHOICES_MAX)
        self._resolve(request)
        limit = self.model.max_model_tokens
        plan.check_ids(limit, request, content)
        tokenized = await self._state.tokenizers.tokenize(request, content, self.model, self.salt)
        if tokenized is not None:
            plan.check_length(limit, max(tokenized.lengths), request.max_output_tokens, chat=chat)
        return Prepared(request, legs.forwarded(request, content), tokenized)

    async def _beside(self, parts: list[bytes], *, chat: bool) -> Prepared:
        if parts[0].lstrip(_SPACE)[:1] not in (b"{", b""):
            raise faults.bad_request("The body is JSON, but not an object; send {...}.")
        state, caller = self._state, self._exchange.caller
        assert caller is not None
        has_source = False

        def resolve(request: InferenceRequest) -> Make:
            nonlocal has_source
            self._resolve(request)
            source = state.tokenizers.source(self.model, self.salt)
            has_source = source is not None
            return Make(source, self.model.max_model_tokens)

        started_s = state.clock.now_s()
        prepared = await state.preparing.prepare(
            parts,
            resolve,
            tenant=caller.tenant,
            chat=chat,
            choice_count_max=body.CHOICES_MAX,
        )
        elapsed_s = state.clock.now_s() - started_s
        state.stats.read_beside.observe(elapsed_s)
        if has_source:
            state.tokenizers.note(self.model, prepared.tokenized, elapsed_s)
        return prepared

    def _resolve(self, request: InferenceRequest) -> None:
        """Find model and salt of a request. Raises Refusal, MooncacheError."""
        state, caller = self._state, self._exchange.caller
        assert caller is not None
        model = state.fleet.models.get(request.model)
        if model is None:
            if not state.fleet.known:
                raise ConductorUnavailable("The gateway has not reached the conductor yet.")
            raise plan.unknown_model(request.model)
        if not model.instances:
            raise NoInstances(f"No instance that serves {model.name} is ready.")
        limit = self._bytes_max(model.max_model_tokens)
        if self.body_bytes > limit:
            raise body.too_large(limit)
        self.model = model
        self.salt = cache_salt(state.token, caller.tenant, request.cache_salt)

    def _bytes_max(self, model_tokens: int) -> int:
        settings = self._state.config.gateway
        cap = min(settings.body_bytes_max, settings.tenant_body_bytes_max, settings.open_body_bytes_max)
        return body.bytes_max(cap, _BODY_BYTES_PER_TOKEN, model_tokens)
