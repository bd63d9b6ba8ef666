"""The conductor, as the gateway sees it: where does a request go, and what became of it.

Without an answer requests go round robin over the instances of the last list: worse placed, but served. So they do when
the answer is an error that says nothing about the request: a defect, a limit on calls, a token that does not fit. What
the conductor decides (overloaded, too long, unknown model) is not an error and stays. After a silent conductor the next
request within a second does not wait for it again. Reports are sent in the background until they are acknowledged
(report_lanes.py). With standbys, a new leader hears first of the requests under way (open_requests.py).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from mooncache.client.conductor_link import ConductorLink
from mooncache.errors import (
    ConductorUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    MooncacheError,
    NoInstances,
    Overloaded,
    PromptTooLong,
    TooLarge,
)
from mooncache.gateway.core import faults
from mooncache.gateway.core.body import InferenceRequest, Prepared, TokenizedPrompt
from mooncache.gateway.core.faults import EndCode, Refusal
from mooncache.gateway.core.fleet import FleetView
from mooncache.gateway.core.offenders import TRIES_MAX, Offenders, digest_of
from mooncache.gateway.core.plan import Attempts, LegPlan, RequestPlan
from mooncache.gateway.metrics import GatewayMetrics
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.shell.instance_list import InstanceList
from mooncache.gateway.shell.open_requests import OPEN_MAX, OpenRequests
from mooncache.gateway.shell.report_lanes import REPORT_TIMEOUT_S, ReportLanes
from mooncache.kvcache.keys import other_shard_keys, shard_count
from mooncache.kvcache.passport import Passport
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.clock import Clock
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.metrics import observe
from mooncache.runtime.tasks import wait_for_event

if TYPE_CHECKING:
    import random

SHARD_BLOCKS_MAX: Final = 1024
SHARD_TOKENS_MAX: Final = (
    262_144  # of all shards together: some milliseconds of hashing, once for a hot prefix
)
# Without an answer in this time requests go round robin over the instances that are known.
_SCHEDULE_TIMEOUT_S: Final = 1.0
_LATE_PLAN_S: Final = 10.0  # a plan that comes later than its request could wait is still given back
_AVOID_S: Final = 1.0
_AVOID_SEVERAL_S: Final = 0.25
_RESUME_AGAIN_S: Final = 0.2
_ABSENT: Final = (ConductorUnavailable, DeadlineExceeded)

log = get_logger(__name__)


class Conductor:
    """Calls to the conductor, and the gateway's own choice of an instance when there is no answer.

    Args:
        fleet: the instances of the last list.
        rng: spreads what is tried again.
    """

    def __init__(
        self,
        link: ConductorLink,
        clock: Clock,
        stats: GatewayMetrics,
        fleet: FleetView,
        rng: random.Random,
    ) -> None:
        self._link, self._clock, self._stats, self._fleet = link, clock, stats, fleet
        self._avoid_until_s = 0.0
        self.present = True
        self._list = InstanceList()
        self._refusal = ""
        self._open = OpenRequests(clock)
        self._resumed_term = 0
        self._resuming = asyncio.Lock()
        self._me: Callable[[], pb.Gateway] | None = None
        self.gateway_id = ""
        self._run = rng.getrandbits(63) | 1  # of this process
        self._unanswered = asyncio.Event()
        self._reports = ReportLanes(link, clock, stats, rng, self._resume)
        self._lease_sequence = 0

    async def plan(self, asked: pb.ScheduleRequest) -> RequestPlan:
        """Where a request goes: the conductor's plan, or the next instance in turn.

        Raises:
            Refusal: the conductor does not admit the request, or no instance can be reached.
            InvalidArgument, TooLarge: see `schedule`.
        """
        response = await self.schedule(asked)
        if response is not None and response.admitted:
            self._open.add(asked, response)
        # A conductor that was just started knows fewer models than the last list: that is not a 404.
        if response is not None and response.reason != pb.ADMISSION_REASON_UNKNOWN_MODEL:
            return plan_of(response, asked.model, no_prefill=asked.no_prefill)
        if asked.offline:  # only the conductor knows what is idle
            raise faults.refuse(ConductorUnavailable("No conductor says whether anything is idle."))
        self._stats.unscheduled.inc()
        instance = self._fleet.next_instance(asked.model, asked.exclude)
        if instance is None:
            raise faults.refuse(NoInstances(f"No instance that serves {asked.model} can be reached now."))
        ordered = instance.orders_by_priority
        leg = LegPlan(instance.instance_id, instance.url, orders_by_priority=ordered)
        return RequestPlan(leg, summary="unscheduled")

    async def schedule(self, request: pb.ScheduleRequest) -> pb.ScheduleResponse | None:
        """Ask where a request goes; None when the conductor does not answer, or not to the question.

        A plan that comes too late, or whose caller is cancelled meanwhile, will not be carried out and is given back:
        the conductor would count it as work under way until its own limit.

        Raises:
            InvalidArgument, TooLarge: what is asked makes no sense to the conductor.
        """
        started_s = self._clock.now_s()
        if started_s < self._avoid_until_s:
            return None
        request.gateway_id, request.gateway_run = self.gateway_id, self._run
        call = asyncio.ensure_future(
            self._link.call("Schedule", request, pb.ScheduleResponse, max(_LATE_PLAN_S, _SCHEDULE_TIMEOUT_S))
        )
        try:
            response: pb.ScheduleResponse = await asyncio.wait_for(asyncio.shield(call), _SCHEDULE_TIMEOUT_S)
        except asyncio.CancelledError:
            self._unanswered.set()
            call.add_done_callback(partial(self._give_back, request.request_id, EndCode.CLIENT_GONE))
            raise
        except TimeoutError:
            self._unanswered.set()
            call.add_done_callback(partial(self._give_back, request.request_id, EndCode.REPLACED))
            self._avoid(DeadlineExceeded(f"The conductor made no plan within {_SCHEDULE_TIMEOUT_S:g} s."))
            return None
        except _ABSENT as error:
            self._unanswered.set()
            self._avoid(error)
            return None
        except (InvalidArgument, TooLarge):
            raise
        except MooncacheError as error:
            self._refused(error)
            return None
        self._refusal = ""
        observe(self._stats.schedule, self._clock.now_s() - started_s)
        self._note(None)
        return response

    def _avoid(self, error: MooncacheError) -> None:
        """Ask nothing for a moment: the next requests need not wait for the same."""
        # With standbys another one may lead at any moment.
        self._avoid_until_s = self._clock.now_s() + (_AVOID_SEVERAL_S if self._link.several else _AVOID_S)
        self._note(error)

    def _refused(self, error: MooncacheError) -> None:
        """Count an error, and log it when it differs from the last."""
        self._stats.conductor_errors.labels(error.name).inc()
        if error.name != self._refusal:
            self._refusal = error.name
            log.error(Event.CONDUCTOR_REFUSED, code=error.name, reason=error.message)

    def _give_back(self, request_id: str, code: EndCode, call: asyncio.Future[pb.ScheduleResponse]) -> None:
        if call.cancelled() or call.exception() is not None:
            return
        if call.result().admitted:
            self.give_back(request_id, call.result().decision_id, code)

    def give_back(self, request_id: str, decision_id: str, code: EndCode) -> None:
        """Nothing will be done by this decision, or nothing more: the conductor need not count it."""
        phase = pb.REQUEST_PHASE_ABORTED
        self.report(request_id, pb.ReportProgressRequest(decision_id=decision_id, phase=phase, code=code))

    async def find_blocks(self, keys: bytes, store_node: str, pool_tenant: str) -> int | None:
        """How many leading blocks of packed keys the pool has; None when the pool does not say. Never raises.

        store_node: at which a leg waits for them. When the pool has all of them, that leg looks again.
        """
        if self._clock.now_s() < self._avoid_until_s:
            return None
        try:
            response: pb.FindBlocksResponse = await self._link.call(
                "FindBlocks",
                pb.FindBlocksRequest(keys=keys, store_node=store_node, pool_tenant=pool_tenant),
                pb.FindBlocksResponse,
                _SCHEDULE_TIMEOUT_S,
            )
        except MooncacheError as error:
            self._refused(error)
            return None
        return response.leading_blocks if response.known else None

    async def list_instances(
        self, known_version: int, wait_s: float, me: pb.Gateway | None = None
    ) -> InstanceList:
        """Known instances; waits for a change. `me` tells the conductor who asks. Raises MooncacheError."""
        request = self._list.question(known_version, wait_s, me)
        try:
            response: pb.ListInstancesResponse = await self._link.call(
                "ListInstances", request, pb.ListInstancesResponse, wait_s + _SCHEDULE_TIMEOUT_S + 1.0
            )
        except _ABSENT as error:
            self._note(error)
            raise
        self._avoid_until_s = 0.0
        self._note(None)
        self._list.take(response)
        return self._list

    async def lease_limits(
        self, uses: Sequence[pb.LimitUse], timeout_s: float, *, whole: bool
    ) -> pb.LeaseLimitsResponse:
        """Say what is used of tenants' limits, and hear what may be used. Raises MooncacheError.

        whole: these are all of them.
        """
        self._lease_sequence += 1
        request = pb.LeaseLimitsRequest(
            gateway_id=self.gateway_id,
            gateway_run=self._run,
            sequence=self._lease_sequence,
            uses=uses,
            whole=whole,
        )
        return await self._link.call("LeaseLimits", request, pb.LeaseLimitsResponse, timeout_s)

    def report(self, request_id: str, report: pb.ReportProgressRequest, *, at_once: bool = False) -> None:
        """Report soon; never waits. There is nothing to report of decisions that no conductor made."""
        if not report.decision_id:
            return
        self._reports.add(request_id, report, at_once=at_once)
        self._open.reported(report)

    async def send_reports(self, lane: int) -> None:
        """Send the reports of one lane until cancelled."""
        await self._reports.run(lane)

    async def follow_leader(self, me: Callable[[], pb.Gateway]) -> None:
        """Tell each new leader of the requests under way, until cancelled. me: this gateway, as it is then."""
        self._me = me
        while True:
            term = await self._link.moved(self._resumed_term)
            self._avoid_until_s = 0.0
            await self._resume(term)
            await self._clock.sleep(_RESUME_AGAIN_S)  # or at once again, when that failed

    async def _resume(self, term: int) -> None:
        """Tell the leader of this term what is under way, unless it knows."""
        if term == self._resumed_term or self._me is None:
            return
        async with self._resuming:
            if term == self._resumed_term:
                return
            try:
                for request in self._open.requests(self._me()):
                    await self._resume_call(request)
            except MooncacheError as error:
                self._refused(error)
                return
            self._resumed_term = term

    async def _resume_call(self, request: pb.ResumeRequestsRequest) -> None:
        """One part of what is under way. Raises MooncacheError."""
        request.gateway_run = self._run
        if request.last:  # a request that has ended is named until its end is acknowledged
            room = OPEN_MAX - len(request.open_decision_ids)
            request.open_decision_ids.extend(itertools.islice(self._reports.open_ends(), room))
        await self._link.call("ResumeRequests", request, pb.ResumeRequestsResponse, REPORT_TIMEOUT_S)

    async def unanswered(self, at_most_s: float) -> None:
        """Wait until a question for a plan got no answer, so that the conductor may count one that never came.

        A question that gets none after this is for the next wait: its plan is too young for the list that follows.
        """
        await wait_for_event(self._unanswered, at_most_s)
        self._unanswered.clear()

    async def name_open_requests(self, me: pb.Gateway) -> bool:
        """Name the decisions of all requests under way to the conductor; whether it has heard. Never raises."""
        try:
            await self._resume_call(self._open.named(me))
        except MooncacheError:
            return False
        return True

    async def flush(self) -> None:
        """Wait until every report is acknowledged, or the conductor is away; the caller bounds it."""
        while len(self._reports) and self.present:
            await self._clock.sleep(0.01)

    async def close(self) -> None:
        await self._link.close()

    def _note(self, error: MooncacheError | None) -> None:
        """Log a change between present and absent, once."""
        if error is not None and self.present:
            log.warning(Event.CONDUCTOR_LOST, reason=error.message)
        elif error is None and not self.present:
            log.info(Event.CONDUCTOR_FOUND)
        self.present = error is None


class RequestPlanner:
    """The plans of one request: asks for them, keeps the one in force, counts what was tried.

    Attributes: `plan` names no instance until the first one is made; `attempts` what was tried; `prompt_tokens` an
    estimate where the prompt is not tokenized; `pool_tenant` whose blocks the prompt's are at the store nodes, "" for
    the engines' own.
    """

    def __init__(
        self,
        conductor: Conductor,
        offenders: Offenders,
        clock: Clock,
        exchange: Exchange,
        prepared: Prepared,
        prompt_tokens: int,
        pool_tenant: str = "",
    ) -> None:
        self._conductor, self._offenders, self._clock, self._exchange = conductor, offenders, clock, exchange
        self._request, self._tokenized = prepared.request, prepared.tokenized
        self._digest = digest_of(prepared.request.path, prepared.forward)
        self.plan = RequestPlan(LegPlan("", ""))
        self.attempts, self.prompt_tokens, self.pool_tenant = Attempts(), prompt_tokens, pool_tenant

    async def first(self) -> None:
        """Make the first plan. Raises Refusal: no engine may or can serve it, or engines ended under it before."""
        self._offenders.refuse_offender(self._digest, self._clock.now_s())
        self.plan = await self._schedule()

    async def another(self) -> RequestPlan | None:
        """A plan for another attempt, not yet in force; None when there is none."""
        try:
            return await self._schedule()
        except (faults.Refusal, MooncacheError):
            return None

    def take(self, plan: RequestPlan) -> None:
        """Put another plan in force. The conductor hears of the old one's end when it did not make the new one."""
        old, self.plan = self.plan, plan
        if old.decision_id and not plan.decision_id:
            self._conductor.give_back(self._exchange.request_id, old.decision_id, EndCode.REPLACED)

    def served(self) -> None:
        """The request has its answer: it is not the kind that ends engines."""
        self._offenders.served(self._digest)

    def died(self) -> bool:
        """An engine ended under this request; whether it may have another one."""
        self.attempts.deaths += 1
        total = self._offenders.died(self._digest, self._clock.now_s())
        log.warning(Event.ENGINE_DIED, deaths=total, model=self._request.model)
        return self.attempts.deaths < TRIES_MAX and total <= TRIES_MAX

    def shard_keys(self, passport: Passport, salt: str, public_salt: str) -> bytes:
        """The keys that the plan asks for, of its `shard_blocks` under the passports of the engine's other shards."""
        tokenized = self._tokenized
        if tokenized is None or not tokenized.prompts or passport.root() != tokenized.passport_root:
            return b""  # or the engines changed since the prompt's keys were made
        blocks_max = SHARD_TOKENS_MAX // (shard_count(passport) * passport.block_tokens)
        return other_shard_keys(
            passport,
            max(tokenized.prompts, key=len),
            min(self.plan.shard_blocks, blocks_max),
            salt=salt,
            public_tokens=tokenized.public_tokens,
            public_salt=public_salt,
        )

    def release(self) -> None:
        """No further plan will be asked for: forget the prompt."""
        self._tokenized = None

    async def _schedule(self) -> RequestPlan:
        caller = self._exchange.require_caller()
        asked = schedule_request(
            self._exchange.request_id,
            caller.tenant,
            self._request,
            self._tokenized,
            self.attempts,
            prompt_tokens=self.prompt_tokens,
            priority=caller.priority_of(self._request.priority),
            pool_tenant=self.pool_tenant,
            offline=self._exchange.offline,
        )
        return await self._conductor.plan(asked)


