"""POST /v1/chat/completions and /v1/completions: one request from its body to the last byte of its answer.

The body is taken in, within the bytes that may be in memory: small ones are read in the event loop, which is the
cheapest, those beyond `INLINE_BYTES` by another process. Then come a plan, legs that answer, the answer, and the report
to the conductor. Whatever waits has a limit.
"""

from __future__ import annotations

import asyncio
from typing import Final

from mooncache.auth import cache_salt
from mooncache.errors import (
    ConductorUnavailable,
    EngineDied,
    EngineFailed,
    EngineTimeout,
    MooncacheError,
    NoInstances,
)
from mooncache.gateway.core import body, faults, plan
from mooncache.gateway.core.answer import StreamEditor, edit_answer
from mooncache.gateway.core.body import InferenceRequest, Prepared
from mooncache.gateway.core.capture import CapturedPrompt
from mooncache.gateway.core.faults import EndCode
from mooncache.gateway.core.fleet import FleetModel
from mooncache.gateway.core.plan import LegRecord
from mooncache.gateway.core.prepared import Tokenize
from mooncache.gateway.shell.account import BYTES_PER_TOKEN, Account
from mooncache.gateway.shell.capture import Ticket
from mooncache.gateway.shell.conductor import RequestPlanner
from mooncache.gateway.shell.engines import DecodeStream
from mooncache.gateway.shell.exchange import SILENCE_MAX_S, ClientGone, Exchange, StreamEnd, Watchdog
from mooncache.gateway.shell.leg_runner import LegRunner
from mooncache.gateway.shell.room import RequestSize, held
from mooncache.gateway.state import GatewayState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.metrics import observe

INLINE_BYTES: Final = 256 << 10
_SPACE: Final = b" \t\r\n"
_BODY_BYTES_PER_TOKEN: Final = 16


async def handle_chat(state: GatewayState, exchange: Exchange) -> None:
    """POST /v1/chat/completions."""
    await infer(state, exchange, chat=True)


async def handle_text(state: GatewayState, exchange: Exchange) -> None:
    """POST /v1/completions."""
    await infer(state, exchange, chat=False)


async def infer(
    state: GatewayState,
    exchange: Exchange,
    *,
    chat: bool,
    reads: type[Intake] | None = None,
    drives: type[RequestDriver] | None = None,
) -> None:
    """Serve one request for tokens. Raises Refusal and MooncacheError for the wrapper to answer.

    reads, drives: how the body is read and how its legs are sent, when that is not over this gateway's own HTTP.
    """
    driver, ticket = await _prepare(
        state, exchange, chat=chat, reads=reads or Intake, drives=drives or RequestDriver
    )
    try:
        async with held(state, exchange, driver.size_at_most):
            await driver.run()
    finally:
        if state.capture is not None and ticket is not None:
            state.capture.end(ticket, exchange.notes.get("output_tokens", 0))


