"""Between what is known of instances and the messages about them, for every room that sends or reads these."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from mooncache.kvcache.engine_size import EngineSize
from mooncache.kvcache.instance_load import InstanceLoad
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.kvcache.keys import passport_from_json
from mooncache.proto.v1 import conductor_pb2 as pb

INSTANCE_ROLES: Final = {
    pb.INSTANCE_ROLE_PREFILL: InstanceRole.PREFILL,
    pb.INSTANCE_ROLE_DECODE: InstanceRole.DECODE,
    pb.INSTANCE_ROLE_BOTH: InstanceRole.BOTH,
}
_SIZE_MAX: Final = 1 << 16
INSTANCE_ROLE_NUMBERS: Final = {role: number for number, role in INSTANCE_ROLES.items()}


def load_message(load: InstanceLoad) -> pb.InstanceLoad:
    """A load as a message."""
    return pb.InstanceLoad(**asdict(load))


def size_of(instance: pb.Instance) -> EngineSize | None:
    """The size that a worker registered; None: not known.

    Workers of former versions do not say it. Of their engines the passport has it, unless these keep blocks in parts of
    another number.

    Raises:
        InvalidArgument: the passport is none.
    """
    if instance.stages or instance.ranks or instance.replicas:
        said = (instance.stages, instance.ranks, instance.replicas)
        return EngineSize(*(min(max(1, number), _SIZE_MAX) for number in said))
    if not instance.passport_json:
        return None
    passport = passport_from_json(instance.passport_json)
    return EngineSize(max(1, passport.pp_size), max(1, passport.tp_size))
