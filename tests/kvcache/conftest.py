"""A real pool, an engine's memory made of bytes, and a client that breaks on demand."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

import mooncache
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.kvcache.memory import HostMemory, LayerLayout, Region
from mooncache.kvcache.pool_link import Breaker, PoolLink
from tests.kvcache.faulty import FaultyPool

BLOCKS = 16
LAYERS = 3
LAYER_BYTES = 512
BLOCK_BYTES = LAYERS * LAYER_BYTES
WAIT_S = 60.0


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


@pytest.fixture
def real_client(cluster: EmbeddedCluster) -> Iterator[mooncache.Client]:
    """A client of the real pool, of its own."""
    with mooncache.connect(**cluster.client_settings()) as client:
        yield client
