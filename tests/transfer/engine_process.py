"""The other process of the tests of transfer engines: owns memory, and does as it is asked."""

from __future__ import annotations

import hashlib
import random
import sys
import time
from typing import Any

from mooncache.bench.worker import serve
from mooncache.errors import MooncacheError
from mooncache.transfer import EngineRegion, TransferEngine


def main(name: str, token: str, shared_memory: bool) -> None:
    engine = TransferEngine(name, token=token, shared_memory=shared_memory)
    regions: list[EngineRegion] = []

    def add(
        size: int, seed: int, allocate: bool, readable_by: list[str], writable_by: list[str]
    ) -> dict[str, Any]:
        data = bytearray(random.Random(seed).randbytes(size))
        if allocate:
            region = engine.allocate(size, readable_by=readable_by, writable_by=writable_by)
            region.buffer[:] = data
        else:
            region = engine.register(data, readable_by=readable_by, writable_by=writable_by)
        regions.append(region)
        return {
            "address": region.address,
            "index": len(regions) - 1,
            "descriptor": engine.describe().hex(),
        }

    def digest(index: int) -> dict[str, Any]:
        return {"digest": hashlib.sha256(regions[index].buffer).hexdigest()}

    def take_back(index: int) -> dict[str, Any]:
        """Takes the region back, fills its memory, and looks a moment later whether anybody wrote there."""
        memory = regions[index].buffer
        regions[index].close(20.0)
        mine = b"\x5a" * len(memory)
        memory[:] = mine
        time.sleep(0.3)
        return {"untouched": memory == mine}

    def notices() -> dict[str, Any]:
        return {"notices": [[notice.peer, notice.data.hex()] for notice in engine.notifications(10.0)]}

    def read_of(descriptor: str, address: int, size: int) -> dict[str, Any]:
        here = bytearray(size)
        try:
            with engine.connect(bytes.fromhex(descriptor), 10.0) as peer:
                peer.read([(here, address, size)]).wait()
        except MooncacheError as error:
            return {"error": error.name}
        return {"digest": hashlib.sha256(here).hexdigest()}

    serve(
        {"port": engine.port},
        {"add": add, "digest": digest, "take_back": take_back, "notices": notices, "read_of": read_of},
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "shm")
