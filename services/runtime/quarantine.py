"""Which writers are quarantined: entries that nodes keep and that the master spreads.

Idea: an entry is about one writer and says whether it is quarantined or released. Of two entries of one writer the
later change holds, so tables of several processes are joined and never replaced: a master that has just begun to lead
knows nothing, and loses nothing of what nodes know. A mark stands for a whole table, so heartbeats carry it only where
two differ.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from mooncache.errors import InvalidArgument

ENTRIES_MAX: Final = 256
"""What has been released goes first, then the oldest."""
TEXT_CHARS_MAX: Final = 160
VERIFIERS_MAX: Final = 16
FILE_BYTES_MAX: Final = 1 << 20
_ID_MAX: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class QuarantineEntry:
    """One writer, by its number. `verifiers` are who computed other blocks; none when an operator said so."""

    writer_id: int
    changed_wall_ms: int
    instance: str = ""
    build: str = ""
    released: bool = False
    verifiers: tuple[str, ...] = ()
    reason: str = ""

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Self:
        """An entry of these values; texts are cut. Raises InvalidArgument for what is none."""
        number, changed = values.get("writer_id"), values.get("changed_wall_ms")
        for value in (number, changed):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _ID_MAX:
                raise InvalidArgument("An entry of the quarantine has the number of a writer and a time.")
        verifiers = values.get("verifiers", ())
        texts = [values.get(name, "") for name in ("instance", "build", "reason")]
        if not isinstance(verifiers, (list, tuple)) or not all(
            isinstance(text, str) for text in (*texts, *verifiers)
        ):
            raise InvalidArgument("instance, build, reason and verifiers of an entry are texts.")
        instance, build, reason = map(_shown, texts)
        named = tuple(map(_shown, verifiers[:VERIFIERS_MAX]))
        released = values.get("released") is True
        return cls(int(number or 0), int(changed or 0), instance, build, released, named, reason)

    @property
    def rank(self) -> tuple[int, bool, tuple[str, ...], str]:
        """Of two entries of one writer the larger one holds; at the same time the quarantine does."""
        return self.changed_wall_ms, not self.released, self.verifiers, self.reason


def _shown(text: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in text[:TEXT_CHARS_MAX])


@dataclass(frozen=True, slots=True)
class QuarantineTable:
    """The entries, by the writer's number."""

    entries: Mapping[int, QuarantineEntry] = field(default_factory=dict)

    @property
    def quarantined(self) -> frozenset[int]:
        """The writers whose blocks are refused."""
        return frozenset(number for number, entry in self.entries.items() if not entry.released)

    def joined(self, others: Iterable[QuarantineEntry]) -> QuarantineTable:
        """This table with entries that are later; the same table when none is."""
        found = dict(self.entries)
        for entry in others:
            known = found.get(entry.writer_id)
            if known is None or entry.rank > known.rank:
                found[entry.writer_id] = entry
        kept = sorted(found.values(), key=lambda one: (one.released, -one.changed_wall_ms, one.writer_id))
        table = QuarantineTable({one.writer_id: one for one in kept[:ENTRIES_MAX]})
        return self if table.entries == self.entries else table

    def mark(self) -> int:
        """A number that differs when tables do; 0: the table is empty."""
        if not self.entries:
            return 0
        said = hashlib.blake2b(digest_size=8)
        for number, entry in sorted(self.entries.items()):
            said.update(struct.pack("<QQ?", number, entry.changed_wall_ms, entry.released))
        return int.from_bytes(said.digest(), "little") or 1

    def to_text(self) -> str:
        """As it is kept in a file."""
        rows = [asdict(entry) for _, entry in sorted(self.entries.items())]
        return json.dumps(
            {"writers": [{**row, "writer_id": f"{row['writer_id']:016x}"} for row in rows]}, indent=1
        )

    @classmethod
    def from_text(cls, text: str) -> QuarantineTable:
        """The table of a file. Raises InvalidArgument."""
        try:
            found = json.loads(text)
            rows = found["writers"]
            listed = [{**row, "writer_id": int(row["writer_id"], 16)} for row in rows[:ENTRIES_MAX]]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise InvalidArgument("The file is no table of quarantined writers.") from None
        return cls().joined(map(QuarantineEntry.checked, listed))
