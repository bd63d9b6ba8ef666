"""The directory: block -> nodes and tiers, in native memory.

A thin wrapper around the native index that turns its packed answers into plain data where the master itself
needs them, counts, and can listen in on one node's reports (a drain takes its list of blocks that way).
Derived state: everything in it can be dropped and will be reported again.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from mooncache import errors
from mooncache.kvcache.block_index import AUDIT_RECORD, BLOCK_RECORD, REMOVE, BlockIndex
from mooncache.master.core.repair_types import AuditAsk, AuditedBlock, AuditPage

_COUNT = struct.Struct("<H")
_PLACE = struct.Struct("<HBBQ")


class Directory:
    """The directory of blocks: key to nodes and tiers. Keys are packed: n times 32 bytes."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        # holder -> tenant id -> keys; None until the full report that gives the list has begun
        self._taps: dict[int, dict[int, dict[bytes, None]] | None] = {}

    def apply(self, holder: int, records: bytes) -> None:
        """Apply packed block records of a holder. Raises InvalidArgument for records that cannot be."""
        try:
            self._index.apply(holder, records)
        except (ValueError, IndexError) as refused:
            raise errors.InvalidArgument(f"block records refused: {refused}") from refused
        noted = self._taps.get(holder)
        if noted is not None:
            self._listen(noted, records)

    def begin_full(self, holder: int) -> None:
        """What is not reported between this and `end_full` will be dropped."""
        self._index.begin_full(holder)
        if holder in self._taps:
            self._taps[holder] = {}

    def end_full(self, holder: int) -> int:
        """Drop what was not reported again; return how many blocks."""
        return self._index.end_full(holder)

    def drop_holder(self, holder: int) -> int:
        """Forget all of a holder; return how many blocks."""
        return self._index.drop_holder(holder)

    def locate(self, tenant_id: int, keys: bytes) -> bytes:
        """Return, for each key, u16 count and count times {u16 holder, u8 tier, u8 0, u64 size_bytes}."""
        return self._index.locate(tenant_id, keys)

    def holders(self, tenant_id: int, keys: Sequence[bytes]) -> list[list[int]]:
        """The holders of each key."""
        return unpack_holders(self._index.locate(tenant_id, b"".join(keys)))

    def match(self, tenant_id: int, keys: bytes) -> list[tuple[int, int]]:
        """(holder, leading blocks) for holders of the first key, longest run first."""
        runs = [(holder, leading) for holder, leading in self._index.match(tenant_id, keys) if leading > 0]
        runs.sort(key=lambda run: (-run[1], run[0]))
        return runs

    def held(self, tenant_id: int, keys: bytes) -> int:
        """The number of keys that some node holds."""
        return self._present(tenant_id, keys).bit_count()

    def leading(self, tenant_id: int, keys: bytes) -> int:
        """The number of leading keys that some node holds."""
        bits = self._present(tenant_id, keys)
        return (~bits & (bits + 1)).bit_length() - 1  # the lowest bit that is not set

    def _present(self, tenant_id: int, keys: bytes) -> int:
        """One bit for each key, the first key's is the lowest: thousands of keys, and no loop over them."""
        return int.from_bytes(self._index.present(tenant_id, keys), "little")

    def audit(self, ask: AuditAsk, start: int, entries_max: int, found_max: int) -> AuditPage:
        """Look at up to `entries_max` entries from `start` on for copies that are missing or too close.

        With `found_max` 0 they are only counted.
        """
        follows, short, missing_bytes, close, close_bytes, packed = self._index.audit(
            *ask, start, entries_max, found_max
        )
        found = [
            AuditedBlock(tenant, key, size, copies, tier, bool(is_close))
            for tenant, key, size, copies, tier, is_close in AUDIT_RECORD.iter_unpack(packed)
        ]
        return AuditPage(follows, short, missing_bytes, close, close_bytes, found)

    def tenant_usage(self) -> dict[int, tuple[int, int]]:
        """Tenant id -> (bytes, blocks), over all holders."""
        return self._index.tenant_usage()

    def holder_blocks(self) -> dict[int, int]:
        """Holder -> number of blocks that the directory lists for it."""
        return {holder: blocks for holder, (_, blocks) in self._index.holder_usage().items()}

    def stats(self) -> dict[str, int]:
        """The index's own counters."""
        return self._index.stats()

    def listen(self, holder: int) -> None:
        """Note the blocks that the holder's next full report names."""
        self._taps.setdefault(holder, None)

    def wanted(self, holder: int) -> bool:
        """Whether `listen` still waits for a full report to begin."""
        return holder in self._taps and self._taps[holder] is None

    def heard(self, holder: int) -> dict[int, list[bytes]] | None:
        """End listening when the list is there.

        Tenant id -> keys that the holder named and did not take back.
        """
        noted = self._taps.get(holder)
        if noted is None:
            return None
        del self._taps[holder]
        return {tenant_id: list(keys) for tenant_id, keys in noted.items()}

    def stop_listening(self, holder: int) -> None:
        """Forget that `listen` was called."""
        self._taps.pop(holder, None)

    @staticmethod
    def _listen(noted: dict[int, dict[bytes, None]], records: bytes) -> None:
        for kind, _, _, _, _, tenant_id, _, key in BLOCK_RECORD.iter_unpack(records):
            if kind == REMOVE:
                noted.get(tenant_id, {}).pop(key, None)
            else:
                noted.setdefault(tenant_id, {})[key] = None


def unpack_holders(packed: bytes) -> list[list[int]]:
    """The holders of each key of a packed locate answer (made by our own index, hence trusted)."""
    answers: list[list[int]] = []
    at = 0
    while at < len(packed):
        (count,) = _COUNT.unpack_from(packed, at)
        at += _COUNT.size
        answers.append([_PLACE.unpack_from(packed, at + place * _PLACE.size)[0] for place in range(count)])
        at += count * _PLACE.size
    return answers