def schedule_request(
    request_id: str,
    tenant: str,
    request: InferenceRequest,
    tokenized: TokenizedPrompt | None,
    attempts: Attempts,
    *,
    prompt_tokens: int,
    priority: int,
    pool_tenant: str = "",
    offline: bool = False,
) -> pb.ScheduleRequest:
    """The question. Keys are left out where no cache can help. priority: of its caller, not what its body says.

    offline: it takes what is idle; a promise that it names is nothing then.
    """
    whole = request.whole_prompt
    return pb.ScheduleRequest(
        request_id=request_id,
        tenant=tenant,
        model=request.model,
        prompt_tokens=prompt_tokens,
        keys=tokenized.keys if tokenized and not whole else b"",
        content_keys=tokenized.content_keys if tokenized and not whole else b"",
        passport_root=tokenized.passport_root if tokenized else b"",
        max_output_tokens=request.max_output_tokens,
        ttft_slo_ms=0 if offline else request.ttft_slo_ms,
        tbt_slo_ms=0 if offline else request.tbt_slo_ms,
        sequence_count=request.choices,
        exclude=attempts.exclude,
        attempt=attempts.number,
        no_prefill=tokenized is None or not tokenized.block_tokens or whole,
        session=f"{tenant}/{request.session}" if request.session else "",
        priority=priority,
        pool_tenant=pool_tenant,
        offline=offline,
    )


