"""Both legs of one request, until the decode leg has begun to answer.

core/next_step.py says what follows when a leg ends or its instance becomes suspect, `core/plan.py:Handover` how long
the decode leg waits for the prefill leg's blocks. Here that is carried out. Whatever way a request ends, both legs are
closed, so that no engine works for an answer that is not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

from mooncache.auth import session_token
from mooncache.client.keys import KEY_BYTES
from mooncache.errors import EngineFailed, EngineUnavailable, MooncacheError
from mooncache.gateway.core import body, faults
from mooncache.gateway.core.body import Prepared, TokenizedPrompt
from mooncache.gateway.core.faults import EndCode
from mooncache.gateway.core.next_step import (
    LegEnd,
    LegState,
    LegStep,
    end_of,
    next_step,
    prefill_may_follow,
    wants_plan,
)
from mooncache.gateway.core.plan import Handover, LegPlan, LegRecord, complete_tokens
from mooncache.gateway.core.queue_place import queue_place
from mooncache.gateway.shell.account import Account
from mooncache.gateway.shell.conductor import RequestPlanner
from mooncache.gateway.shell.engines import (
    AnswerTooLarge,
    DecodeSender,
    DecodeStream,
    Prefilled,
    open_decode,
    run_prefill,
)
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState
from mooncache.kvcache.leg_hint import LegHint, LegRole
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.logs import Event, get_logger

_LATE_PREFILL_S: Final = 0.05
_NOT_COME: Final = "not_come"  # label: the pool says so, when the time for the blocks is up

Answer = TypeVar("Answer")

log = get_logger(__name__)


class Leg(Generic[Answer]):
    """The leg of one role, sent again and again if need be.

    Attributes: `record` what is noted of the one that was sent last; `task` ends with its answer or its error.
    """

    def __init__(self, role: LegRole) -> None:
        self.role = role
        self.record = LegRecord(role)
        self.task: asyncio.Task[Answer] | None = None

    @property
    def state(self) -> LegState:
        task = self.task
        if task is None:
            return LegState.IDLE
        if not task.done():
            return LegState.RUNNING
        is_good = not task.cancelled() and task.exception() is None
        return LegState.ANSWERED if is_good else LegState.FAILED

    def send(self, record: LegRecord, attempt: Coroutine[Any, Any, Answer]) -> None:
        """It is under way from now on. Only for a leg that is IDLE."""
        self.record, self.task = record, asyncio.create_task(attempt)

    def answer(self) -> Answer:
        """What came of it. Raises its error. Only for a leg that has ended."""
        if self.task is None:
            raise RuntimeError("the leg is not under way")
        return self.task.result()

    def drop(self) -> None:
        """Give it up; its connection closes, so its engine stops. IDLE from now on."""
        task, self.task = self.task, None
        if task is None:
            return
        task.cancel()
        if task.done():
            _forget(task)
        else:
            task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    """Take a leg's result that has no use, so that nothing complains and the connection is given back."""
    if task.cancelled() or task.exception() is not None:
        return
    result = task.result()
    if isinstance(result, DecodeStream):
        result.close()


AnyLeg = Leg[Prefilled] | Leg[DecodeStream]


