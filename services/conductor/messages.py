"""Between control messages and plain values: checks what comes in, fills what goes out."""

from __future__ import annotations

import math
from typing import Final

from mooncache import errors
from mooncache.auth import check_tenant_name
from mooncache.client.keys import KEY_BYTES, count_keys
from mooncache.conductor.config import (
    EXCLUDED_MAX,
    KEYS_MAX,
    LEGS_MAX,
    NAME_CHARS_MAX,
    PROMPT_TOKENS_MAX,
    SEQUENCES_MAX,
    TEXT_CHARS_MAX,
)
from mooncache.conductor.core.adoption import MadeDecision
from mooncache.conductor.core.budgets import MONTH_MAX, Spent
from mooncache.conductor.core.decisions import Decision, SchedulingRequest
from mooncache.conductor.core.gateways import GatewayInfo
from mooncache.conductor.core.leadership import Standing
from mooncache.conductor.core.limit_book import LIMIT_MAX, LimitKind, LimitUse
from mooncache.conductor.core.policy.types import Branch, Reason
from mooncache.conductor.core.progress import LegReport, Phase, ProgressReport
from mooncache.conductor.core.registry import Instance, InstanceInfo, InstanceState
from mooncache.kvcache.instance_load import InstanceLoad
from mooncache.kvcache.instance_messages import INSTANCE_ROLE_NUMBERS, INSTANCE_ROLES, size_of
from mooncache.kvcache.keys import passport_from_json
from mooncache.kvcache.leg_hint import PLACES_MAX, CacheOutcome, CacheReport, LoadedFrom
from mooncache.kvcache.leg_messages import CACHE_OUTCOMES, LEG_ROLES
from mooncache.proto.v1 import conductor_pb2 as pb

STATES: Final = {
    pb.INSTANCE_STATE_STARTING: InstanceState.STARTING,
    pb.INSTANCE_STATE_READY: InstanceState.READY,
    pb.INSTANCE_STATE_DRAINING: InstanceState.DRAINING,
    pb.INSTANCE_STATE_SUSPECT: InstanceState.SUSPECT,
}
STATE_NUMBERS: Final = {name: number for number, name in STATES.items()}
STANDING_NUMBERS: Final = {
    Standing.LEADER: pb.CONDUCTOR_ROLE_LEADER,
    Standing.STANDBY: pb.CONDUCTOR_ROLE_STANDBY,
    Standing.SEEKING: pb.CONDUCTOR_ROLE_SEEKING,
    Standing.SILENT: pb.CONDUCTOR_ROLE_UNREACHABLE,
    Standing.UNREACHABLE: pb.CONDUCTOR_ROLE_UNREACHABLE,
}
STANDINGS: Final = {number: standing for standing, number in STANDING_NUMBERS.items()}
USES_MAX: Final = 1024  # limits in one call
LIMIT_KINDS: Final = {
    pb.LIMIT_KIND_REQUESTS: LimitKind.REQUESTS,
    pb.LIMIT_KIND_TOKENS: LimitKind.TOKENS,
    pb.LIMIT_KIND_CONCURRENCY: LimitKind.CONCURRENCY,
    pb.LIMIT_KIND_TOKENS_UNDER_WAY: LimitKind.TOKENS_UNDER_WAY,
    pb.LIMIT_KIND_MONEY: LimitKind.MONEY,
}
PHASES: Final = {
    pb.REQUEST_PHASE_PREFILLED: Phase.PREFILLED,
    pb.REQUEST_PHASE_PREFILL_FAILED: Phase.PREFILL_FAILED,
    pb.REQUEST_PHASE_FIRST_TOKEN: Phase.FIRST_TOKEN,
    pb.REQUEST_PHASE_FINISHED: Phase.FINISHED,
    pb.REQUEST_PHASE_FAILED: Phase.FAILED,
    pb.REQUEST_PHASE_ABORTED: Phase.ABORTED,
}
REASONS: Final = {
    Reason.ADMITTED: pb.ADMISSION_REASON_ADMITTED,
    Reason.TTFT: pb.ADMISSION_REASON_TTFT,
    Reason.TBT: pb.ADMISSION_REASON_TBT,
    Reason.CAPACITY: pb.ADMISSION_REASON_CAPACITY,
    Reason.NO_INSTANCE: pb.ADMISSION_REASON_NO_INSTANCE,
    Reason.UNKNOWN_MODEL: pb.ADMISSION_REASON_UNKNOWN_MODEL,
    Reason.TOO_LONG: pb.ADMISSION_REASON_TOO_LONG,
    Reason.OFFLINE: pb.ADMISSION_REASON_OFFLINE,
}
_REASONS_OF: Final = {number: reason for reason, number in REASONS.items()}
_SECONDS_MAX: Final = 1e6
_COUNT_MAX: Final = 1 << 53
_MS_MAX: Final = 1e9
_TEXTS = (
    "engine",
    "engine_version",
    "url",
    "tokenizer_path",
    "passport_json",
    "host_id",
    "software_version",
    "engine_token",
)


