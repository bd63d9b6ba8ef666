"""Both legs of one request, until the decode leg has begun to answer.

core/next_step.py says what follows when a leg ends or its instance becomes suspect, core/handover.py how long the
decode leg waits for the prefill leg's blocks. Here that is carried out. Whatever way a request ends, both legs are
closed, so that no engine works in vain.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Final

from mooncache.client.keys import KEY_BYTES
from mooncache.errors import EngineFailed, EngineUnavailable, MooncacheError
from mooncache.gateway.core import faults, legs
from mooncache.gateway.core.handover import Handover
from mooncache.gateway.core.next_step import LegEnd, LegStep, end_of, next_step, wants_plan
from mooncache.gateway.core.plan import LegPlan, RequestPlan
from mooncache.gateway.core.prepared import Prepared, TokenizedPrompt
from mooncache.gateway.shell.account import Account
from mooncache.gateway.shell.engines import AnswerTooLarge
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.shell.legs import Leg, LegRecord, Opened, open_decode, run_prefill
from mooncache.gateway.shell.request_planner import RequestPlanner
from mooncache.gateway.state import GatewayState
from mooncache.kvcache.leg_hint import LegHint, LegRole
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.logs import Event, get_logger

_LATE_PREFILL_S: Final = 0.05

log = get_logger(__name__)


class LegRunner:
    """Sends legs and replaces them.

    Attributes: `prefill` and `decode` are the legs that are open.
    """

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
        self._settings = state.config.gateway
        self._handover = Handover()
        self._no_better: set[str] = set()
        self._plan = RequestPlan(LegPlan("", ""))
        self.prefill: Leg[None] | None = None
        self.decode: Leg[Opened] | None = None

    async def open(self, made: RequestPlan) -> Opened:
        """The decode leg's first answer, whatever has to be replaced until then.

        Raises:
            Refusal, MooncacheError: of the leg that could not be replaced.
        """
        decode = self._send_both(made)
        while True:
            await self._until_news(decode)
            prefill = self.prefill
            if prefill is not None and prefill.has_ended:
                decode = await self._prefill_ended(prefill, decode)
            if decode.has_ended:
                try:
                    opened = decode.task.result()
                except (faults.Refusal, MooncacheError) as error:
                    decode = await self._decode_failed(decode, error)
                    continue
                self.decode = None
                return opened
            decode = await self._leave_suspect_instances(decode)
            decode = await self._look_for_blocks(decode)

    def release(self) -> None:
        """No leg will be sent again: a long stream need not hold what its request was made of."""
        self._forward = b""
        self._tokenized = TokenizedPrompt(lengths=())

    def close(self, code: str) -> None:
        """Give up what is open. Harmless to repeat."""
        if self.prefill is not None:
            self._drop(self.prefill, "UNNEEDED" if code == "OK" else code)
        if self.decode is not None:
            self._drop(self.decode, code)

    # sending

    def _use(self, made: RequestPlan) -> None:
        self._plan = self._account.plan = made

    def _send_both(self, made: RequestPlan) -> Leg[Opened]:
        """Both legs of a plan instead of whatever is open."""
        if self.prefill is not None:
            self._drop(self.prefill, "REPLACED")
        self.prefill, self._account.cached_tokens = None, None
        self._use(made)
        if made.prefill is not None:
            self._send_prefill(made.prefill)
        return self._send_decode(made.decode)

    def _send_prefill(self, to: LegPlan) -> None:
        if self.prefill is not None:
            self._drop(self.prefill, "REPLACED")
        prompt = self._tokenized.prompt_json or legs.prompt_json(self._tokenized.prompts)
        hint = self._hint(LegRole.PREFILL, to.wait_tokens, to.wait_ms)
        record = self._account.begin(LegRole.PREFILL, to)
        running = run_prefill(
            self._state.engines,
            to,
            legs.prefill_body(self._request.model, prompt, self._salt, hint),
            record,
            request_id=self._exchange.request_id,
            limit_s=self._settings.first_token_timeout_s,
        )
        self.prefill = Leg(LegRole.PREFILL, record, asyncio.create_task(running))

    def _send_decode(self, to: LegPlan) -> Leg[Opened]:
        if self.decode is not None:
            self._drop(self.decode, "REPLACED")
        wait_tokens = to.wait_tokens
        if self._plan.prefill is not None and not wait_tokens:
            wait_tokens = legs.complete_tokens(self._tokenized.lengths, self._tokenized.block_tokens)
        self._handover.sent(wait_tokens)
        stream, settings = self._request.stream, self._settings
        hint = self._hint(LegRole.DECODE, wait_tokens, to.wait_ms)
        record = self._account.begin(LegRole.DECODE, to)
        opening = open_decode(
            self._state.engines,
            to,
            self._request.path,
            legs.decode_body(self._forward, self._salt, hint),
            record,
            self._exchange,
            stream=stream,
            limit_s=settings.first_token_timeout_s if stream else settings.request_timeout_s,
        )
        self.decode = leg = Leg(LegRole.DECODE, record, asyncio.create_task(opening))
        return leg

    def _hint(self, role: LegRole, wait_tokens: int, wait_ms: int) -> LegHint:
        public = self._tokenized.public_tokens
        return LegHint(
            role=role,
            wait_tokens=wait_tokens,
            wait_ms=wait_ms,
            public_tokens=public,
            public_salt=self._state.tokenizers.public_salt if public else "",
            request_id=self._exchange.request_id,
        )

    def _drop(self, leg: Leg[Any], code: str) -> None:
        self._account.end(leg.record, code)
        leg.cancel()

    # what happens to legs

    async def _until_news(self, decode: Leg[Opened]) -> None:
        """Return when a leg has ended, sits on an instance that has become suspect, or has waited long enough."""
        open_legs: list[Leg[Any]] = [decode] if self.prefill is None else [decode, self.prefill]
        names = {leg.record.instance for leg in open_legs} - self._no_better
        alarm = self._state.alarms.listen(names)
        try:
            left_s = self._handover.left_s(self._state.clock.now_s())
            tasks: list[asyncio.Future[Any]] = [*(leg.task for leg in open_legs), alarm]
            await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._state.alarms.leave(alarm, names)

    async def _prefill_ended(self, prefill: Leg[None], decode: Leg[Opened]) -> Leg[Opened]:
        self.prefill = None
        error = prefill.task.exception()
        self._note_prefill(prefill, error)
        if error is None:
            return self._bound_wait(prefill.record, decode)
        if not isinstance(error, (faults.Refusal, MooncacheError)):
            raise error
        return await self._replace(prefill, error, decode)

    async def _decode_failed(
        self, decode: Leg[Opened], error: faults.Refusal | MooncacheError
    ) -> Leg[Opened]:
        fault = error.fault if isinstance(error, faults.Refusal) else error
        self._account.end(decode.record, fault.name)
        if isinstance(error, AnswerTooLarge):
            self._account.lost_bytes = error.size_bytes
        return await self._replace(decode, error, decode)

    async def _leave_suspect_instances(self, decode: Leg[Opened]) -> Leg[Opened]:
        """Send legs without an answer away from instances that have become suspect, when others would take them."""
        for leg in (decode, self.prefill):
            if leg is None or leg.has_ended or leg.record.instance in self._no_better:
                continue
            if self._state.alarms.is_sick(leg.record.instance):
                now_open = await self._replace(leg, None, decode)
                if leg.record.instance not in self._no_better:
                    return now_open
        return decode

    async def _replace(
        self, leg: Leg[Any], error: faults.Refusal | MooncacheError | None, decode: Leg[Opened]
    ) -> Leg[Opened]:
        """Carry out what core/next_step.py says of a leg that failed, or whose instance is suspect (`error` None).

        Returns the decode leg that is open then. Raises `error` when the leg cannot be replaced.
        """
        end = LegEnd.SUSPECT if error is None else end_of(error)
        attempts, old = self._planner.attempts, self._plan
        may_die_again = end is not LegEnd.DIED or self._planner.died()
        if leg.role is LegRole.PREFILL and decode.has_ended and may_die_again:
            return decode  # it has found another way already
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
        if end is LegEnd.SUSPECT and leg.has_ended:
            return decode  # it has answered after all
        step = next_step(leg.role, end, old, new, may_die_again=may_die_again)
        if new is not None:
            self._use(new)
        self._log(leg, end, step)
        if error is not None and step is LegStep.FAIL:
            raise error
        if leg.role is LegRole.PREFILL and decode.has_ended:
            return decode  # its answer came while the conductor was asked
        if step is LegStep.GO_ON:
            self._no_better.add(leg.record.instance)
            return decode
        if end is LegEnd.SUSPECT:
            self._account.end(leg.record, "SUSPECT")
        if step is LegStep.RECOMPUTE or new is None:
            return self._recompute()
        self._state.stats.retries.labels(leg.role).inc()
        if step is LegStep.SEND_PREFILL and new.prefill is not None:
            self._account.cached_tokens = None
            self._send_prefill(new.prefill)
            return decode
        return self._send_both(new)

    def _log(self, leg: Leg[Any], end: LegEnd, step: LegStep) -> None:
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

    def _recompute(self) -> Leg[Opened]:
        """The decode leg again with nothing to wait for."""
        self._state.stats.recomputed.inc()
        self._use(replace(self._plan, prefill=None))
        return self._send_decode(replace(self._plan.decode, wait_tokens=0, wait_ms=0))

    # the hand-over

    def _bound_wait(self, record: LegRecord, decode: Leg[Opened]) -> Leg[Opened]:
        """The prefill leg has ended well: what was not stored will not come, and what was comes soon."""
        if not self._is_tokenized or decode.has_ended:
            return decode
        one_prompt = len(self._tokenized.lengths) == 1
        held = record.cache.held_tokens if record.cache is not None and one_prompt else -1
        less = self._handover.prefilled(self._plan.decode, held, self._state.clock.now_s())
        return decode if less is None else self._wait_less("not_stored", less)

    async def _look_for_blocks(self, decode: Leg[Opened]) -> Leg[Opened]:
        """Ask the pool when the time for the hand-over is up; where it cannot be asked the leg's own limit holds."""
        block_tokens = self._tokenized.block_tokens
        if decode.has_ended or block_tokens < 1 or not self._handover.is_due(self._state.clock.now_s()):
            return decode
        blocks = self._handover.awaited_tokens // block_tokens
        there = await self._state.conductor.find_blocks(self._tokenized.keys[: blocks * KEY_BYTES])
        if there is None or there >= blocks or decode.has_ended:
            return decode
        return self._wait_less("not_come", replace(self._plan.decode, wait_tokens=0, wait_ms=0))

    def _wait_less(self, reason: str, to: LegPlan) -> Leg[Opened]:
        """The decode leg again with less to wait for; what the pool has by now it finds."""
        tokens = self._handover.awaited_tokens
        log.warning(Event.HANDOVER_MISSED, instance=to.instance_id, reason=reason, tokens=tokens)
        self._state.stats.waits_cut.labels(reason).inc()
        self._use(replace(self._plan, prefill=None))
        return self._send_decode(to)

    # a prefill leg that ends when the decode leg has begun to answer: nothing is left to decide

    def planned_tokens(self) -> int | None:
        """What caches held when the plan was made, while the prefill leg has not said; see usage.settle."""
        return self._plan.hit_tokens if self.prefill is not None else None

    async def wait_for_prefill(self) -> None:
        """A whole answer may overtake the prefill leg's own by a moment, and that one knows what was cached."""
        if self.prefill is not None:
            await asyncio.wait({self.prefill.task}, timeout=_LATE_PREFILL_S)
            if self.prefill.has_ended:
                self._prefill_came_late(self.prefill.task)

    def follow_prefill(self) -> None:
        """Note the prefill leg's end while the answer is being sent."""
        if self.prefill is not None:
            self.prefill.task.add_done_callback(self._prefill_came_late)

    def _prefill_came_late(self, task: asyncio.Task[None]) -> None:
        prefill = self.prefill
        if prefill is None or task is not prefill.task or task.cancelled():
            return
        self.prefill = None
        self._note_prefill(prefill, task.exception())
        self._account.editor.prefill_tokens = self._account.cached_tokens

    def _note_prefill(self, prefill: Leg[None], error: BaseException | None) -> None:
        """The prefill leg is over: note how, and tell the conductor."""
        record = prefill.record
        if error is None:
            self._account.end(record, "OK")
            self._account.cached_tokens = record.cached_tokens
            self._account.report(pb.REQUEST_PHASE_PREFILLED, record)
        else:
            fault = error.fault if isinstance(error, faults.Refusal) else error
            self._account.end(record, getattr(fault, "name", EngineFailed.name))
            self._account.report(pb.REQUEST_PHASE_PREFILL_FAILED, record)