class LegRunner:
    """Sends the legs of the plan in force (`RequestPlanner.plan`) and replaces them."""

    def __init__(
        self,
        state: GatewayState,
        exchange: Exchange,
        prepared: Prepared,
        account: Account,
        planner: RequestPlanner,
        salt: str,
    ) -> None:
        self._state, self._exchange, self._account, self._planner = state, exchange, account, planner
        self._request, self._forward = prepared.request, prepared.forward
        self._tokenized = prepared.tokenized or TokenizedPrompt(lengths=())
        self._is_tokenized = prepared.tokenized is not None
        self._salt = salt
        self._queue_place: int | None = None
        self._settings = state.config.gateway
        self._handover = Handover()
        self._no_better: set[str] = set()
        self.prefill = Leg[Prefilled](LegRole.PREFILL)
        self.decode = Leg[DecodeStream](LegRole.DECODE)

    async def open(self) -> DecodeStream:
        """The decode leg's answer once it has begun, whatever has to be replaced until then. `close` closes it.

        Raises:
            Refusal, MooncacheError: of the leg that could not be replaced.
        """
        self._send_both()
        while True:
            await self._until_news()
            if self.prefill.state.has_ended:
                await self._prefill_ended()
            if self.decode.state.has_ended:
                try:
                    return self.decode.answer()
                except (faults.Refusal, MooncacheError) as error:
                    await self._decode_failed(error)
                    continue
            await self._leave_suspect_instances()
            await self._look_for_blocks()

    def release(self) -> None:
        """No leg will be sent again: a long stream need not hold what its request was made of."""
        self._forward = b""
        self._tokenized = TokenizedPrompt(lengths=())

    def close(self, code: str) -> None:
        """Give up what is open. Harmless to repeat."""
        self._drop(self.prefill, EndCode.UNNEEDED if code == EndCode.OK else code)
        self._drop(self.decode, code)

    # sending

    def _send_both(self) -> None:
        """Both legs of the plan instead of whatever is open."""
        self._drop(self.prefill, EndCode.REPLACED)
        self._account.cached_tokens = None
        plan = self._planner.plan
        if self._queue_place is None:  # a request of a batch may have waited for hours to be sent
            self._queue_place = queue_place(
                self._state.clock.wall_s(),
                priority=self._exchange.require_caller().priority_of(self._request.priority),
                offline=self._exchange.offline,
            )
        if plan.prefill is not None:
            self._send_prefill(plan.prefill)
        self._send_decode(plan.decode)

    def _send_prefill(self, to: LegPlan) -> None:
        self._drop(self.prefill, EndCode.REPLACED)
        prompt = self._tokenized.prompt_json or body.prompt_json(self._tokenized.prompts)
        hint = self._hint(LegRole.PREFILL, to, to.wait_tokens)
        running = run_prefill(
            self._state.engines,
            to,
            body.prefill_body(self._request.model, prompt, self._salt, hint, self._priority(to)),
            request_id=self._exchange.request_id,
            limit_s=self._settings.first_token_timeout_s,
        )
        self.prefill.send(self._account.begin(LegRole.PREFILL, to), running)

    def _send_decode(self, to: LegPlan) -> None:
        self._drop(self.decode, EndCode.REPLACED)
        wait_tokens = to.wait_tokens
        if self._planner.plan.prefill is not None and not wait_tokens:
            wait_tokens = complete_tokens(self._tokenized.lengths, self._tokenized.block_tokens)
        self._handover.sent(wait_tokens)
        is_stream, settings = self._request.stream, self._settings
        hint = self._hint(LegRole.DECODE, to, wait_tokens)
        opening = open_decode(
            self._sender(),
            to,
            self._request.path,
            body.decode_body(self._forward, self._salt, hint, self._priority(to)),
            self._exchange,
            is_stream=is_stream,
            limit_s=settings.first_token_timeout_s if is_stream else settings.request_timeout_s,
        )
        self.decode.send(self._account.begin(LegRole.DECODE, to), opening)

    def _priority(self, to: LegPlan) -> int | None:
        """The place in the queue of an engine that takes one. A leg that is sent again keeps its place."""
        return self._queue_place if to.orders_by_priority else None

    def _sender(self) -> DecodeSender:
        """What sends the decode leg."""
        return self._state.engines

    def _hint(self, role: LegRole, to: LegPlan, wait_tokens: int) -> LegHint:
        public = self._tokenized.public_tokens
        return LegHint(
            role=role,
            wait_tokens=wait_tokens,
            wait_ms=to.wait_ms,
            public_tokens=public,
            public_salt=self._state.tokenizers.public_salt if public else "",
            store_node=self._planner.plan.store_node if wait_tokens or role is LegRole.PREFILL else "",
            request_id=self._exchange.request_id,
            decision_id=self._planner.plan.decision_id,
            expected_ms=to.expected_ms,
            session_token=self._session_token(),
        )

    def _session_token(self) -> str:
        """What the engine shows to the pool's nodes: nothing for blocks that are not one tenant's."""
        tenant, state = self._planner.pool_tenant, self._state
        return session_token(state.tokens.signing, tenant, state.clock.wall_s()).text if tenant else ""

    def _drop(self, leg: AnyLeg, code: str) -> None:
        if leg.state is not LegState.IDLE:
            self._account.end(leg.record, code)
            leg.drop()

    # what happens to legs

    async def _until_news(self) -> None:
        """Return when a leg has ended, sits on an instance that has become suspect, or has waited long enough."""
        tasks = [leg.task for leg in self._legs() if leg.task is not None]
        names = {leg.record.instance for leg in self._legs() if leg.task is not None} - self._no_better
        alarm = self._state.alarms.listen(names)
        try:
            left_s = self._handover.left_s(self._state.clock.now_s())
            await asyncio.wait((*tasks, alarm), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._state.alarms.leave(alarm, names)

    async def _prefill_ended(self) -> None:
        error = self._note_prefill()
        if error is None:
            if self._is_tokenized and not self.decode.state.has_ended:
                self._handover.prefilled(self._planner.plan.decode, self._state.clock.now_s())
        elif isinstance(error, (faults.Refusal, MooncacheError)):
            await self._replace(self.prefill, error)
        else:
            raise error

    async def _decode_failed(self, error: faults.Refusal | MooncacheError) -> None:
        fault = error.fault if isinstance(error, faults.Refusal) else error
        self._account.end(self.decode.record, fault.name)
        if isinstance(error, AnswerTooLarge):
            self._account.lost_bytes = error.size_bytes
        await self._replace(self.decode, error)

    async def _leave_suspect_instances(self) -> None:
        """Send legs without an answer away from instances that have become suspect, when others would take them."""
        for leg in self._legs():
            instance = leg.record.instance
            if leg.state is not LegState.RUNNING or instance in self._no_better:
                continue
            if self._state.alarms.is_sick(instance):
                await self._replace(leg, None)
                if instance not in self._no_better:
                    return

    async def _replace(self, leg: AnyLeg, error: faults.Refusal | MooncacheError | None) -> None:
        """Carry out what core/next_step.py says of a leg that failed, or whose instance is suspect (`error` None).

        Raises `error` when the leg cannot be replaced.
        """
        end = LegEnd.SUSPECT if error is None else end_of(error)
        attempts, old = self._planner.attempts, self._planner.plan
        may_die_again = end is not LegEnd.DIED or self._planner.died()
        if leg.role is LegRole.PREFILL and self.decode.state.has_ended and may_die_again:
            return  # it has found another way already
        new = None
        if end is not LegEnd.REFUSED:
            attempts.failed(leg.record.instance, prefill=leg.role is LegRole.PREFILL)
        if wants_plan(
            leg.role,
            end,
            attempts,
            prefill_attempts=self._settings.prefill_attempts,
            may_die_again=may_die_again,
        ):
            new = await self._planner.another()
        if new is not None and new.decision_id:
            # Even if it is not carried out: the conductor counts it, and the old one no more.
            self._planner.take(new)
        if end is LegEnd.SUSPECT and leg.state.has_ended:
            return  # it has answered after all
        step = next_step(leg.role, end, old, new, may_die_again=may_die_again)
        self._log(leg, end, step)
        if error is not None and step is LegStep.FAIL:
            raise error
        if leg.role is LegRole.PREFILL and self.decode.state.has_ended:
            return  # its answer came while the conductor was asked
        if step is LegStep.GO_ON:
            self._no_better.add(leg.record.instance)
            return
        if end is LegEnd.SUSPECT:
            self._account.end(leg.record, EndCode.SUSPECT)
        if new is not None:
            self._planner.take(new)
        self._send_again(leg.role, step)

    def _send_again(self, role: LegRole, step: LegStep) -> None:
        """Send what the step says, of the plan in force."""
        plan = self._planner.plan
        if step is LegStep.RECOMPUTE:
            self._state.stats.recomputed.inc()
            self._decode_alone(replace(plan.decode, wait_tokens=0, wait_ms=0))
            return
        self._state.stats.retries.labels(role).inc()
        if step is LegStep.SEND_PREFILL and plan.prefill is not None:
            self._account.cached_tokens = None
            self._send_prefill(plan.prefill)
        else:
            self._send_both()

    def _decode_alone(self, to: LegPlan) -> None:
        """The decode leg again, for a plan without a prefill leg."""
        self._planner.plan = replace(self._planner.plan, prefill=None)
        self._send_decode(to)

    def _log(self, leg: AnyLeg, end: LegEnd, step: LegStep) -> None:
        """A leg that failed; not one that is refused, nor one that goes on where it is."""
        if end is LegEnd.REFUSED or step is LegStep.GO_ON:
            return
        log.warning(
            Event.LEG_FAILED,
            leg=leg.role,
            instance=leg.record.instance,
            code=EngineUnavailable.name if end is LegEnd.SUSPECT else leg.record.code,
            again=step in (LegStep.SEND_PREFILL, LegStep.SEND_BOTH),
        )

    # the hand-over

    async def _look_for_blocks(self) -> None:
        """Ask the pool when the time for the hand-over is up; where it cannot be asked the leg's own limit holds."""
        block_tokens = self._tokenized.block_tokens
        if self.decode.state.has_ended or block_tokens < 1:
            return
        if not self._handover.is_due(self._state.clock.now_s()):
            return
        blocks = self._handover.awaited_tokens // block_tokens
        keys = self._tokenized.keys[: blocks * KEY_BYTES]
        there = await self._state.conductor.find_blocks(
            keys, self._planner.plan.store_node, self._planner.pool_tenant
        )
        if there is None or there >= blocks or self.decode.state.has_ended:
            return
        to = replace(self._planner.plan.decode, wait_tokens=0, wait_ms=0)
        tokens, reason = self._handover.awaited_tokens, _NOT_COME
        log.warning(Event.HANDOVER_MISSED, instance=to.instance_id, reason=reason, tokens=tokens)
        self._state.stats.waits_cut.labels(reason).inc()
        self._decode_alone(to)  # what the pool has by now it finds

    # a prefill leg that ends when the decode leg has begun to answer: nothing is left to decide

    def planned_tokens(self) -> int | None:
        """What caches held when the plan was made, while the prefill leg has not said."""
        return None if self.prefill.state is LegState.IDLE else self._planner.plan.hit_tokens

    async def wait_for_prefill(self) -> None:
        """A whole answer may overtake the prefill leg's own by a moment, and that one knows what was cached."""
        task = self.prefill.task
        if task is not None:
            await asyncio.wait({task}, timeout=_LATE_PREFILL_S)
            if task.done():
                self._prefill_came_late(task)

    def follow_prefill(self) -> None:
        """Note the prefill leg's end while the answer is being sent."""
        if self.prefill.task is not None:
            self.prefill.task.add_done_callback(self._prefill_came_late)

    def _prefill_came_late(self, task: asyncio.Task[Prefilled]) -> None:
        if task is self.prefill.task and not task.cancelled():
            self._note_prefill()
            self._account.editor.prefill_tokens = self._account.cached_tokens

    def _note_prefill(self) -> BaseException | None:
        """The prefill leg is over: note how, tell the conductor, and return what went wrong."""
        record, task = self.prefill.record, self.prefill.task
        if task is None:
            return None
        error = task.exception()
        if error is None:
            record.usage, record.cache = task.result()
            self._account.end(record, EndCode.OK)
            self._account.cached_tokens = record.cached_tokens
            self._account.report(pb.REQUEST_PHASE_PREFILLED, record)
        else:
            fault = error.fault if isinstance(error, faults.Refusal) else error
            self._account.end(record, getattr(fault, "name", EngineFailed.name))
            self._account.report(
                pb.REQUEST_PHASE_PREFILL_FAILED, record, prefill_may_follow=self._may_prefill_again(error)
            )
        self.prefill.drop()
        return error

    def _may_prefill_again(self, error: BaseException) -> bool:
        """Whether another prefill leg may be sent after this one, for which a decode leg still waits."""
        attempts, most = self._planner.attempts, self._settings.prefill_attempts
        follows = prefill_may_follow(end_of(error), attempts, prefill_attempts=most)
        return follows and not self.decode.state.has_ended

    def _legs(self) -> tuple[AnyLeg, ...]:
        return (self.decode, self.prefill)
