"""A pool that breaks on demand."""

from __future__ import annotations

import threading
from typing import Any

from mooncache.client.keys import split_keys
from mooncache.client.results import GetResult, MatchResult, PutResult
from mooncache.errors import DeadlineExceeded, NotFound, error_for

WAIT_S = 60.0


class FaultyPool:
    """Holds blocks in a dictionary. Calls wait at `gate`, raise `error`, answer `codes`. After `stalls_after` blocks
    nothing comes any more: a get takes all the time that it has."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self.codes: dict[bytes, int] = {}
        self.sizes: dict[bytes, int] = {}
        self.unreachable_nodes = 0
        self.stalls_after: int | None = None
        self.closed = False

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(WAIT_S), "the test never opened the gate"
        if self.error is not None:
            raise self.error

    def put_many(self, keys: Any, values: Any, *, timeout_s: float | None = None) -> PutResult:
        self._enter("put")
        codes = []
        for key, slices in zip(keys, values, strict=True):
            codes.append(self.codes.get(key, 0))
            if codes[-1] == 0:
                self.blocks[key] = b"".join(bytes(piece) for piece in slices)
        return PutResult(tuple(codes), tuple(code == 0 for code in codes), ("n",) * len(codes))

    def get_many_into(self, keys: Any, destinations: Any, *, timeout_s: float | None = None) -> GetResult:
        self._enter("get")
        codes, sizes = [], []
        for key, slices in zip(keys, destinations, strict=True):
            if self.stalls_after is not None:
                if not self.stalls_after:
                    return self._late(codes, sizes, len(keys), timeout_s)
                self.stalls_after -= 1
            data = self.blocks.get(key)
            code = self.codes.get(key, NotFound.code if data is None else 0)
            codes.append(code)
            sizes.append(self.sizes.get(key, len(data or b"")) if code == 0 else 0)
            if data is not None and code == 0:
                at = 0
                for piece in slices:
                    piece[:] = data[at : at + len(piece)]
                    at += len(piece)
        return GetResult(tuple(codes), tuple(sizes), ("n",) * len(codes))

    def _late(self, codes: list[int], sizes: list[int], count: int, timeout_s: float | None) -> GetResult:
        """Nothing more until the time is over."""
        assert timeout_s is not None
        threading.Event().wait(timeout_s)
        late = count - len(codes)
        return GetResult((*codes, *[DeadlineExceeded.code] * late), (*sizes, *[0] * late), ("n",) * count)

    def exists_many(self, keys: Any, *, timeout_s: float | None = None) -> tuple[bool, ...]:
        self._enter("exists")
        return tuple(key in self.blocks for key in keys)

    def match(self, keys: Any, *, touch: bool = True, timeout_s: float | None = None) -> MatchResult:
        self._enter("match")
        present = tuple(key in self.blocks for key in (split_keys(keys) if isinstance(keys, bytes) else keys))
        run = next((i for i, there in enumerate(present) if not there), len(present))
        return MatchResult(run, present, self.unreachable_nodes)

    def reserve_many(self, keys: Any, block_bytes: int, *, timeout_s: float | None = None) -> Any:
        self._enter("reserve")
        raise error_for(300, "full")

    def nodes(self) -> tuple[str, ...]:
        return ("n1", "n2")

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.closed = True
