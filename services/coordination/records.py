"""What a candidate publishes of itself, in etcd or in a Lease; bytes that no candidate wrote are no record."""

from __future__ import annotations

import dataclasses
import json
from typing import Final

from mooncache.coordination.base import MasterRecord

MASTERS_MAX: Final = 64
RECORD_BYTES_MAX: Final = 4096


def record_bytes(record: MasterRecord) -> bytes:
    """The record as it is published."""
    return json.dumps(dataclasses.asdict(record)).encode()


def record_of(value: bytes) -> MasterRecord | None:
    """What a candidate published; None for bytes that no candidate wrote."""
    if len(value) > RECORD_BYTES_MAX:
        return None
    try:
        fields = json.loads(value)
        master_id, grpc_target = fields["master_id"], fields["grpc_target"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(master_id, str) or not isinstance(grpc_target, str):
        return None
    return MasterRecord(
        master_id,
        grpc_target,
        software_version=_text(fields, "software_version"),
        host_id=_text(fields, "host_id"),
        host_name=_text(fields, "host_name"),
        started_ms=_count(fields, "started_ms"),
        pid=_count(fields, "pid"),
    )


def _text(fields: dict[str, object], name: str) -> str:
    """A text that masters of an earlier version did not publish, "" then."""
    found = fields.get(name)
    return found if isinstance(found, str) else ""


def _count(fields: dict[str, object], name: str) -> int:
    """The same of a number; 0 for one that cannot be."""
    found = fields.get(name)
    return found if type(found) is int and 0 <= found < 1 << 53 else 0
