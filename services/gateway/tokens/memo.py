"""Tokens of pieces of text that were encoded before, within a fixed number of bytes.

A piece is named by a keyed digest of its scope and its text: the texts themselves are not kept, and no scope can be
asked about another's pieces.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from array import array
from collections import OrderedDict

_ENTRY_BYTES = 320  # measured: digest, array, two dictionary slots and links


class PieceMemo:
    """Least recently used out first. Safe to use from several threads."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self._secret = secrets.token_bytes(32)
        self.hit_count = 0
        self.miss_count = 0

    @property
    def size_bytes(self) -> int:
        """Memory in use, estimated."""
        return self._bytes

    def namer(self, scope: str) -> hashlib.blake2b:
        """Start of the names of a scope: `copy()` it and `update()` with the piece."""
        name = hashlib.blake2b(key=self._secret, digest_size=32)
        text = scope.encode("utf-8", "surrogatepass")
        name.update(len(text).to_bytes(8, "little") + text)
        return name

    def find(self, names: list[bytes]) -> list[array[int] | None]:
        """What is known of each piece."""
        with self._lock:
            found = [self._entries.get(name) for name in names]
            for name, tokens in zip(names, found, strict=True):
                if tokens is not None:
                    self._entries.move_to_end(name)
            hits = sum(tokens is not None for tokens in found)
            self.hit_count += hits
            self.miss_count += len(names) - hits
        return found

    def keep(self, pieces: list[tuple[bytes, array[int]]]) -> None:
        """Remembers pieces; the arrays must not be changed afterwards."""
        with self._lock:
            for name, tokens in pieces:
                size = _size(tokens)
                if name in self._entries or size > self._bytes_max:
                    continue
                self._entries[name] = tokens
                self._bytes += size
            while self._bytes > self._bytes_max:
                _, tokens = self._entries.popitem(last=False)
                self._bytes -= _size(tokens)


def _size(tokens: array[int]) -> int:
    return _ENTRY_BYTES + tokens.itemsize * len(tokens)
