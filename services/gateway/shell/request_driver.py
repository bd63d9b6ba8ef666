"""One request from plan to last byte: both legs at the same time, retries, and the report to the conductor.

The rules are in core/plan.py. Here they are carried out: a failed prefill leg is replaced while the decode leg waits,
or the decode leg is sent again without anything to wait for; a failed decode leg is replaced as long as the client has
seen no token. Whatever way a request ends, both legs are closed, so that no engine works for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any, Final

from mooncache.client.keys import KEY_BYTES
from mooncache.errors import (
    EngineDied,
    EngineFailed,
    EngineTimeout,
    EngineUnavailable,
    MooncacheError,
    NoInstances,
)
from mooncache.gateway.core import faults, legs, plan
from mooncache.gateway.core.handover import Handover
from mooncache.gateway.core.offenders import TRIES_MAX, digest_of
from mooncache.gateway.core.plan import Attempts, LegPlan, RequestPlan
from mooncache.gateway.core.prepared import Prepared, TokenizedPrompt
from mooncache.gateway.core.sse import edit_answer
from mooncache.gateway.messages import plan_of, schedule_request
from mooncache.gateway.shell.account import BYTES_PER_TOKEN, Account
from mooncache.gateway.shell.engines import AnswerTooLarge
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.shell.legs import LegRecord, Opened, open_decode, run_prefill
from mooncache.gateway.shell.relay import relay
from mooncache.gateway.state import GatewayState
from mooncache.kvcache.leg_hint import LegHint
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.logs import Event, get_logger

_DRAIN_S: Final = 0.25
_LATE_PREFILL_S: Final = 0.05

log = get_logger(__name__)


class RequestDriver:
    """See the module's text. `run` is the whole interface."""

    def __init__(
        self, state: GatewayState, exchange: Exchange, prepared: Prepared, *, salt: str, body_bytes: int
    ) -> None:
        self._state, self._exchange = state, exchange
        self._request, self._tokenized, self._forward = prepared.request, prepared.tokenized, prepared.forward
        self._settings = state.config.gateway
        self._salt = salt
        self._attempts = Attempts()
        self._no_better: set[str] = set()
        self._digest = digest_of(prepared.request.path, prepared.forward)
        self._prefill: asyncio.Task[LegRecord] | None = None
        self._decode: asyncio.Task[Opened] | None = None
        self._handover = Handover()
        tokens = (
            prepared.tokenized.token_count
            if prepared.tokenized is not None
            else body_bytes // BYTES_PER_TOKEN
        )
        self._account = Account(
            state, exchange, prepared.request, max(1, tokens), is_tokenized=prepared.tokenized is not None
        )

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
            self._state.offenders.served(self._digest)
            if self._account.editor.fault is not None:
                phase, code = pb.REQUEST_PHASE_FAILED, self._account.editor.fault.name
        except faults.Refusal as refusal:
            code = refusal.fault.name
            raise
        except MooncacheError as error:
            code = error.name
            if isinstance(error, EngineDied) and self._account.opened is not None:
                self._died()
            raise
        finally:
            if self._exchange.gone:
                phase, code = pb.REQUEST_PHASE_ABORTED, "CLIENT_GONE"
            planned = self._planned_tokens()
            self._close(code)
            self._account.report_end(phase, code, planned)

    async def _serve(self) -> None:
        self._state.offenders.refuse_offender(self._digest, self._state.clock.now_s())
        self._account.plan = await self._schedule()
        # Only now: what the conductor refuses costs the tenant nothing.
        self._account.charge(self._account.prompt_tokens)
        self._state.stats.overhead.observe(self._account.elapsed_ms() / 1e3)
        self._dispatch()
        opened = self._account.opened = await self._until_open()
        self._decode = None
        self._let_go()
        assert self._exchange.caller is not None
        self._exchange.reply_headers |= plan.headers(self._account.plan, is_admin=self._exchange.caller.admin)
        whole = opened.source is None
        self._account.report(pb.REQUEST_PHASE_FIRST_TOKEN, opened.record, answer_is_whole=whole)
        if opened.source is None:
            await self._wait_for_prefill()
            body, opened.record.usage, opened.record.cache = edit_answer(
                opened.body, self._account.cached_tokens, self._planned_tokens()
            )
            await self._exchange.reply(200, body)
            return
        await self._stream(opened)

    def _let_go(self) -> None:
        """No leg will be sent again: a long stream need not hold what its request was made of."""
        self._forward = b""
        if self._tokenized is not None:
            self._tokenized = TokenizedPrompt(
                self._tokenized.lengths, block_tokens=self._tokenized.block_tokens
            )
        self._exchange.release_body()

    async def _stream(self, opened: Opened) -> None:
        assert opened.source is not None
        stats, editor, exchange = self._state.stats, self._account.editor, self._exchange
        stats.ttft.labels(self._request.model).observe(self._account.elapsed_ms() / 1e3)
        editor.prefill_tokens, editor.planned_tokens = self._account.cached_tokens, self._planned_tokens()
        if self._prefill is not None:
            self._prefill.add_done_callback(self._prefill_came_late)
        await exchange.begin_stream()
        stats.streams_open.inc()
        started_s = self._state.clock.now_s()
        try:
            await relay(
                opened.source,
                editor,
                exchange,
                opened.first,
                self._settings.stall_timeout_s,
                self._settings.write_timeout_s,
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

    # plans

    async def _schedule(self) -> RequestPlan:
        """Ask the conductor, or choose alone. Raises Refusal."""
        request, tokenized, attempts = self._request, self._tokenized, self._attempts
        caller = self._exchange.caller
        assert caller is not None
        asked = schedule_request(
            self._exchange.request_id,
            caller.tenant,
            request,
            tokenized,
            attempts,
            prompt_tokens=self._account.prompt_tokens,
            is_admin=caller.admin,
        )
        response = await self._state.conductor.schedule(asked)
        # A conductor that was just started knows fewer models than the last list: that is no 404.
        if response is not None and response.reason != pb.ADMISSION_REASON_UNKNOWN_MODEL:
            return plan_of(response, request.model, no_prefill=asked.no_prefill)
        self._state.stats.unscheduled.inc()
        instance = self._state.fleet.next_instance(request.model, attempts.exclude)
        if instance is None:
            raise faults.refuse(NoInstances(f"No instance that serves {request.model} can be reached now."))
        return RequestPlan(LegPlan(instance.instance_id, instance.url), summary="unscheduled")

    async def _reschedule(self) -> RequestPlan | None:
        """A plan for another attempt; None when there is none."""
        try:
            return await self._schedule()
        except (faults.Refusal, MooncacheError):
            return None

    def _dispatch(self) -> None:
        """Send both legs of the current plan."""
        assert self._account.plan is not None
        if self._account.plan.prefill is not None:
            self._start_prefill(self._account.plan.prefill)
        self._start_decode(self._account.plan.decode)

    def _start_prefill(self, leg: LegPlan) -> None:
        assert self._tokenized is not None, "see messages.plan_of: no_prefill"
        ask = self._ask("prefill", leg.wait_tokens, leg.wait_ms)
        prompt = self._tokenized.prompt_json or legs.prompt_json(self._tokenized.prompts)
        body = legs.prefill_body(self._request.model, prompt, self._salt, ask)
        record = self._account.begin("prefill", leg)
        self._prefill = asyncio.create_task(
            run_prefill(
                self._state.engines,
                leg,
                body,
                record,
                request_id=self._exchange.request_id,
                limit_s=self._settings.first_token_timeout_s,
            )
        )

    def _start_decode(self, leg: LegPlan) -> None:
        assert self._account.plan is not None
        wait_tokens = leg.wait_tokens
        if self._account.plan.prefill is not None and self._tokenized is not None and not wait_tokens:
            wait_tokens = legs.complete_tokens(self._tokenized.lengths, self._tokenized.block_tokens)
        self._handover.sent(wait_tokens)
        body = legs.decode_body(self._forward, self._salt, self._ask("decode", wait_tokens, leg.wait_ms))
        stream = self._request.stream
        settings = self._settings
        self._decode = asyncio.create_task(
            open_decode(
                self._state.engines,
                leg,
                self._request.path,
                body,
                self._account.begin("decode", leg),
                self._exchange,
                stream=stream,
                limit_s=settings.first_token_timeout_s if stream else settings.request_timeout_s,
            )
        )

    def _ask(self, role: str, wait_tokens: int, wait_ms: int) -> LegHint:
        public = self._tokenized.public_tokens if self._tokenized is not None else 0
        return LegHint(
            role=role,
            wait_tokens=wait_tokens,
            wait_ms=wait_ms,
            public_tokens=public,
            public_salt=self._state.tokenizers.public_salt if public else "",
            request_id=self._exchange.request_id,
        )

    # legs that end

    async def _until_open(self) -> Opened:
        """The decode leg's first answer, whatever has to be replaced until then."""
        while True:
            await self._until_news()
            if self._prefill is not None and self._prefill.done():
                await self._prefill_ended()
            if self._decode is not None and self._decode.done():
                record = self._account.last("decode")
                try:
                    opened = self._decode.result()
                except faults.Refusal as refusal:
                    self._account.end(record, refusal.fault.name)
                    if isinstance(refusal, AnswerTooLarge):
                        self._account.lost_bytes = refusal.size_bytes
                    raise
                except MooncacheError as error:
                    self._account.end(record, error.name)
                    await self._decode_failed(record, error)
                    continue
                return opened
            await self._leave_the_sick()
            await self._look_for_blocks()

    async def _prefill_ended(self) -> None:
        assert self._prefill is not None
        task, self._prefill = self._prefill, None
        error = task.exception()
        record = self._report_prefill(error)
        if isinstance(error, faults.Refusal):
            # Another instance would refuse it too; the decode leg's own answer tells the client.
            self._recompute()
            return
        if isinstance(error, MooncacheError) and (not isinstance(error, EngineDied) or self._died()):
            await self._prefill_failed(record)
            return
        if error is not None:
            raise error
        self._bound_wait(record)

    def _bound_wait(self, record: LegRecord) -> None:
        """The prefill leg has ended well: what was not stored will not come, and what was comes soon."""
        made = self._account.plan
        if made is None or self._tokenized is None or self._decode is None or self._decode.done():
            return
        held = (
            record.cache.held_tokens if record.cache is not None and len(self._tokenized.lengths) == 1 else -1
        )
        less = self._handover.prefilled(made.decode, held, self._state.clock.now_s())
        if less is not None:
            self._wait_less("not_stored", less)

    async def _look_for_blocks(self) -> None:
        """Ask the pool when the time for the hand-over is up; where it cannot be asked the leg's own limit holds."""
        made, tokenized = self._account.plan, self._tokenized
        if self._decode is None or self._decode.done() or made is None or tokenized is None:
            return
        if tokenized.block_tokens < 1 or not self._handover.is_due(self._state.clock.now_s()):
            return
        blocks = self._handover.awaited_tokens // tokenized.block_tokens
        there = await self._state.conductor.find_blocks(tokenized.keys[: blocks * KEY_BYTES])
        if there is not None and there < blocks and not self._decode.done():
            self._wait_less("not_come", replace(made.decode, wait_tokens=0, wait_ms=0))

    def _wait_less(self, reason: str, leg: LegPlan) -> None:
        """Send the decode leg again with less to wait for; what the pool has by now it finds."""
        assert self._account.plan is not None
        tokens = self._handover.awaited_tokens
        log.warning(Event.HANDOVER_MISSED, instance=leg.instance_id, reason=reason, tokens=tokens)
        self._state.stats.waits_cut.labels(reason).inc()
        self._drop(self._decode, "REPLACED")
        self._account.plan = replace(self._account.plan, prefill=None)
        self._start_decode(leg)

    async def _until_news(self) -> None:
        """Return when a leg has ended, sits on an instance that has become suspect, or has waited long enough."""
        legs_open = {"prefill": self._prefill, "decode": self._decode}
        tasks: set[asyncio.Future[Any]] = {task for task in legs_open.values() if task}
        names = {
            self._account.last(leg).instance for leg, task in legs_open.items() if task
        } - self._no_better
        alarm = self._state.alarms.listen(names)
        try:
            left_s = self._handover.left_s(self._state.clock.now_s())
            await asyncio.wait({*tasks, alarm}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._state.alarms.leave(alarm, names)

    async def _leave_the_sick(self) -> None:
        """Send legs without an answer away from instances that have become suspect, when others would take them."""
        for leg in ("decode", "prefill"):
            task = self._decode if leg == "decode" else self._prefill
            if task is None or task.done():
                continue
            record = self._account.last(leg)
            if record.instance in self._no_better or not self._state.alarms.is_sick(record.instance):
                continue
            self._attempts.failed(record.instance, prefill=leg == "prefill")
            new = await self._reschedule()
            if task.done():
                return  # it has answered after all
            if new is None:
                self._no_better.add(record.instance)  # a slow engine is better than none
                continue
            log.warning(
                Event.LEG_FAILED, leg=leg, instance=record.instance, code=EngineUnavailable.name, again=True
            )
            self._state.stats.retries.labels(leg).inc()
            self._account.end(record, "SUSPECT")
            old, self._account.plan = self._account.plan, new
            self._drop(self._prefill, "REPLACED")
            self._prefill, self._account.cached_tokens = None, None
            if leg == "prefill" and old is not None and plan.keeps_decode(old, new) and new.prefill:
                self._start_prefill(new.prefill)
            else:
                self._drop(self._decode, "REPLACED")
                self._dispatch()
            return

    def _planned_tokens(self) -> int | None:
        """What caches held at first, while a prefill leg has not told; see usage.settle."""
        return (
            self._account.plan.hit_tokens
            if self._account.plan is not None and self._prefill is not None
            else None
        )

    async def _wait_for_prefill(self) -> None:
        """A whole answer may overtake the prefill leg's own by a moment, and that one knows what was cached."""
        if self._prefill is not None:
            task = self._prefill
            await asyncio.wait({task}, timeout=_LATE_PREFILL_S)
            if task.done():
                self._prefill_came_late(task)

    def _prefill_came_late(self, task: asyncio.Task[LegRecord]) -> None:
        """The prefill leg ended when the decode leg had begun to answer: nothing is left to decide."""
        if task is not self._prefill or task.cancelled():
            return
        self._prefill = None
        self._report_prefill(task.exception())
        self._account.editor.prefill_tokens = self._account.cached_tokens

    def _report_prefill(self, error: BaseException | None) -> LegRecord:
        """The prefill leg is over: note how, and tell the conductor."""
        record = self._account.last("prefill")
        if error is None:
            self._account.end(record, "OK")
            self._account.cached_tokens = record.cached_tokens
            self._account.report(pb.REQUEST_PHASE_PREFILLED, record)
        else:
            fault = error.fault if isinstance(error, faults.Refusal) else error
            self._account.end(record, getattr(fault, "name", EngineFailed.name))
            self._account.report(pb.REQUEST_PHASE_PREFILL_FAILED, record)
        return record

    def _died(self) -> bool:
        """An engine ended under this request; whether it may have another one."""
        self._attempts.deaths += 1
        total = self._state.offenders.died(self._digest, self._state.clock.now_s())
        log.warning(Event.ENGINE_DIED, deaths=total, model=self._request.model)
        return self._attempts.deaths < TRIES_MAX and total <= TRIES_MAX

    async def _prefill_failed(self, record: LegRecord) -> None:
        """Another instance while attempts are left, otherwise the decode instance computes the prompt."""
        assert self._account.plan is not None
        if self._decode is not None and self._decode.done():
            return  # it has found another way already
        old = self._account.plan
        self._attempts.failed(record.instance, prefill=True)
        new = None
        if self._attempts.prefill_failures < self._settings.prefill_attempts:
            new = await self._reschedule()
        log.warning(
            Event.LEG_FAILED, leg="prefill", instance=record.instance, code=record.code, again=new is not None
        )
        if new is None:
            self._recompute()
            return
        self._account.plan = new
        if self._decode is not None and self._decode.done():
            return  # its answer came while the conductor was asked
        self._state.stats.retries.labels("prefill").inc()
        if plan.keeps_decode(old, new) and new.prefill is not None:
            self._start_prefill(new.prefill)
        else:
            self._drop(self._decode, "REPLACED")
            self._dispatch()

    def _recompute(self) -> None:
        """Send the decode leg again with nothing to wait for."""
        assert self._account.plan is not None
        if self._decode is not None and self._decode.done():
            return
        self._state.stats.recomputed.inc()
        self._drop(self._decode, "REPLACED")
        self._account.plan = replace(self._account.plan, prefill=None)
        self._start_decode(replace(self._account.plan.decode, wait_tokens=0, wait_ms=0))

    async def _decode_failed(self, record: LegRecord, error: MooncacheError) -> None:
        """Another instance, or `error` when there is none left."""
        self._attempts.failed(record.instance, prefill=False)
        new = None
        may_retry = not isinstance(error, EngineDied) or self._died()
        if may_retry and self._attempts.decode_failures < plan.DECODE_ATTEMPTS:
            new = await self._reschedule()
        log.warning(
            Event.LEG_FAILED, leg="decode", instance=record.instance, code=record.code, again=new is not None
        )
        if new is None:
            raise error
        self._state.stats.retries.labels("decode").inc()
        self._drop(self._prefill, "REPLACED")
        self._prefill, self._account.cached_tokens = None, None
        self._account.plan = new
        self._dispatch()

    # ends

    def _drop(self, task: asyncio.Task[Any] | None, code: str) -> None:
        """Give a leg up; its connection closes, so its engine stops."""
        if task is None:
            return
        leg = "prefill" if task is self._prefill else "decode"
        self._account.end(self._account.last(leg), code)
        task.cancel()
        task.add_done_callback(_forget)

    def _close(self, code: str) -> None:
        self._drop(self._prefill, "UNNEEDED" if code == "OK" else code)
        self._drop(self._decode, code)
        if self._account.opened is not None:
            self._account.opened.answer.close()
            self._account.end(self._account.opened.record, code)


def _forget(task: asyncio.Task[Any]) -> None:
    """Take a dropped leg's result, so that nothing complains and an answer that came too late is closed."""
    if task.cancelled() or task.exception() is not None:
        return
    result = task.result()
    if isinstance(result, Opened):
        result.answer.close()
