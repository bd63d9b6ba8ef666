"""One request from plan to last byte: a plan, legs that answer, the answer, and the report to the conductor."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from mooncache.errors import EngineDied, EngineFailed, EngineTimeout, MooncacheError
from mooncache.gateway.core import faults, plan
from mooncache.gateway.core.prepared import Prepared
from mooncache.gateway.core.sse import edit_answer
from mooncache.gateway.shell.account import BYTES_PER_TOKEN, Account
from mooncache.gateway.shell.exchange import SILENCE_MAX_S, Exchange
from mooncache.gateway.shell.leg_runner import LegRunner
from mooncache.gateway.shell.legs import Opened
from mooncache.gateway.shell.relay import EngineStream, relay
from mooncache.gateway.shell.request_planner import RequestPlanner
from mooncache.gateway.state import GatewayState
from mooncache.proto.v1 import conductor_pb2 as pb

_DRAIN_S: Final = 0.25


class RequestDriver:
    """Serves one request; `run` is the whole interface."""

    def __init__(
        self, state: GatewayState, exchange: Exchange, prepared: Prepared, *, salt: str, body_bytes: int
    ) -> None:
        self._state, self._exchange, self._request = state, exchange, prepared.request
        self._settings = state.config.gateway
        tokenized = prepared.tokenized
        tokens = max(1, body_bytes // BYTES_PER_TOKEN if tokenized is None else tokenized.token_count)
        self._account = Account(state, exchange, prepared.request, tokens, is_tokenized=tokenized is not None)
        self._planner = RequestPlanner(state, exchange, prepared, tokens)
        self._legs = LegRunner(state, exchange, prepared, self._account, self._planner, salt)

    async def run(self) -> None:
        """Serve the request. Raises Refusal, MooncacheError, ClientGone; legs are closed in any case."""
        phase, code = pb.REQUEST_PHASE_FAILED, "CANCELLED"
        try:
            try:
                async with asyncio.timeout(self._settings.request_timeout_s):
                    await self._serve()
            except TimeoutError:
                limit_s = self._settings.request_timeout_s
                raise EngineTimeout(f"The request took longer than {limit_s:g} s.") from None
            phase, code = pb.REQUEST_PHASE_FINISHED, "OK"
            self._planner.served()
            if self._account.editor.fault is not None:
                phase, code = pb.REQUEST_PHASE_FAILED, self._account.editor.fault.name
        except faults.Refusal as refusal:
            code = refusal.fault.name
            raise
        except MooncacheError as error:
            code = error.name
            if isinstance(error, EngineDied) and self._account.opened is not None:
                self._planner.died()
            raise
        finally:
            if self._exchange.gone:
                phase, code = pb.REQUEST_PHASE_ABORTED, "CLIENT_GONE"
            planned = self._legs.planned_tokens()
            self._close(code)
            self._account.report_end(phase, code, planned)

    async def _serve(self) -> None:
        made = await self._planner.first()
        # Only now: what the conductor refuses costs the tenant nothing.
        self._account.charge(self._account.prompt_tokens)
        self._state.stats.overhead.observe(self._account.elapsed_ms() / 1e3)
        opened = self._account.opened = await self._legs.open(made)
        self._planner.release()
        self._legs.release()
        self._exchange.release_body()
        is_admin = self._exchange.require_caller().admin
        self._exchange.reply_headers |= plan.headers(self._account.plan or made, is_admin=is_admin)
        whole = opened.source is None
        self._account.report(pb.REQUEST_PHASE_FIRST_TOKEN, opened.record, answer_is_whole=whole)
        if opened.source is None:
            await self._legs.wait_for_prefill()
            body, opened.record.usage, opened.record.cache = edit_answer(
                opened.body, self._account.cached_tokens, self._legs.planned_tokens()
            )
            await self._exchange.reply(200, body)
        else:
            await self._stream(opened, opened.source)

    async def _stream(self, opened: Opened, source: EngineStream) -> None:
        stats, editor, exchange = self._state.stats, self._account.editor, self._exchange
        stats.ttft.labels(self._request.model).observe(self._account.elapsed_ms() / 1e3)
        editor.prefill_tokens = self._account.cached_tokens
        editor.planned_tokens = self._legs.planned_tokens()
        self._legs.follow_prefill()
        await exchange.begin_stream()
        stats.streams_open.inc()
        started_s = self._state.clock.now_s()
        try:
            await relay(
                source,
                editor,
                exchange,
                opened.first,
                self._settings.stall_timeout_s,
                SILENCE_MAX_S,
            )
        finally:
            stats.streams_open.dec()
            stats.events.inc(editor.event_count)
            if editor.event_count > 1:
                elapsed_s = self._state.clock.now_s() - started_s
                stats.tbt.labels(self._request.model).observe(elapsed_s / (editor.event_count - 1))
            opened.record.usage, opened.record.cache = editor.usage, editor.cache
        if not editor.done:
            await exchange.write(faults.DONE)
        await exchange.end()
        with contextlib.suppress(TimeoutError, EngineFailed):  # for the connection's next use
            async with asyncio.timeout(_DRAIN_S):
                await opened.answer.read_some()

    def _close(self, code: str) -> None:
        self._legs.close(code)
        if self._account.opened is not None:
            self._account.opened.answer.close()
            self._account.end(self._account.opened.record, code)
