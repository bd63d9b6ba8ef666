"""The table of the quarantine between its plain values and messages; what a message claims is checked here."""

from __future__ import annotations

from dataclasses import asdict

from mooncache.errors import InvalidArgument
from mooncache.proto.v1 import common_pb2
from mooncache.runtime.quarantine import ENTRIES_MAX, QuarantineEntry, QuarantineTable


def quarantine_message(table: QuarantineTable) -> common_pb2.QuarantineTable:
    """A table as a message."""
    rows = (common_pb2.QuarantineEntry(**asdict(entry)) for entry in table.entries.values())
    return common_pb2.QuarantineTable(entries=rows)


def entries_of(message: common_pb2.QuarantineTable) -> list[QuarantineEntry]:
    """The entries of a message. Raises InvalidArgument."""
    if len(message.entries) > ENTRIES_MAX:
        raise InvalidArgument(f"A table of the quarantine has at most {ENTRIES_MAX} entries.")
    return [
        QuarantineEntry.checked(
            {
                "writer_id": row.writer_id,
                "changed_wall_ms": row.changed_wall_ms,
                "instance": row.instance,
                "build": row.build,
                "released": row.released,
                "verifiers": list(row.verifiers),
                "reason": row.reason,
            }
        )
        for row in message.entries
    ]