def named(text: str, what: str, *, chars_max: int = NAME_CHARS_MAX) -> str:
    """A name that is neither empty nor too long. Raises InvalidArgument."""
    if not text or len(text) > chars_max or not text.isprintable():
        raise errors.InvalidArgument(f"{what} must be 1 to {chars_max} printable characters")
    return text


def group_of(root: bytes) -> int:
    """The number of a passport group; never 0, which stands for "not known"."""
    return int.from_bytes(root[:8], "little") & ((1 << 63) - 1) or 1


def info_of(instance: pb.Instance) -> InstanceInfo:
    """A worker's description of its engine. Raises InvalidArgument."""
    if instance.role not in INSTANCE_ROLES:
        raise errors.InvalidArgument("the instance's role must be prefill, decode or both")
    texts = {name: getattr(instance, name) for name in _TEXTS}
    for name, text in texts.items():
        if len(text) > TEXT_CHARS_MAX:
            raise errors.InvalidArgument(f"{name} is longer than {TEXT_CHARS_MAX} characters")
    if not 0 <= instance.block_tokens <= 1 << 20:
        raise errors.InvalidArgument(f"block_tokens is {instance.block_tokens}")
    group, block_tokens = 0, instance.block_tokens
    if instance.passport_json:
        passport = passport_from_json(instance.passport_json)
        group = group_of(passport.root())
        block_tokens = block_tokens or passport.block_tokens
    return InstanceInfo(
        instance_id=named(instance.instance_id, "instance_id", chars_max=128),
        incarnation=instance.incarnation,
        role=INSTANCE_ROLES[instance.role],
        model=named(instance.model, "model"),
        max_model_tokens=instance.max_model_tokens,
        kv_capacity_tokens=min(instance.kv_capacity_tokens, 1 << 53),
        block_tokens=block_tokens or 16,
        group=group,
        kv_bytes_per_token=min(instance.kv_bytes_per_token, 1 << 40),
        max_sequences=instance.max_sequences,
        pool=instance.pool,
        size=size_of(instance),
        orders_by_priority=instance.orders_by_priority,
        **texts,
    )


def load_of(load: pb.InstanceLoad) -> InstanceLoad:
    """A load with usable numbers: NaN and infinity count as 0."""
    return InstanceLoad(
        waiting=load.waiting,
        running=load.running,
        kv_usage=_within(load.kv_usage, 1.0),
        ttft_ms=_within(load.ttft_ms, 1e9),
        tbt_ms=_within(load.tbt_ms, 1e9),
        prompt_tokens_total=load.prompt_tokens_total,
        output_tokens_total=load.output_tokens_total,
        local_hit_tokens_total=load.local_hit_tokens_total,
        pool_hit_tokens_total=load.pool_hit_tokens_total,
    )


def pool_tenant_of(name: str) -> str:
    """A tenant's name, or "" for the engines' own. Raises InvalidArgument."""
    return check_tenant_name(name) if name else ""


