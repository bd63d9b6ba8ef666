"""Between the conductor's messages and the gateway's plain values."""

from __future__ import annotations

from mooncache.errors import NoInstances, Overloaded, PromptTooLong
from mooncache.gateway.core import faults
from mooncache.gateway.core.body import InferenceRequest
from mooncache.gateway.core.faults import Refusal
from mooncache.gateway.core.fleet import EngineInstance
from mooncache.gateway.core.plan import Attempts, LegPlan, RequestPlan, unknown_model
from mooncache.gateway.core.prepared import TokenizedPrompt
from mooncache.proto.v1 import conductor_pb2 as pb


def schedule_request(
    request_id: str,
    tenant: str,
    request: InferenceRequest,
    tokenized: TokenizedPrompt | None,
    attempts: Attempts,
    *,
    prompt_tokens: int,
    is_admin: bool,
) -> pb.ScheduleRequest:
    """The question. Keys are left out where no cache can help, and priority where the caller may not set it."""
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
        ttft_slo_ms=request.ttft_slo_ms,
        tbt_slo_ms=request.tbt_slo_ms,
        sequence_count=request.choices,
        exclude=attempts.exclude,
        attempt=attempts.number,
        no_prefill=tokenized is None or not tokenized.block_tokens or whole,
        session=f"{tenant}/{request.session}" if request.session else "",
        priority=request.priority if is_admin else 0,
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
        apart, decode = False, LegPlan(decode.instance_id, decode.url)
    return RequestPlan(
        decode=decode,
        prefill=prefill if apart else None,
        decision_id=response.decision_id,
        summary=response.summary,
        hit_tokens=max(response.local_hit_tokens, response.pool_hit_tokens),
    )


def _leg(leg: pb.Leg) -> LegPlan:
    return LegPlan(leg.instance_id, leg.url, leg.wait_tokens, leg.wait_ms, leg.handover_ms)


def _refusal(response: pb.ScheduleResponse, model: str) -> Refusal:
    """The refusal that a client gets when the conductor says no."""
    later_s = response.retry_after_ms / 1000 if response.retry_after_ms else None
    if response.reason == pb.ADMISSION_REASON_UNKNOWN_MODEL:
        return unknown_model(model)
    if response.reason == pb.ADMISSION_REASON_TOO_LONG:
        return faults.refuse(PromptTooLong(response.message), param="messages")
    busy = response.reason != pb.ADMISSION_REASON_NO_INSTANCE
    error = Overloaded(response.message) if busy else NoInstances(response.message)
    return faults.refuse(error, retry_after_s=later_s)


def engine_instance_of(view: pb.InstanceView) -> EngineInstance:
    """An instance as the conductor lists it."""
    instance = view.instance
    return EngineInstance(
        instance_id=instance.instance_id,
        url=instance.url,
        model=instance.model,
        is_ready=instance.state in (pb.INSTANCE_STATE_READY, pb.INSTANCE_STATE_UNSPECIFIED),
        is_suspect=instance.state == pb.INSTANCE_STATE_SUSPECT,
        can_generate=instance.role != pb.INSTANCE_ROLE_PREFILL,
        max_model_tokens=instance.max_model_tokens,
        tokenizer_path=instance.tokenizer_path,
        passport_json=instance.passport_json,
    )
