"""The native index of blocks and their holders, as master and conductor use it, and the records that it takes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, Protocol

ADD, REMOVE = 1, 2
TIER_DRAM = 1
BLOCK_RECORD: Final = struct.Struct("<BBBBIQQ32s")
"""kind, tier, two reserved bytes, flags, tenant id, bytes, key; see native/src/store/event_log.h."""
AUDIT_RECORD: Final = struct.Struct("<Q32sQHBB")
"""tenant id, key, bytes, copies, fastest tier, whether the copies are close; as `audit` packs what it found."""


class BlockIndex(Protocol):
    """`mooncache._native.BlockIndex`, for cores that do not load native code. Holders are numbers of the caller's."""

    def apply(self, holder: int, records: bytes) -> object: ...
    def begin_full(self, holder: int) -> object: ...
    def end_full(self, holder: int) -> int: ...
    def drop_holder(self, holder: int) -> int: ...
    def locate(self, tenant_id: int, keys: bytes) -> bytes: ...
    def match(self, tenant_id: int, keys: bytes) -> Sequence[tuple[int, int]]: ...
    def present(self, tenant_id: int, keys: bytes) -> bytes: ...
    def tenant_usage(self) -> dict[int, tuple[int, int]]: ...
    def holder_usage(self) -> dict[int, tuple[int, int]]: ...
    def audit(
        self,
        wanted: Sequence[tuple[int, int]],
        wanted_of_others: int,
        domains: Sequence[int],
        domain_count: int,
        start: int,
        entries_max: int,
        found_max: int,
    ) -> tuple[int, int, int, int, int, bytes]: ...
    def stats(self) -> dict[str, int]: ...


def native_index() -> BlockIndex:
    """An empty native index."""
    from mooncache import _native

    index: BlockIndex = _native.BlockIndex()
    return index
