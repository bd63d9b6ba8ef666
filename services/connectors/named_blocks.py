"""Blocks that a cache of others names itself: SGLang's pages, LMCache's chunks and objects.

Idea: such a cache computes, or does without, what it does not get. So whatever is wrong with the pool is a miss: each
call has a time limit, and after failures in a row the pool is left alone for a while (`PoolLink`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mooncache.client.keys import Key
from mooncache.client.results import STORED
from mooncache.config import ConnectorSection
from mooncache.errors import OK, DeadlineExceeded, error_for
from mooncache.kvcache.lookup import TIMEOUT_S
from mooncache.kvcache.pool_link import Call, PoolLink

Pieces = Sequence[memoryview]
"""Where the bytes of one block are, in their order."""


@dataclass(frozen=True, slots=True)
class SavedBlocks:
    """What became of blocks that were to be stored."""

    there: list[bool]
    """The pool has it now."""
    created: list[bool]
    """It had not before."""


class NamedBlocks:
    """The calls of one engine. Thread-safe; nothing is raised."""

    def __init__(self, link: PoolLink, section: ConnectorSection) -> None:
        self._link = link
        self._section = section

    def present(self, names: Sequence[Key]) -> list[bool]:
        """For each block whether the pool has it."""
        client, nothing = self._client(), [False] * len(names)
        if client is None or not names:
            return nothing
        try:
            found = client.match(names, timeout_s=TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  (whatever is wrong with the pool, the engine computes)
            self._link.failed(Call.LOOKUP, error)
            return nothing
        self._link.succeeded()
        return list(found.present)

    def load(self, names: Sequence[Key], destinations: Sequence[Pieces]) -> list[int | None]:
        """Bytes of each block that came, None for one that did not: then its destination is undefined."""
        client, nothing = self._client(), [None] * len(names)
        if client is None or not names:
            return list(nothing)
        try:
            result = client.get_many_into(names, destinations, timeout_s=self._section.load_timeout_s)
        except Exception as error:  # noqa: BLE001  (as above)
            self._link.failed(Call.LOAD, error)
            return list(nothing)
        self._judge(Call.LOAD, result.codes)
        return [
            size if code == OK else None for code, size in zip(result.codes, result.sizes_bytes, strict=True)
        ]

    def save(self, names: Sequence[Key], values: Sequence[Pieces]) -> SavedBlocks:
        """Store blocks. What is there already counts as stored: equal names mean equal bytes."""
        client, nothing = self._client(), [False] * len(names)
        if client is None or not names:
            return SavedBlocks(nothing, nothing)
        try:
            result = client.put_many(names, values, timeout_s=self._section.save_timeout_s)
        except Exception as error:  # noqa: BLE001  (as above)
            self._link.failed(Call.SAVE, error)
            return SavedBlocks(nothing, nothing)
        self._judge(Call.SAVE, result.codes)
        return SavedBlocks([code in STORED for code in result.codes], list(result.created))

    def _client(self) -> Any:
        return self._link.client() if self._section.enabled else None

    def _judge(self, call: Call, codes: Sequence[int]) -> None:
        """A call that used up its time counts against the pool, though single blocks may have come."""
        if DeadlineExceeded.code in codes:
            self._link.failed(call, error_for(DeadlineExceeded.code, "Not all blocks moved in time."))
        else:
            self._link.succeeded()
