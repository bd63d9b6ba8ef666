"""What instances hold in their own prefix caches: the native block index with one holder for each instance.

Keys stay packed: n times 32 bytes, in the order of the prompt. A chain key stands for its whole prefix, so a
holder of key i normally holds all keys before it; `leading` uses that to look at long prompts in two steps
(every 64th key, then the 64 keys in which a run ends) instead of at every key of every holder. A hole between
two samples is not seen: the answer is an estimate for a decision, the engine itself finds out what is really
there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from mooncache import errors
from mooncache.conductor.core.registry import Instance

KEY_BYTES = 32
STRIDE = 64
EXACT_KEYS_MAX = 512
TENANT = 0  # tenants are apart by the salt inside their keys
_ADD, _REMOVE = 1, 2
_TIER_DRAM = 1
_HEAD_BYTES = 24
_RECORD_BYTES = _HEAD_BYTES + KEY_BYTES


class BlockIndex(Protocol):
    """The native index as it is used here (`mooncache._native.BlockIndex`)."""

    def apply(self, holder: int, records: object) -> object: ...
    def begin_full(self, holder: int) -> object: ...
    def end_full(self, holder: int) -> int: ...
    def drop_holder(self, holder: int) -> int: ...
    def match(self, tenant_id: int, keys: object) -> Sequence[tuple[int, int]]: ...
    def present(self, tenant_id: int, keys: object) -> bytes: ...
    def holder_usage(self) -> dict[int, tuple[int, int]]: ...
    def stats(self) -> dict[str, int]: ...


def check_keys(keys: bytes, name: str, count_max: int) -> int:
    """Return the number of packed keys. Raises InvalidArgument (cut) or TooLarge."""
    if len(keys) % KEY_BYTES:
        raise errors.InvalidArgument(f"{name} must be a multiple of {KEY_BYTES} bytes, not {len(keys)}")
    count = len(keys) // KEY_BYTES
    if count > count_max:
        raise errors.TooLarge(f"{count} {name} in one call; at most {count_max} are taken")
    return count


def records(keys: bytes, *, remove: bool = False, tenant: int = TENANT, size_bytes: int = 1) -> bytes:
    """Return packed block records for the native index, made without a loop over the keys."""
    count = len(keys) // KEY_BYTES
    head = struct.pack("<BBBBIQQ", _REMOVE if remove else _ADD, _TIER_DRAM, 0, 0, 0, tenant, size_bytes)
    packed = np.empty((count, _RECORD_BYTES), dtype=np.uint8)
    packed[:, :_HEAD_BYTES] = np.frombuffer(head, dtype=np.uint8)
    packed[:, _HEAD_BYTES:] = np.frombuffer(keys, dtype=np.uint8).reshape(count, KEY_BYTES)
    return packed.tobytes()


class CacheIndex:
    """See the module's text. `make_index` gives an empty native index."""

    def __init__(self, make_index: Callable[[], BlockIndex]) -> None:
        self._index = make_index()

    def apply(
        self, instance: Instance, *, full: bool, stored: bytes, removed: bytes, sequence: int, keys_max: int
    ) -> str:
        """Take in changes of an instance's cache; return applied, full, repeated or gap.

        A gap leaves what is known and asks for a full report. Raises InvalidArgument or TooLarge for keys
        that are none.
        """
        check_keys(stored, "stored keys", keys_max)
        check_keys(removed, "removed keys", keys_max)
        if full:
            self._index.begin_full(instance.holder)
            self._index.apply(instance.holder, records(stored))
            self._index.end_full(instance.holder)
            instance.sequence, instance.want_full = sequence, False
            return "full"
        if sequence <= instance.sequence:
            return "repeated"
        if instance.want_full or sequence != instance.sequence + 1:
            instance.want_full = True
            return "gap"
        # Stored first: a block that came and went within one report is gone.
        if stored:
            self._index.apply(instance.holder, records(stored))
        if removed:
            self._index.apply(instance.holder, records(removed, remove=True))
        instance.sequence = sequence
        return "applied"

    def drop(self, holder: int) -> int:
        """Forget all blocks of a holder."""
        return self._index.drop_holder(holder)

    def leading(self, keys: bytes) -> dict[int, int]:
        """Return holder -> number of leading blocks of `keys` that it holds; holders of none are not
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
        """Return holder -> number of its blocks."""
        return {holder: blocks for holder, (_, blocks) in self._index.holder_usage().items()}

    def stat(self, name: str) -> float:
        """Return one of the index's own counters, 0 when it has no such counter."""
        return float(self._index.stats().get(name, 0))