def scheduling_request_of(request: pb.ScheduleRequest) -> SchedulingRequest:
    """The request to schedule. Raises InvalidArgument or TooLarge."""
    count = count_keys(request.keys, KEYS_MAX)
    if request.content_keys and len(request.content_keys) != len(request.keys):
        raise errors.InvalidArgument("content_keys must be as many as keys, or none")
    if request.passport_root and len(request.passport_root) != KEY_BYTES:
        raise errors.InvalidArgument(f"passport_root must be {KEY_BYTES} bytes")
    if request.prompt_tokens > PROMPT_TOKENS_MAX:
        raise errors.InvalidArgument(
            f"prompt_tokens is {request.prompt_tokens}; it must be 0 to {PROMPT_TOKENS_MAX}"
        )
    if count > request.prompt_tokens:
        raise errors.InvalidArgument(
            f"{count} keys for {request.prompt_tokens} prompt tokens; a key covers at least one token"
        )
    if len(request.exclude) > EXCLUDED_MAX:
        raise errors.InvalidArgument(f"at most {EXCLUDED_MAX} instances can be excluded")
    return SchedulingRequest(
        request_id=named(request.request_id, "request_id"),
        model=named(request.model, "model"),
        prompt_tokens=max(1, request.prompt_tokens),
        tenant=request.tenant[:NAME_CHARS_MAX],
        keys=request.keys,
        content_keys=request.content_keys,
        group=group_of(request.passport_root) if request.passport_root else 0,
        max_output_tokens=request.max_output_tokens,
        ttft_slo_s=request.ttft_slo_ms / 1e3,
        tbt_slo_s=request.tbt_slo_ms / 1e3,
        sequences=min(SEQUENCES_MAX, max(1, request.sequence_count)),
        exclude=frozenset(request.exclude),
        attempt=max(1, request.attempt),
        no_prefill=request.no_prefill,
        session=request.session[:NAME_CHARS_MAX],
        priority=request.priority,
        pool_tenant=pool_tenant_of(request.pool_tenant),
        offline=request.offline,
        gateway_run=request.gateway_run,
    )


def progress_of(message: pb.ReportProgressRequest) -> ProgressReport:
    """A report with usable numbers. Raises InvalidArgument or TooLarge."""
    phase = PHASES.get(message.phase)
    if phase is None:
        raise errors.InvalidArgument("the report names no phase")
    if len(message.legs) > LEGS_MAX:
        raise errors.TooLarge(f"{len(message.legs)} legs of one request; at most {LEGS_MAX} are taken")
    return ProgressReport(
        phase,
        elapsed_s=_within(message.elapsed_ms, _MS_MAX) / 1e3,
        output_tokens=_count(message.output_tokens),
        legs=tuple(map(_leg_of, message.legs)),
        answer_is_whole=message.answer_is_whole,
        code=message.code[:NAME_CHARS_MAX],
        cached_tokens=_count(message.cached_tokens) if message.HasField("cached_tokens") else None,
        prefill_may_follow=message.prefill_may_follow,
        sequence=message.sequence,
    )


def _leg_of(message: pb.LegReport) -> LegReport:
    role = LEG_ROLES.get(message.role)
    if role is None:
        raise errors.InvalidArgument("the report of a leg names no role")
    usage = message.usage
    counted = {
        "prompt_tokens": _count(usage.prompt_tokens),
        "completion_tokens": _count(usage.completion_tokens),
    }
    if usage.HasField("cached_tokens"):
        counted["cached_tokens"] = _count(usage.cached_tokens)
    return LegReport(
        role,
        message.instance_id[:NAME_CHARS_MAX],
        sent_ms=_within(message.sent_ms, _MS_MAX),
        ended_ms=_within(message.ended_ms, _MS_MAX),
        code=message.code[:NAME_CHARS_MAX],
        usage=counted if message.HasField("usage") else None,
        cache=cache_of(message.cache) if message.HasField("cache") else None,
    )


