"""Commands for engines: drain one, take it back, give it another role."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from mooncache.cli.common import HERE, AsJson, Where
from mooncache.errors import InvalidArgument
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.reporting.output import EXIT_OK, console, print_json

STATES = {1: "starting", 2: "ready", 3: "draining", 4: "suspect"}

InstanceId = Annotated[str, Parameter(help="Name of the instance, as `mooncache status` shows it.")]


def instance_row(view: Any) -> dict[str, Any]:
    """One InstanceView as a plain document."""
    from mooncache.kvcache.instance_messages import INSTANCE_ROLES

    instance, load = view.instance, view.load
    return {
        "instance_id": instance.instance_id,
        "role": INSTANCE_ROLES.get(instance.role, "unknown"),
        "state": STATES.get(instance.state, "unknown"),
        "reason": view.reason,
        "apart": view.apart,
        "engine": instance.engine,
        "software_version": instance.software_version,
        "engine_version": instance.engine_version,
        "model": instance.model,
        "url": instance.url,
        "pool": instance.pool,
        "block_tokens": instance.block_tokens,
        "max_model_tokens": instance.max_model_tokens,
        "kv_capacity_tokens": instance.kv_capacity_tokens,
        "assigned": view.assigned,
        "cached_blocks": view.cached_blocks,
        "report_age_s": view.report_age_ms / 1000.0,
        "waiting": load.waiting,
        "running": load.running,
        "kv_usage": load.kv_usage,
        "ttft_ms": load.ttft_ms,
        "tbt_ms": load.tbt_ms,
        "prompt_tokens_total": load.prompt_tokens_total,
        "output_tokens_total": load.output_tokens_total,
        "local_hit_tokens_total": load.local_hit_tokens_total,
        "pool_hit_tokens_total": load.pool_hit_tokens_total,
    }


def _set(where: Where, text: str, *, as_json: bool, **change: Any) -> int:
    from mooncache.kvcache.instance_messages import INSTANCE_ROLES
    from mooncache.proto.v1 import conductor_pb2

    answer = where.ask_conductor(
        "SetInstance", conductor_pb2.SetInstanceRequest(**change), conductor_pb2.SetInstanceResponse
    )
    document = {
        "instance_id": answer.instance.instance_id,
        "role": INSTANCE_ROLES.get(answer.instance.role, "unknown"),
        "state": STATES.get(answer.instance.state, "unknown"),
    }
    if as_json:
        print_json(document)
    else:
        console.print(text, markup=False)
    return EXIT_OK


def drain(instance_id: InstanceId, /, *, where: Where = HERE, json: AsJson = False) -> int:
    """Send an engine no new requests; it finishes those that it has.

    For example:

        mooncache instance drain decode-1
    """
    return _set(
        where, f"{instance_id} gets no new requests", as_json=json, instance_id=instance_id, drain=True
    )


def undrain(instance_id: InstanceId, /, *, where: Where = HERE, json: AsJson = False) -> int:
    """Send requests to a drained engine again.

    For example:

        mooncache instance undrain decode-1
    """
    return _set(
        where, f"{instance_id} gets requests again", as_json=json, instance_id=instance_id, drain=False
    )


def role(
    instance_id: InstanceId,
    new_role: Annotated[str, Parameter(help="prefill, decode or both.")],
    /,
    *,
    where: Where = HERE,
    json: AsJson = False,
) -> int:
    """Give an engine another role. Requests that it has are finished.

    For example:

        mooncache instance role prefill-1 both
    """
    from mooncache.kvcache.instance_messages import INSTANCE_ROLE_NUMBERS

    if new_role not in set(InstanceRole):
        raise InvalidArgument(f"A role is prefill, decode or both; got {new_role!r}.")
    return _set(
        where,
        f"{instance_id}: {new_role}",
        as_json=json,
        instance_id=instance_id,
        role=INSTANCE_ROLE_NUMBERS[InstanceRole(new_role)],
    )