async def _prepare(
    state: GatewayState,
    exchange: Exchange,
    *,
    chat: bool,
    reads: type[Intake],
    drives: type[RequestDriver],
) -> tuple[RequestDriver, Ticket | None]:
    """The request as its driver needs it; the body and all that was made of it is gone when this returns."""
    intake = reads(state, exchange)
    prepared = await intake.take(chat=chat)
    driver = drives(state, exchange, prepared, salt=intake.salt, body_bytes=intake.body_bytes)
    if state.capture is None or exchange.offline:
        return driver, None
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
    return driver, ticket


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
        body.check_ids(limit, request, content)
        tokenized = await self._state.tokenizers.tokenize(request, content, self.model, self.salt)
        if tokenized is not None:
            body.check_length(limit, max(tokenized.lengths), request.max_output_tokens, chat=chat)
        return Prepared(request, body.forwarded(request, content), tokenized)

    async def _beside(self, parts: list[bytes], *, chat: bool) -> Prepared:
        if parts[0].lstrip(_SPACE)[:1] not in (b"{", b""):
            raise faults.bad_request("The body is JSON, but not an object; send {...}.")
        state, caller = self._state, self._exchange.require_caller()
        has_source = False

        def resolve(request: InferenceRequest) -> Tokenize:
            nonlocal has_source
            self._resolve(request)
            source = state.tokenizers.source(self.model, self.salt)
            has_source = source is not None
            return Tokenize(source, self.model.max_model_tokens)

        started_s = state.clock.now_s()
        prepared = await state.preparing.prepare(
            parts,
            resolve,
            tenant=caller.tenant,
            chat=chat,
            choice_count_max=body.CHOICES_MAX,
        )
        elapsed_s = state.clock.now_s() - started_s
        observe(state.stats.read_beside, elapsed_s)
        if has_source:
            state.tokenizers.note(self.model, prepared.tokenized, elapsed_s)
        return prepared

    def _resolve(self, request: InferenceRequest) -> None:
        """Find model and salt of a request. Raises Refusal, MooncacheError."""
        state, caller = self._state, self._exchange.require_caller()
        model = state.fleet.models.get(request.model)
        if model is None:
            if not state.fleet.known:
                raise ConductorUnavailable("The gateway has not reached the conductor yet.")
            raise faults.unknown_model(request.model)
        if not model.instances:
            raise NoInstances(f"No instance that serves {model.name} is ready.")
        limit = self._bytes_max(model.max_model_tokens)
        if self.body_bytes > limit:
            raise body.too_large(limit)
        self.model = model
        self.salt = cache_salt(state.tokens.salts, caller.tenant, request.cache_salt)

    def _bytes_max(self, model_tokens: int) -> int:
        settings = self._state.config.gateway
        cap = min(settings.body_bytes_max, settings.tenant_body_bytes_max, settings.open_body_bytes_max)
        return body.bytes_max(cap, _BODY_BYTES_PER_TOKEN, model_tokens)


def _pool_tenant(state: GatewayState, exchange: Exchange, prepared: Prepared) -> str:
    """Whose blocks the prompt's are at the store nodes; "": the engines' own, which tenants can share."""
    caller, tokenized = exchange.require_caller(), prepared.tokenized
    is_shared = caller.admin or (tokenized is not None and tokenized.public_tokens > 0)
    return "" if is_shared or not state.config.gateway.tenant_sessions_enabled else caller.tenant