def cache_of(message: pb.CacheReport) -> CacheReport:
    """A cache report with usable numbers."""
    return CacheReport(
        asked_tokens=_count(message.asked_tokens),
        hit_tokens=_count(message.hit_tokens),
        local_tokens=_count(message.local_tokens),
        loaded_tokens=_count(message.loaded_tokens),
        loaded_bytes=_count(message.loaded_bytes),
        staged_bytes=min(_count(message.staged_bytes), _count(message.loaded_bytes)),
        waited_ms=_within(message.waited_ms, _MS_MAX),
        load_ms=_within(message.load_ms, _MS_MAX),
        hidden_ms=_within(message.hidden_ms, _MS_MAX),
        failed_blocks=_count(message.failed_blocks),
        saved_blocks=_count(message.saved_blocks),
        held_tokens=_count(message.held_tokens) if message.HasField("held_tokens") else -1,
        outcome=CACHE_OUTCOMES.get(message.outcome, CacheOutcome.UNKNOWN),
        reason=message.reason[:NAME_CHARS_MAX],
        loaded_from=tuple(
            LoadedFrom(place.store_node[:NAME_CHARS_MAX], place.tier[:NAME_CHARS_MAX], _count(place.blocks))
            for place in message.loaded_from[:PLACES_MAX]
        ),
    )


def _count(value: int) -> int:
    return min(value, _COUNT_MAX)


def instance_message(instance: Instance) -> pb.Instance:
    """An instance as a message."""
    info = instance.info
    return pb.Instance(
        instance_id=info.instance_id,
        incarnation=info.incarnation,
        role=INSTANCE_ROLE_NUMBERS[instance.role],
        state=STATE_NUMBERS[instance.state],
        model=info.model,
        max_model_tokens=info.max_model_tokens,
        kv_capacity_tokens=info.kv_capacity_tokens,
        block_tokens=info.block_tokens,
        kv_bytes_per_token=info.kv_bytes_per_token,
        max_sequences=info.max_sequences,
        pool=info.pool,
        orders_by_priority=info.orders_by_priority,
        stages=info.size.stages if info.size else 0,
        ranks=info.size.ranks if info.size else 0,
        replicas=info.size.replicas if info.size else 0,
        **{name: getattr(info, name) for name in _TEXTS},
    )


def registration_of(instance: Instance) -> pb.RegisterInstanceRequest:
    """What registers the instance at another conductor as it is known here."""
    message = instance_message(instance)
    # A worker registers only what is starting, ready or draining; its next report says more.
    said = InstanceState.STARTING if instance.said is InstanceState.SUSPECT else instance.said
    message.state = STATE_NUMBERS[said]
    return pb.RegisterInstanceRequest(
        instance=message,
        worker_run=instance.worker_run,
        drain=instance.drain_wanted,
        role_pinned=instance.role_pinned,
    )


def _within(value: float, high: float) -> float:
    return min(high, max(0.0, value)) if math.isfinite(value) else 0.0


def gateway_of(message: pb.Gateway) -> GatewayInfo:
    """A gateway's description of itself. Raises InvalidArgument."""
    return GatewayInfo(
        named(message.gateway_id, "gateway.gateway_id"),
        named(message.url, "gateway.url"),
        named(message.software_version, "gateway.software_version"),
        message.draining,
    )


def limit_use_of(message: pb.LimitUse) -> LimitUse:
    """What a gateway says of one limit. Raises InvalidArgument."""
    kind = LIMIT_KINDS.get(message.kind)
    if kind is None:
        raise errors.InvalidArgument(f"{message.kind} is no kind of limit that this conductor knows.")
    amounts = (message.limit, message.slice, message.used, message.used_before, message.wanted)
    money = (message.spent, message.spent_all)
    if not all(0 <= amount <= LIMIT_MAX for amount in (*amounts, *money)) or not message.limit:
        raise errors.InvalidArgument(f"amounts of a limit must be 0 to {LIMIT_MAX:g}, the limit above 0.")
    left = message.left if message.HasField("left") else None
    if left is not None and not -LIMIT_MAX <= left <= LIMIT_MAX:
        raise errors.InvalidArgument(f"what is left of a limit must be within {LIMIT_MAX:g}.")
    key_id = named(message.key_id, "key_id") if message.key_id else ""
    spent = None
    if kind is LimitKind.MONEY:
        if message.month > MONTH_MAX:
            raise errors.InvalidArgument(f"{message.month} is no month; write 202611 for November 2026.")
        spent = Spent(message.month, named(message.ledger, "ledger"), *money)
    return LimitUse(check_tenant_name(message.tenant), kind, *amounts, left=left, key_id=key_id, spent=spent)