def plan_of(response: pb.ScheduleResponse, model: str, *, no_prefill: bool = False) -> RequestPlan:
    """The plan that the conductor made. Raises Refusal when it did not admit the request.

    no_prefill: the prompt cannot be prefilled elsewhere. A prefill leg is left out then, whatever the conductor says,
    and the decode leg waits for nothing.
    """
    if not response.admitted:
        raise _refusal(response, model)
    decode, prefill = _leg(response.decode), _leg(response.prefill)
    apart = prefill.instance_id not in ("", decode.instance_id)
    if apart and no_prefill:
        apart = False
        decode = LegPlan(decode.instance_id, decode.url, orders_by_priority=decode.orders_by_priority)
    return RequestPlan(
        decode=decode,
        prefill=prefill if apart else None,
        decision_id=response.decision_id,
        summary=response.summary,
        hit_tokens=max(response.local_hit_tokens, response.pool_hit_tokens),
        store_node=response.store_node,
        shard_blocks=min(response.shard_blocks, SHARD_BLOCKS_MAX),
    )


def _leg(leg: pb.Leg) -> LegPlan:
    return LegPlan(
        leg.instance_id,
        leg.url,
        leg.wait_tokens,
        leg.wait_ms,
        leg.handover_ms,
        leg.expected_ms,
        leg.orders_by_priority,
    )


def _refusal(response: pb.ScheduleResponse, model: str) -> Refusal:
    """The refusal that a client gets when the conductor says no."""
    later_s = response.retry_after_ms / 1000 if response.retry_after_ms else None
    if response.reason == pb.ADMISSION_REASON_UNKNOWN_MODEL:
        return faults.unknown_model(model)
    if response.reason == pb.ADMISSION_REASON_TOO_LONG:
        return faults.refuse(PromptTooLong(response.message), param="messages")
    busy = response.reason != pb.ADMISSION_REASON_NO_INSTANCE
    error = Overloaded(response.message) if busy else NoInstances(response.message)
    return faults.refuse(error, retry_after_s=later_s)
