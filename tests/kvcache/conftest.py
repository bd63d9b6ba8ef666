"""A real pool, an engine's memory made of bytes, and a client that breaks on demand."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import mooncache
from mooncache.client.results import GetResult, MatchResult, PutResult
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.errors import NotFound, error_for
from mooncache.kvcache.memory import HostMemory, LayerLayout, Region
from mooncache.kvcache.pool_link import Breaker, PoolLink

BLOCKS = 16
LAYERS = 3
LAYER_BYTES = 512
BLOCK_BYTES = LAYERS * LAYER_BYTES
WAIT_S = 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """One node of 64 MiB."""
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("pool"), nodes=1, capacity_bytes=64 << 20, port=0
    )
    with EmbeddedCluster(settings) as running:
        yield running


class Engine:
    """KV memory of an engine: BLOCKS blocks of LAYERS layers."""

    def __init__(self, fill: int = 0) -> None:
        self.bytes = [bytearray([fill]) * (BLOCKS * LAYER_BYTES) for _ in range(LAYERS)]
        layout = LayerLayout((BLOCKS, LAYER_BYTES), (LAYER_BYTES, 1), 1)
        self.memory = HostMemory(
            [
                (layout, Region(ctypes.addressof(ctypes.c_char.from_buffer(layer)), len(layer), layer))
                for layer in self.bytes
            ],
            BLOCKS,
        )

    def fill(self, block: int, value: int) -> None:
        for layer in range(LAYERS):
            at = block * LAYER_BYTES
            self.bytes[layer][at : at + LAYER_BYTES] = bytes([value + layer]) * LAYER_BYTES

    def block(self, block: int) -> bytes:
        at = block * LAYER_BYTES
        return b"".join(bytes(layer[at : at + LAYER_BYTES]) for layer in self.bytes)


class FaultyPool:
    """Holds blocks in a dictionary. `fault(call)` may raise, wait or answer a code in place of each call."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self.codes: dict[bytes, int] = {}
        self.sizes: dict[bytes, int] = {}
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

    def exists_many(self, keys: Any, *, timeout_s: float | None = None) -> tuple[bool, ...]:
        self._enter("exists")
        return tuple(key in self.blocks for key in keys)

    def match(self, keys: Any, *, touch: bool = True, timeout_s: float | None = None) -> MatchResult:
        self._enter("match")
        present = tuple(key in self.blocks for key in keys)
        run = next((i for i, there in enumerate(present) if not there), len(present))
        return MatchResult(run, present)

    def reserve(self, key: Any, size_bytes: int, *, timeout_s: float | None = None) -> Any:
        self._enter("reserve")
        raise error_for(300, "full")

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def faulty() -> FaultyPool:
    return FaultyPool()


@pytest.fixture
def faulty_link(faulty: FaultyPool) -> Iterator[PoolLink]:
    """A link to it whose breaker never opens."""
    link = PoolLink(lambda: faulty, breaker=Breaker(failures_max=1 << 30))
    assert link.connected.wait(WAIT_S)
    yield link
    link.close()


@pytest.fixture(scope="module")
def real_link(cluster: EmbeddedCluster) -> Iterator[PoolLink]:
    """A link to the real pool."""
    link = PoolLink(lambda: mooncache.connect(**cluster.client_settings()))
    assert link.connected.wait(WAIT_S)
    yield link
    link.close()