def gateway_message(info: GatewayInfo) -> pb.Gateway:
    """The gateway as a message."""
    return pb.Gateway(
        gateway_id=info.gateway_id,
        url=info.url,
        software_version=info.software_version,
        draining=info.draining,
    )


def decided_message(
    request: pb.ScheduleRequest, plan: pb.ScheduleResponse, decision: Decision
) -> pb.DecidedRequest:
    """A decision as standbys hear of it."""
    choice = decision.choice
    return pb.DecidedRequest(
        request=request,
        plan=plan,
        pool_blocks=decision.pool.blocks,
        record_head=decision.record.head,
        branch=choice.branch,
        prefix_tokens=choice.prefix_tokens,
        fetch_tokens=choice.fetch_tokens,
        awaited_decision_id=choice.awaited.decision_id if choice.awaited is not None else "",
        ttft_s=choice.ttft_s,
        queue_s=choice.queue_s,
        ready_s=choice.ready_s,
        compute_s=choice.compute_s,
        handover_s=choice.handover_s,
        wait_s=choice.wait_s,
    )


def made_decision_of(message: pb.DecidedRequest) -> MadeDecision:
    """A decision of another conductor. Raises InvalidArgument or TooLarge."""
    plan = message.plan
    if message.branch not in set(Branch):
        raise errors.InvalidArgument(f"{message.branch[:64]!r} is no branch")
    return MadeDecision(
        decision_id=named(plan.decision_id, "decision_id"),
        request=scheduling_request_of(message.request),
        admitted=plan.admitted,
        reason=_REASONS_OF.get(plan.reason, Reason.CAPACITY),
        message=plan.message[:TEXT_CHARS_MAX],
        prefill=plan.prefill.instance_id,
        decode=plan.decode.instance_id,
        store_node=plan.store_node[:NAME_CHARS_MAX],
        branch=Branch(message.branch),
        prefix_tokens=_count(message.prefix_tokens),
        fetch_tokens=_count(message.fetch_tokens),
        pool_blocks=message.pool_blocks,
        awaited=message.awaited_decision_id[:NAME_CHARS_MAX],
        ttft_s=_within(message.ttft_s, _SECONDS_MAX),
        queue_s=_within(message.queue_s, _SECONDS_MAX),
        ready_s=_within(message.ready_s, _SECONDS_MAX),
        compute_s=_within(message.compute_s, _SECONDS_MAX),
        handover_s=_within(message.handover_s, _SECONDS_MAX),
        wait_s=_within(message.wait_s, _SECONDS_MAX),
        head=message.record_head,
    )


def decision_under_way(message: pb.OpenRequest) -> MadeDecision:
    """A decision as a gateway knows it: what it does not know is guessed. Raises InvalidArgument or TooLarge."""
    plan = message.plan
    hits = max(plan.local_hit_tokens, plan.pool_hit_tokens)
    expected_s = plan.expected_ttft_ms / 1e3
    return made_decision_of(
        pb.DecidedRequest(
            request=message.request,
            plan=plan,
            branch=Branch.FETCH if plan.pool_hit_tokens > plan.local_hit_tokens else Branch.LOCAL,
            prefix_tokens=hits,
            fetch_tokens=max(0, plan.pool_hit_tokens - plan.local_hit_tokens),
            ttft_s=expected_s,
            compute_s=expected_s,
        )
    )
