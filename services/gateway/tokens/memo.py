"""What was made of earlier texts, within a fixed number of bytes: the least recently used goes first.

An entry is named by a digest of a secret, a scope and its content: contents are not kept, and no scope can be asked
about another's.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

ENTRY_BYTES: Final = 400  # measured: digest, tuple, array or bytes, two dictionary slots and links

Value = TypeVar("Value")


class Namer(Protocol):
    """A digest under way."""

    def copy(self) -> Namer: ...
    def update(self, data: bytes | memoryview, /) -> None: ...
    def digest(self) -> bytes: ...


class Memo(Generic[Value]):
    """Values by name. Safe to use from several threads.

    Args:
        size_of: bytes of a value, without `ENTRY_BYTES`.
    """

    def __init__(self, bytes_max: int, size_of: Callable[[Value], int]) -> None:
        self._bytes_max, self._size_of = bytes_max, size_of
        self._bytes = 0
        self._entries: OrderedDict[bytes, Value] = OrderedDict()
        self._lock = threading.Lock()
        self._secret = secrets.token_bytes(32)

    @property
    def size_bytes(self) -> int:
        """Memory in use, estimated."""
        return self._bytes

    def namer(self, scope: str) -> Namer:
        """Start of the names of a scope: `copy()` it and `update()` with the content.

        SHA-256, because processors have instructions for it; names never leave the process.
        """
        text = scope.encode("utf-8", "surrogatepass")
        return hashlib.sha256(self._secret + len(text).to_bytes(8, "little") + text)

    def find(self, names: Sequence[bytes]) -> list[Value | None]:
        """What is known under each name."""
        with self._lock:
            found = [self._entries.get(name) for name in names]
            for name, value in zip(names, found, strict=True):
                if value is not None:
                    self._entries.move_to_end(name)
        return found

    def keep(self, values: Sequence[tuple[bytes, Value]]) -> None:
        """Remember values, which must not be changed afterwards."""
        with self._lock:
            for name, value in values:
                size = ENTRY_BYTES + self._size_of(value)
                if name in self._entries or size > self._bytes_max:
                    continue
                self._entries[name] = value
                self._bytes += size
            while self._bytes > self._bytes_max:
                _, value = self._entries.popitem(last=False)
                self._bytes -= ENTRY_BYTES + self._size_of(value)
