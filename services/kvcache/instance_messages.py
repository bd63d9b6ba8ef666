"""Between what is known of instances and the messages about them, for every room that sends or reads these."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from mooncache.kvcache.instance_load import InstanceLoad
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.proto.v1 import conductor_pb2 as pb

INSTANCE_ROLES: Final = {
    pb.INSTANCE_ROLE_PREFILL: InstanceRole.PREFILL,
    pb.INSTANCE_ROLE_DECODE: InstanceRole.DECODE,
    pb.INSTANCE_ROLE_BOTH: InstanceRole.BOTH,
}
INSTANCE_ROLE_NUMBERS: Final = {role: number for number, role in INSTANCE_ROLES.items()}


def load_message(load: InstanceLoad) -> pb.InstanceLoad:
    """A load as a message."""
    return pb.InstanceLoad(**asdict(load))
