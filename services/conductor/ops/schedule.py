"""Schedule: where does this request go, and is it taken at all?"""

from __future__ import annotations

from mooncache.conductor.core.decisions import Decision
from mooncache.conductor.core.policy.types import Branch
from mooncache.conductor.messages import REASONS, decided_message, scheduling_request_of
from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.rpc import CallContext

log = get_logger(__name__)


async def handle(
    state: ConductorState, request: pb.ScheduleRequest, context: CallContext
) -> pb.ScheduleResponse:
    """Ask the pool, decide, answer; what the misses mean is found out afterwards. Raises NotLeader, InvalidArgument."""
    state.leadership.require(request.known_term, context.now_s)
    scheduling_request = scheduling_request_of(request)
    pool = await state.pool.match(scheduling_request.keys, scheduling_request.pool_tenant)
    now_s = state.clock.now_s()
    state.leadership.require(request.known_term, now_s)
    decision = state.core.schedule(scheduling_request, pool, now_s, state.clock.wall_s())
    if scheduling_request.offline and not decision.choice.admitted:
        state.instruments.decided(decision, state.clock.now_s() - now_s)
        return answer(state, decision)  # it is asked again soon: nothing of it is kept
    state.prefetch_calls.start(decision, scheduling_request.keys, scheduling_request.pool_tenant)
    state.give_up()  # of a former plan for the same request
    response = answer(state, decision)
    if decision.choice.admitted and pool.blocks:
        response.shard_blocks = state.hot.use(
            scheduling_request.model,
            scheduling_request.keys,
            pool.blocks,
            decision.record.block_tokens,
            now_s,
            reading_hosts(state, decision.prefill, decision.decode, loads=_loads(decision)),
            scheduling_request.pool_tenant,
        )
    state.instruments.decided(decision, state.clock.now_s() - now_s)
    if not decision.choice.admitted:
        log.info(
            Event.REQUEST_REFUSED,
            reason=decision.choice.reason,
            model=scheduling_request.model,
            tenant=scheduling_request.tenant,
        )
    state.explain_later(decision, scheduling_request)
    state.note(lambda: pb.JournalEntry(decided=decided_message(request, response, decision)))
    return response


def answer(state: ConductorState, decision: Decision) -> pb.ScheduleResponse:
    """A decision as a message."""
    choice = decision.choice
    response = pb.ScheduleResponse(
        decision_id=decision.decision_id,
        admitted=choice.admitted,
        retry_after_ms=_milliseconds(choice.retry_after_s),
        reason=REASONS[choice.reason],
        message=decision.record.message,
        expected_ttft_ms=_milliseconds(choice.ttft_s),
        summary=decision.summary(),
        term=state.leadership.term,
    )
    if not choice.admitted or not decision.decode:
        return response
    response.decode.instance_id = decision.decode
    response.store_node = decision.store_node
    waits = choice.branch == Branch.WAIT
    ready_ms = _milliseconds(decision.ready_wait_s)
    if decision.prefill:
        response.prefill.instance_id = decision.prefill
        response.decode.wait_tokens = decision.policy_request.cacheable_tokens
        response.decode.wait_ms = _milliseconds(decision.wait_s)
        response.decode.expected_ms = _milliseconds(decision.expected_wait_s)
        response.decode.handover_ms = _milliseconds(decision.handover_s)
        if waits:
            response.prefill.wait_tokens = choice.prefix_tokens
            response.prefill.wait_ms = ready_ms
    elif waits:
        response.decode.wait_tokens = choice.prefix_tokens
        response.decode.wait_ms = ready_ms
    for leg in (response.prefill, response.decode):
        instance = state.core.registry.get(leg.instance_id)
        if instance is not None:
            leg.url = instance.info.url
            leg.orders_by_priority = instance.info.orders_by_priority
    response.local_hit_tokens = decision.local_tokens
    response.pool_hit_tokens = choice.prefix_tokens if choice.branch != Branch.LOCAL else decision.pool_tokens
    return response


def _loads(decision: Decision) -> bool:
    """Whether the prefill leg loads blocks from the pool."""
    return decision.pool_tokens > decision.local_tokens


def reading_hosts(state: ConductorState, prefill: str, decode: str, *, loads: bool) -> set[str]:
    """Hosts whose engines load the prompt's blocks from the pool. loads: the prefill leg does, too."""
    names = (decode, prefill) if loads else (decode,)
    found = (state.core.registry.get(name) for name in names if name)
    return {instance.info.host_id for instance in found if instance is not None and instance.info.host_id}


def _milliseconds(seconds: float) -> int:
    return min(1 << 31, max(0, round(seconds * 1e3)))
