"""The same calls of the original's Python API, on the original or on the drop-in: the process that is measured.

Its parent (peer_mooncake.py, dropin_case.py) starts it with its part and the master's address, and asks.
"""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from typing import Any, Final

import numpy as np

from mooncache.bench.worker import WorkerError, serve

_SEGMENT_BYTES: Final = 1 << 30
_BUFFER_BYTES: Final = 256 << 20


class MeasuredPart(StrEnum):
    """What this process is."""

    HOLDER = "holder"
    """A client of the original that lends memory."""
    ORIGINAL = "original"
    DROP_IN = "drop-in"


class SameCalls:
    """Child's side: the operations that are measured. Every answer is checked before its time counts."""

    def __init__(self, store: Any, block_bytes: int, count: int) -> None:
        self._store = store
        self._block, self._count = block_bytes, count
        self._source = np.random.default_rng(1).integers(0, 255, block_bytes * count, dtype=np.uint8)
        self._target = np.zeros_like(self._source)
        for array in (self._source, self._target):
            if store.register_buffer(array.ctypes.data, array.nbytes) != 0:
                raise WorkerError("register_buffer was refused")
        self._round = 0

    def _pointers(self, array: np.ndarray[Any, Any]) -> list[int]:
        return [array.ctypes.data + i * self._block for i in range(self._count)]

    def batch(self) -> dict[str, object]:
        """One batch put and one batch get of all blocks. Seconds."""
        self._round += 1
        keys = [f"b{self._round}-{i}" for i in range(self._count)]
        sizes = [self._block] * self._count
        started = time.perf_counter()
        put = self._store.batch_put_from(keys, self._pointers(self._source), sizes)
        put_s = time.perf_counter() - started
        started = time.perf_counter()
        got = self._store.batch_get_into(keys, self._pointers(self._target), sizes)
        get_s = time.perf_counter() - started
        if (
            any(put)
            or any(size != self._block for size in got)
            or not np.array_equal(self._source, self._target)
        ):
            raise WorkerError("not every block was stored or came back")
        self._target[:] = 0
        for key in keys:
            self._store.remove(key, True)
        return {"put_s": put_s, "get_s": get_s}

    def small(self, operations: int, size_bytes: int) -> dict[str, Any]:
        """Single puts and gets of small blocks. Lists of seconds."""
        self._round += 1
        puts, gets = [], []
        source, target = self._source.ctypes.data, self._target.ctypes.data
        for i in range(operations):
            key = f"s{self._round}-{i}"
            started = time.perf_counter()
            put = self._store.put_from(key, source, size_bytes)
            puts.append(time.perf_counter() - started)
            started = time.perf_counter()
            got = self._store.get_into(key, target, size_bytes)
            gets.append(time.perf_counter() - started)
            if put != 0 or got != size_bytes:
                raise WorkerError(f"put answered {put}, get {got}")
        return {"put_s": puts, "get_s": gets}

    def exist(self, keys: int, repeats: int) -> dict[str, Any]:
        """Batched existence of keys that are there. List of seconds."""
        names = [f"e{i}" for i in range(keys)]
        if not self._store.is_exist(names[0]):
            for name in names:
                self._store.put_from(name, self._source.ctypes.data, 64)
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            found = self._store.batch_is_exist(names)
            times.append(time.perf_counter() - started)
            if sum(found) != keys:
                raise WorkerError("keys that were put are not seen")
        return {"exist_s": times}


def _child(part: MeasuredPart, target: str, block_bytes: int = 0, count: int = 0) -> None:
    store: Any
    if part is MeasuredPart.DROP_IN:
        from mooncache.dropin.store import MooncakeDistributedStore

        store = MooncakeDistributedStore()
    else:
        from mooncake import store as original  # type: ignore[import-not-found, unused-ignore]

        store = original.MooncakeDistributedStore()
    segment = _SEGMENT_BYTES if part is MeasuredPart.HOLDER else 0
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, _BUFFER_BYTES, "tcp", "", target)
    if code != 0:
        raise SystemExit(f"setup answered {code}")
    if part is MeasuredPart.HOLDER:
        serve({}, {})
        return
    client = SameCalls(store, block_bytes, count)
    serve({}, {"batch": client.batch, "small": client.small, "exist": client.exist})


if __name__ == "__main__":
    _child(MeasuredPart(sys.argv[1]), sys.argv[2], *(int(argument) for argument in sys.argv[3:]))
