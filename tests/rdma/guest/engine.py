"""An engine's blocks through a node and back, between tensors as vLLM lays them out: on real verbs inside the test
machine (prints one line of JSON), and over the fake library, where the test calls `play` itself.

Each layer has a tensor of its own in which all K come before all V. So a block is 16 ranges of 8 KiB in eight buffers.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable
from typing import Any

import mooncache
from mooncache import _native
from mooncache.config.serving import ConnectorSection
from mooncache.kvcache.engine_pool import EnginePool
from mooncache.kvcache.layerwise import LayerSaver
from mooncache.kvcache.memory import HostMemory, LayerLayout, Region
from mooncache.kvcache.transfers import SaveReport, TransferJob

LAYERS, BLOCKS, MOVED = 8, 24, 12
SHAPE, ITEM_BYTES = (BLOCKS, 2, 16, 4, 64), 2
PIECE_BYTES = 16 * 4 * 64 * ITEM_BYTES
STRIDES = (16 * 4 * 64, BLOCKS * 16 * 4 * 64, 4 * 64, 64, 1)
TENSOR_BYTES = BLOCKS * 2 * PIECE_BYTES
BLOCK_BYTES = LAYERS * 2 * PIECE_BYTES
WITHIN_S = 240.0


class Tensors:
    """The KV memory of an engine."""

    def __init__(self) -> None:
        self.layers = [bytearray(os.urandom(TENSOR_BYTES)) for _ in range(LAYERS)]
        layout = LayerLayout(SHAPE, STRIDES, ITEM_BYTES)
        address = [ctypes.addressof(ctypes.c_char.from_buffer(layer)) for layer in self.layers]
        regions = [Region(at, TENSOR_BYTES, layer) for at, layer in zip(address, self.layers, strict=True)]
        self.memory = HostMemory([(layout, region) for region in regions], BLOCKS)

    def block(self, number: int) -> bytes:
        """The bytes of a block in the order of the pool."""
        starts = (number * PIECE_BYTES, (BLOCKS + number) * PIECE_BYTES)
        return b"".join(bytes(layer[at : at + PIECE_BYTES]) for layer in self.layers for at in starts)


def some_keys() -> tuple[bytes, ...]:
    """New ones, of as many blocks as are moved."""
    stem = os.urandom(31)
    return tuple(stem + bytes([number]) for number in range(MOVED))


def until(found: Callable[[], list[Any]]) -> Any:
    """The first that comes."""
    end_s = time.monotonic() + WITHIN_S
    while not (got := found()):
        assert time.monotonic() < end_s, "no report came"
        time.sleep(0.005)
    return got[0]


def play(connect: Callable[[], mooncache.Client], **settings: Any) -> dict[str, Any]:
    """Saves blocks at once and layer by layer, loads both into other blocks, and says what went how."""
    tensors, said = Tensors(), {}
    section = ConnectorSection(load_timeout_s=WITHIN_S, save_timeout_s=WITHIN_S, **settings)
    pool = EnginePool(section, connect, tensors.memory)
    assert pool.link.connected.wait(WITHIN_S)
    client: Any = pool.link.connection
    before = client.stats()
    blocks = tuple(range(MOVED))
    keys = {"a": some_keys(), "b": some_keys()}
    pool.mover.save(TransferJob("s", keys["a"], blocks))
    saved: SaveReport = until(pool.mover.take_saves)
    layered: list[SaveReport] = []
    names = [f"layer.{number}" for number in range(LAYERS)]
    saver = LayerSaver(
        pool.link, tensors.memory, names, layered.append, timeout_s=WITHIN_S, queue_bytes_max=1 << 30
    )
    job = TransferJob("l", keys["b"], blocks)
    for name in names:
        saver.layer_done([job], name)
    saver.finish(job)
    by_layers: SaveReport = until(lambda: layered)
    saver.close()
    into = tuple(range(BLOCKS - MOVED, BLOCKS))
    wanted = [tensors.block(number) for number in blocks]
    for kind, own in keys.items():
        for layer in tensors.layers:
            layer[:] = bytes(len(layer))
        begun_s = time.monotonic()
        pool.mover.load(TransferJob(kind, own, into))
        load = until(pool.mover.take_loads)
        right = sum(tensors.block(at) == block for at, block in zip(into, wanted, strict=True))
        zero = all(not any(layer[: PIECE_BYTES * (BLOCKS - MOVED)]) for layer in tensors.layers)
        said[f"load {kind}"] = {
            "right": right,
            "others untouched": zero,
            "staged": load.staged_bytes,
            "bytes": load.loaded_bytes,
            "seconds": round(time.monotonic() - begun_s, 3),
        }
    after = client.stats()
    said["moved"] = {name: after[name] - before[name] for name in ("rdma_bytes", "rdma_direct_bytes")}
    said["registered"] = {name: before[name] for name in ("registrations", "registered_bytes")}
    for name, report in (("save", saved), ("save by layers", by_layers)):
        said[name] = {"stored": len(report.stored), "staged": report.staged_bytes}
        said[name]["seconds"] = round(report.seconds, 3)
    pool.close()
    return said


def main() -> None:
    """Both ends in this process, each on rails of its own."""
    secret = os.urandom(32)
    server = _native.StoreServer(
        {
            "node_id": "node",
            "secret": secret,
            "capacity_bytes": 64 << 20,
            "tcp_host": "127.0.0.1",
            "tcp_port": 7801,
            "unix_path": "",
            "rdma_devices": ["rxb0", "rxb1"],
        }
    )
    server.start()
    os.environ["MOONCACHE_RDMA_DEVICES"] = "rxa0,rxa1"

    def connect() -> mooncache.Client:
        return mooncache.connect(nodes=["127.0.0.1:7801"], token=f"mcc1.{secret.hex()}")

    ways: dict[str, dict[str, Any]] = {"in place": {}, "staged": {"registered_bytes_max": 0}}
    for name, settings in ways.items():
        print(
            json.dumps({"way": name, **play(connect, **settings), "requests": requests(server)}), flush=True
        )
    server.stop(1.0)


def requests(server: _native.StoreServer) -> dict[str, int]:
    """What the node was asked for so far."""
    return {name: count for name, count in server.stats().items() if name.startswith("requests_")}


if __name__ == "__main__":
    main()
