"""The other process of the NIXL tests: registers memory on demand, and says what came into it."""

from __future__ import annotations

import random
import sys
from typing import Any

from mooncache import _native
from mooncache.bench.worker import serve
from mooncache.fabrics.contract import Extent
from mooncache.fabrics.nixl import NixlNode, make_agent


def main() -> None:
    node = NixlNode(make_agent(sys.argv[1]))
    kept: list[bytearray] = []

    def add(size: int, seed: int = 0, count: int = 1) -> dict[str, Any]:
        extents = []
        for number in range(count):
            kept.append(bytearray(random.Random(seed + number).randbytes(size)))
            extents.append(node.register(memoryview(kept[-1])).address)
        return {"addresses": extents, "metadata": node.metadata.hex()}

    def crc(index: int) -> dict[str, Any]:
        return {"crc": _native.crc32c(kept[index])}

    def again() -> dict[str, Any]:
        extent = node.register(memoryview(bytearray(4096)))
        return {"removed": [node.unregister(extent), node.unregister(extent)]}

    def twice() -> dict[str, Any]:
        extent = node.register(memoryview(kept[0]))
        return {"removed": [node.unregister(extent) for _ in range(3)]}

    def forget(address: int, size: int) -> dict[str, Any]:
        return {
            "removed": node.unregister(Extent(address, size, writable=True)),
            "metadata": node.metadata.hex(),
        }

    serve({}, {"add": add, "crc": crc, "twice": twice, "again": again, "forget": forget})


if __name__ == "__main__":
    main()