class RequestDriver:
    """Serves one request; `run` is the whole interface.

    legs_class: what sends the legs. `size_at_most`: what the request may take.
    """

    legs_class: type[LegRunner] = LegRunner

    def __init__(
        self, state: GatewayState, exchange: Exchange, prepared: Prepared, *, salt: str, body_bytes: int
    ) -> None:
        self._state, self._exchange, self._request = state, exchange, prepared.request
        self._settings = state.config.gateway
        tokenized = prepared.tokenized
        tokens = max(1, body_bytes // BYTES_PER_TOKEN if tokenized is None else tokenized.token_count)
        self.size_at_most = self._size_at_most(
            tokens, tokens if tokenized is None else max(tokenized.lengths)
        )
        self._planner = planner = RequestPlanner(
            state.conductor,
            state.offenders,
            state.clock,
            exchange,
            prepared,
            tokens,
            _pool_tenant(state, exchange, prepared),
        )
        self._account = Account(
            state, exchange, prepared.request, planner, is_tokenized=tokenized is not None
        )
        self._legs = self.legs_class(state, exchange, prepared, self._account, planner, salt)
        self._salt = salt

    def _size_at_most(self, prompt_tokens: int, longest_prompt: int) -> RequestSize:
        """The prompt, and all that may be generated, beside the longest prompt where the client sets no end."""
        state, request = self._state, self._request
        model = state.fleet.models.get(request.model)
        longest = 0 if model is None else max(0, model.max_model_tokens - longest_prompt)
        output = request.choices * (request.max_output_tokens or longest)
        money = None
        if state.spending is not None:
            work_class = self._exchange.work_class
            money = state.spending.at_most(request.model, work_class, prompt_tokens, output)
        return RequestSize(prompt_tokens + output, money)

    async def run(self) -> None:
        """Serve the request. Raises Refusal, MooncacheError, ClientGone; legs are closed in any case."""
        phase: pb.RequestPhase = pb.REQUEST_PHASE_FAILED
        code: str = EndCode.CANCELLED
        try:
            try:
                async with asyncio.timeout(self._settings.request_timeout_s):
                    await self._serve()
            except TimeoutError:
                limit_s = self._settings.request_timeout_s
                raise EngineTimeout(f"The request took longer than {limit_s:g} s.") from None
            phase, code = pb.REQUEST_PHASE_FINISHED, EndCode.OK
            self._planner.served()
            if self._account.editor.fault is not None:
                phase, code = pb.REQUEST_PHASE_FAILED, self._account.editor.fault.name
        except faults.Refusal as refusal:
            code = refusal.fault.name
            raise
        except MooncacheError as error:
            code = error.name
            if isinstance(error, EngineDied) and self._account.answering is not None:
                self._planner.died()
            raise
        finally:
            if self._exchange.gone:
                phase, code = pb.REQUEST_PHASE_ABORTED, EndCode.CLIENT_GONE
            planned = self._legs.planned_tokens()
            self._legs.close(code)
            self._account.report_end(phase, code, planned)

    async def _first_plan(self) -> None:
        await self._planner.first()

    async def _serve(self) -> None:
        await self._first_plan()
        # Only now: what the conductor refuses costs the tenant nothing.
        self._account.charge(self._planner.prompt_tokens)
        observe(self._state.stats.overhead, self._account.elapsed_ms() / 1e3)
        model = self._state.fleet.models.get(self._request.model)
        if self._planner.plan.shard_blocks and model is not None and model.passport is not None:
            public_salt = self._state.tokenizers.public_salt
            self._account.shard_keys = self._planner.shard_keys(model.passport, self._salt, public_salt)
        stream = await self._legs.open()
        record = self._account.answering = self._legs.decode.record
        self._planner.release()
        self._legs.release()
        self._exchange.release_body()
        is_admin = self._exchange.require_caller().admin
        self._exchange.reply_headers |= plan.headers(self._planner.plan, is_admin=is_admin)
        is_stream = self._request.stream
        self._account.report(pb.REQUEST_PHASE_FIRST_TOKEN, record, answer_is_whole=not is_stream)
        if is_stream:
            await self._stream(stream, record)
            return
        await self._legs.wait_for_prefill()
        answer, record.usage, record.cache = edit_answer(
            stream.body, self._account.cached_tokens, self._legs.planned_tokens()
        )
        await self._exchange.reply(200, answer)

    async def _stream(self, stream: DecodeStream, record: LegRecord) -> None:
        stats, editor, exchange = self._state.stats, self._account.editor, self._exchange
        observe(stats.ttft.labels(self._request.model), self._account.elapsed_ms() / 1e3)
        editor.prefill_tokens = self._account.cached_tokens
        editor.planned_tokens = self._legs.planned_tokens()
        self._legs.follow_prefill()
        await exchange.begin_stream()
        stats.streams_open.inc()
        started_s = self._state.clock.now_s()
        try:
            await relay(stream, editor, exchange, self._settings.stall_timeout_s, SILENCE_MAX_S)
        finally:
            stats.streams_open.dec()
            stats.events.inc(editor.event_count)
            if editor.event_count > 1:
                elapsed_s = self._state.clock.now_s() - started_s
                observe(stats.tbt.labels(self._request.model), elapsed_s / (editor.event_count - 1))
            record.usage, record.cache = editor.usage, editor.cache
        if not editor.done:
            await exchange.write(faults.DONE)
        await exchange.end()
        await stream.drain()


async def relay(
    stream: DecodeStream, editor: StreamEditor, exchange: Exchange, stall_s: float, write_s: float
) -> None:
    """The engine's stream to the client, event by event; the head of the answer is out already.

    Raises:
        EngineFailed: the stream broke, or ended without [DONE]. EngineTimeout: it was silent for `stall_s`.
        ClientGone: the client took nothing for `write_s`.
    """
    with Watchdog() as dog:
        try:
            block = stream.first
            while block:
                out = editor.take(block)
                if out:
                    dog.expect(StreamEnd.CLIENT, write_s)
                    await exchange.write(out)
                if editor.done or editor.fault is not None:
                    return
                dog.expect(StreamEnd.ENGINE, stall_s)
                block = await stream.next()
        except asyncio.CancelledError:
            if dog.fired is None or exchange.gone:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            if dog.fired is StreamEnd.CLIENT:
                exchange.gone = True
                raise ClientGone from None
            raise EngineTimeout(f"The engine sent nothing for {stall_s:g} s.") from None
    raise EngineFailed("The engine's stream ended in the middle of the answer.")
