"""What instances hold in their own prefix caches: the native block index with one holder for each instance.

Keys stay packed: n times 32 bytes, in the order of the prompt. A chain key stands for its whole prefix, so a
holder of key i normally holds all keys before it; `leading` uses that to look at long prompts in two steps
(every 64th key, then the 64 keys in which a run ends) instead of at every key of every holder. A hole between
two samples is not seen: the answer is an estimate for a decision, the engine itself finds out what is really
there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import StrEnum
from typing import Final

import numpy as np

from mooncache.client.keys import KEY_BYTES, count_keys
from mooncache.conductor.core.registry import Instance
from mooncache.kvcache.block_index import ADD, BLOCK_RECORD, REMOVE, TIER_DRAM, BlockIndex

STRIDE = 64
EXACT_KEYS_MAX = 512
TENANT = 0  # tenants are apart by the salt inside their keys
_RECORD_HEAD: Final = struct.Struct("<BBBBIQQ")  # of BLOCK_RECORD, without its key


class CacheUpdate(StrEnum):
    """What became of a report of an instance's cache."""

    APPLIED = "applied"
    FULL = "full"
    REPEATED = "repeated"
    GAP = "gap"  # what is known stays, and a full report is asked for


def block_records(keys: bytes, *, remove: bool = False, tenant_id: int = 0, size_bytes: int = 1) -> bytes:
    """Packed records of one kind, made without a loop over the keys."""
    count = len(keys) // KEY_BYTES
    head = _RECORD_HEAD.pack(REMOVE if remove else ADD, TIER_DRAM, 0, 0, 0, tenant_id, size_bytes)
    packed = np.empty((count, BLOCK_RECORD.size), dtype=np.uint8)
    packed[:, : _RECORD_HEAD.size] = np.frombuffer(head, dtype=np.uint8)
    packed[:, _RECORD_HEAD.size :] = np.frombuffer(keys, dtype=np.uint8).reshape(count, KEY_BYTES)
    return packed.tobytes()


class CacheIndex:
    """The blocks in every instance's own prefix cache. `make_index` gives an empty native index."""

    def __init__(self, make_index: Callable[[], BlockIndex]) -> None:
        self._index = make_index()

    def apply(
        self, instance: Instance, *, full: bool, stored: bytes, removed: bytes, sequence: int, keys_max: int
    ) -> CacheUpdate:
        """Take in changes of an instance's cache. Raises InvalidArgument or TooLarge for bytes that are not keys."""
        count_keys(stored, keys_max, "stored keys")
        count_keys(removed, keys_max, "removed keys")
        if full:
            self._index.begin_full(instance.holder)
            self._index.apply(instance.holder, block_records(stored))
            self._index.end_full(instance.holder)
            instance.sequence, instance.want_full = sequence, False
            return CacheUpdate.FULL
        if sequence <= instance.sequence:
            return CacheUpdate.REPEATED
        if instance.want_full or sequence != instance.sequence + 1:
            instance.want_full = True
            return CacheUpdate.GAP
        # Stored first: a block that came and went within one report is gone.
        if stored:
            self._index.apply(instance.holder, block_records(stored))
        if removed:
            self._index.apply(instance.holder, block_records(removed, remove=True))
        instance.sequence = sequence
        return CacheUpdate.APPLIED

    def drop(self, holder: int) -> int:
        """Forget all blocks of a holder."""
        return self._index.drop_holder(holder)

    def leading(self, keys: bytes) -> dict[int, int]:
        """BlockHolder -> number of leading blocks of `keys` that it holds; holders of none are not
        listed."""
        count = len(keys) // KEY_BYTES
        if count <= EXACT_KEYS_MAX:
            return dict(self._index.match(TENANT, keys)) if count else {}
        sampled = np.frombuffer(keys, dtype=f"V{KEY_BYTES}")[::STRIDE].tobytes()
        found: dict[int, int] = {}
        ends: dict[int, set[int]] = {}
        for holder, samples in self._index.match(TENANT, sampled):
            ends.setdefault(samples, set()).add(holder)
        for samples, holders in ends.items():
            start = (samples - 1) * STRIDE
            part = keys[start * KEY_BYTES : (start + STRIDE) * KEY_BYTES]
            runs = dict(self._index.match(TENANT, part))
            found.update((holder, start + runs[holder]) for holder in holders if holder in runs)
        return found

    def blocks(self) -> dict[int, int]:
        """BlockHolder -> number of its blocks."""
        return {holder: blocks for holder, (_, blocks) in self._index.holder_usage().items()}

    def stat(self, name: str) -> float:
        """One of the index's own counters, 0 when it has no such counter."""
        return float(self._index.stats().get(name, 0))
