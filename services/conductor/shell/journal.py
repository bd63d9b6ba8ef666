"""What happened at a leading conductor lately, numbered, for the standbys: they do the same again and so know the same.

A standby names the last entry that it has. Young entries are whole; of old ones only what `mooncache why` needs is
kept, up to a number of bytes, for standbys that start later. What such a standby has not heard of an instance's cache
it asks for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final, NamedTuple

from mooncache.proto.v1 import conductor_pb2 as pb

BYTES_MAX: Final = 64 << 20
ENTRIES_MAX: Final = 200_000
WHOLE_S: Final = 30.0
PAGE_BYTES: Final = 2 << 20  # an answer ends with the entry that passes it
PAGE_ENTRIES: Final = 1000  # schedules wait while a page is made
_SHORT_LIVED: Final = frozenset({"registered", "reported", "gateway", "member"})


class _KeptEntry(NamedTuple):
    number: int
    at_s: float
    size: int
    entry: pb.JournalEntry


class Page(NamedTuple):
    """Part of the journal."""

    entries: list[pb.JournalEntry]
    cursor: int  # number of the last of them
    anew: bool  # the number that was named is not known here
    more: bool


class Journal:
    """The newest entries. Times are seconds of one monotonic clock."""

    def __init__(self, bytes_max: int = BYTES_MAX, entries_max: int = ENTRIES_MAX) -> None:
        self._bytes_max, self._entries_max = bytes_max, entries_max
        self._young: deque[_KeptEntry] = deque()
        self._old: deque[_KeptEntry] = deque()
        self.size_bytes = 0
        self.last = 0  # number of the newest entry

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, entry: pb.JournalEntry, at_s: float, now_s: float) -> None:
        """Note what happened; the oldest entries go when there are too many bytes."""
        self.last += 1
        self._keep(self._young, _KeptEntry(self.last, at_s, entry.ByteSize(), entry))
        while self._young and (
            self._young[0].at_s < now_s - WHOLE_S or self._too_large(self._young, self._bytes_max // 2)
        ):
            self._age()
        while self._too_large(self._old, self._bytes_max) and self._old:
            self.size_bytes -= self._old.popleft().size

    def after(self, cursor: int, now_s: float) -> Page:
        """The entries behind a number; from the oldest on when the number is not known here."""
        anew = not 0 <= cursor <= self.last
        begin = 0 if anew else self._place(cursor)
        found: list[pb.JournalEntry] = []
        size, number, at = 0, cursor, begin
        while at < len(self) and len(found) < PAGE_ENTRIES and size < PAGE_BYTES:
            kept = self._old[at] if at < len(self._old) else self._young[at - len(self._old)]
            kept.entry.age_ms = max(0, round((now_s - kept.at_s) * 1e3))
            found.append(kept.entry)
            size, number, at = size + kept.size, kept.number, at + 1
        return Page(found, number if found else self.last, anew, at < len(self))

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert self.size_bytes == sum(kept.size for kept in (*self._old, *self._young)), "bytes are wrong"
        numbers = [kept.number for kept in (*self._old, *self._young)]
        assert numbers == sorted(set(numbers)), "entries are out of order"

    def _place(self, cursor: int) -> int:
        """How many entries there are up to a number."""
        if self._young and cursor >= self._young[0].number - 1:
            return len(self._old) + cursor - self._young[0].number + 1
        return bisect_right(self._old, cursor, key=lambda kept: kept.number)

    def _too_large(self, part: deque[_KeptEntry], bytes_max: int) -> bool:
        return bool(part) and (self.size_bytes > bytes_max or len(part) > self._entries_max)

    def _keep(self, part: deque[_KeptEntry], kept: _KeptEntry) -> None:
        part.append(kept)
        self.size_bytes += kept.size

    def _age(self) -> None:
        """The oldest of the young entries becomes an old one, or goes."""
        number, at_s, size, entry = self._young.popleft()
        self.size_bytes -= size
        if entry.WhichOneof("happened") in _SHORT_LIVED:
            return
        if entry.HasField("decided"):
            entry.decided.request.ClearField("keys")
            entry.decided.request.ClearField("content_keys")
        self._keep(self._old, _KeptEntry(number, at_s, entry.ByteSize(), entry))
