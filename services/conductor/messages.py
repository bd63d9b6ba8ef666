"""Between control messages and plain values: checks what comes in, fills what goes out."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any, Final

from mooncache import errors
from mooncache.client.keys import KEY_BYTES, count_keys
from mooncache.conductor.config import (
    EXCLUDED_MAX,
    KEYS_MAX,
    NAME_CHARS_MAX,
    PROMPT_TOKENS_MAX,
    SEQUENCES_MAX,
    TEXT_CHARS_MAX,
)
from mooncache.conductor.core import outcome
from mooncache.conductor.core.decisions import SchedulingRequest
from mooncache.conductor.core.gateways import GatewayInfo
from mooncache.conductor.core.records import DETAIL_CHARS_MAX, DETAIL_DEPTH_MAX
from mooncache.conductor.core.registry import DRAINING, READY, STARTING, SUSPECT, Instance, InstanceInfo
from mooncache.kvcache.instance_load import InstanceLoad
from mooncache.kvcache.keys import passport_from_json
from mooncache.proto.v1 import conductor_pb2 as pb

ROLES: Final = {
    pb.INSTANCE_ROLE_PREFILL: "prefill",
    pb.INSTANCE_ROLE_DECODE: "decode",
    pb.INSTANCE_ROLE_BOTH: "both",
}
ROLE_NUMBERS: Final = {name: number for number, name in ROLES.items()}
STATES: Final = {
    pb.INSTANCE_STATE_STARTING: STARTING,
    pb.INSTANCE_STATE_READY: READY,
    pb.INSTANCE_STATE_DRAINING: DRAINING,
    pb.INSTANCE_STATE_SUSPECT: SUSPECT,
}
STATE_NUMBERS: Final = {name: number for number, name in STATES.items()}
PHASES: Final = {
    pb.REQUEST_PHASE_PREFILLED: outcome.PREFILLED,
    pb.REQUEST_PHASE_PREFILL_FAILED: outcome.PREFILL_FAILED,
    pb.REQUEST_PHASE_FIRST_TOKEN: outcome.FIRST_TOKEN,
    pb.REQUEST_PHASE_FINISHED: outcome.FINISHED,
    pb.REQUEST_PHASE_FAILED: outcome.FAILED,
    pb.REQUEST_PHASE_ABORTED: outcome.ABORTED,
}
_TEXTS = (
    "engine",
    "engine_version",
    "url",
    "tokenizer_path",
    "passport_json",
    "host_id",
    "software_version",
)


def named(text: str, what: str, *, chars_max: int = NAME_CHARS_MAX) -> str:
    """Return a name that is neither empty nor endless. Raises InvalidArgument."""
    if not text or len(text) > chars_max or not text.isprintable():
        raise errors.InvalidArgument(f"{what} must be 1 to {chars_max} printable characters")
    return text


def group_of(root: bytes) -> int:
    """Return the number of a passport group; never 0, which stands for "not known"."""
    return int.from_bytes(root[:8], "little") & ((1 << 63) - 1) or 1


def info_of(instance: pb.Instance) -> InstanceInfo:
    """Return what a worker says of its engine. Raises InvalidArgument."""
    if instance.role not in ROLES:
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
        role=ROLES[instance.role],
        model=named(instance.model, "model"),
        max_model_tokens=instance.max_model_tokens,
        kv_capacity_tokens=min(instance.kv_capacity_tokens, 1 << 53),
        block_tokens=block_tokens or 16,
        group=group,
        kv_bytes_per_token=min(instance.kv_bytes_per_token, 1 << 40),
        max_sequences=instance.max_sequences,
        pool=instance.pool,
        **texts,
    )


def load_of(load: pb.InstanceLoad) -> InstanceLoad:
    """Return a load whose numbers can be reckoned with: what is not a number counts as 0."""
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


def ask_of(request: pb.ScheduleRequest) -> SchedulingRequest:
    """Return the request to schedule. Raises InvalidArgument or TooLarge."""
    count = count_keys(request.keys, KEYS_MAX)
    if request.content_keys and len(request.content_keys) != len(request.keys):
        raise errors.InvalidArgument("content_keys must be as many as keys, or none")
    if request.passport_root and len(request.passport_root) != KEY_BYTES:
        raise errors.InvalidArgument(f"passport_root must be {KEY_BYTES} bytes")
    if request.prompt_tokens > PROMPT_TOKENS_MAX:
        raise errors.InvalidArgument(f"a prompt of {request.prompt_tokens} tokens cannot be")
    if count > request.prompt_tokens:
        raise errors.InvalidArgument(f"{count} keys for {request.prompt_tokens} tokens cannot be")
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
    )


def detail_of(text: str) -> dict[str, Any]:
    """Return the detail of an update; what is no JSON object, or endless, is kept as a note of that."""
    if not text:
        return {}
    if len(text) > DETAIL_CHARS_MAX:
        return {"dropped": f"{len(text)} characters are too many"}
    try:
        found = json.loads(text, parse_int=_int, parse_float=_float, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return {"dropped": "not JSON"}
    if not _shallow(found, DETAIL_DEPTH_MAX):
        return {"dropped": f"nested deeper than {DETAIL_DEPTH_MAX}"}
    return found if isinstance(found, dict) else {"dropped": "not a JSON object"}


def _int(text: str) -> int | float:
    return int(text) if len(text) <= 18 else _float(text)


def _float(text: str) -> float:
    return min(1e300, max(-1e300, float(text)))


def _shallow(value: Any, levels: int) -> bool:
    if not isinstance(value, list | dict):
        return True
    items = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_shallow(item, levels - 1) for item in items)


def elapsed_of(milliseconds: float) -> float:
    """Return seconds; 0 for what cannot be."""
    return _within(milliseconds, 1e9) / 1e3


def instance_message(instance: Instance) -> pb.Instance:
    """Return an instance as others see it."""
    info = instance.info
    return pb.Instance(
        instance_id=info.instance_id,
        incarnation=info.incarnation,
        role=ROLE_NUMBERS[instance.role],
        state=STATE_NUMBERS[instance.state],
        model=info.model,
        max_model_tokens=info.max_model_tokens,
        kv_capacity_tokens=info.kv_capacity_tokens,
        block_tokens=info.block_tokens,
        kv_bytes_per_token=info.kv_bytes_per_token,
        max_sequences=info.max_sequences,
        pool=info.pool,
        **{name: getattr(info, name) for name in _TEXTS},
    )


def load_message(load: InstanceLoad) -> pb.InstanceLoad:
    """Return a load as a message."""
    return pb.InstanceLoad(**asdict(load))


def _within(value: float, high: float) -> float:
    return min(high, max(0.0, value)) if math.isfinite(value) else 0.0


def gateway_of(message: pb.Gateway) -> GatewayInfo:
    """Return what a gateway says of itself. Raises InvalidArgument."""
    return GatewayInfo(
        named(message.gateway_id, "gateway.gateway_id"),
        named(message.url, "gateway.url"),
        named(message.software_version, "gateway.software_version"),
        message.draining,
    )


def gateway_message(info: GatewayInfo) -> pb.Gateway:
    """Return it as it travels."""
    return pb.Gateway(
        gateway_id=info.gateway_id,
        url=info.url,
        software_version=info.software_version,
        draining=info.draining,
    )
