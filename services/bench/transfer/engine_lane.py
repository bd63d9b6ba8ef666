"""The two processes of one lane of `mooncache bench transfer --engines`, for each engine that is measured."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

from mooncache.bench.worker import serve
from mooncache.fabrics.nixl import make_agent
from mooncache.transfer import EnginePeer, EngineRegion, TransferEngine

_TOKEN = f"mcc1.{'5a' * 32}"  # of processes that live as long as the benchmark, on loopback
_WARM_UP_BATCHES = 2
_TIMEOUT_S = 60.0


class Side(Protocol):
    """One process of a lane."""

    def hello(self) -> dict[str, Any]:
        """What the other process needs to connect."""

    def connect(self, owner: dict[str, Any]) -> None:
        """Connect to the owner of the memory."""

    def prepare(self, *, write: bool, block_bytes: int, batch: int) -> Any:
        """A batch that can be run again and again."""

    def run(self, prepared: Any) -> None:
        """Run it once, to its end."""


class OurSide:
    """`mooncache.transfer`."""

    def __init__(self, name: str, wire: str, size_bytes: int) -> None:
        self._engine = TransferEngine(name, token=_TOKEN, shared_memory=wire == "shm", timeout_s=_TIMEOUT_S)
        self._region: EngineRegion = (
            self._engine.allocate(size_bytes, readable_by="*", writable_by="*")
            if wire == "shm"
            else self._engine.register(mmap.mmap(-1, size_bytes), readable_by="*", writable_by="*")
        )
        self._region.buffer[:] = bytes(size_bytes)
        self._peer: EnginePeer | None = None

    def hello(self) -> dict[str, Any]:
        return {"descriptor": self._engine.describe().hex(), "address": self._region.address}

    def connect(self, owner: dict[str, Any]) -> None:
        self._peer = self._engine.connect(bytes.fromhex(owner["descriptor"]))
        self._remote = int(owner["address"])

    def prepare(self, *, write: bool, block_bytes: int, batch: int) -> Any:
        memory = self._region.buffer
        offsets = range(0, block_bytes * batch, block_bytes)
        ranges = [(memory[at : at + block_bytes], self._remote + at, block_bytes) for at in offsets]
        return write, ranges

    def run(self, prepared: Any) -> None:
        write, ranges = prepared
        assert self._peer is not None
        (self._peer.write if write else self._peer.read)(ranges).wait()


class NixlSide:
    """NIXL over UCX; UCX_TLS of the environment says over what."""

    def __init__(self, name: str, wire: str, size_bytes: int) -> None:
        del wire
        self._agent = cast("Any", make_agent(f"{name}-{time.monotonic_ns()}"))
        self._memory = mmap.mmap(-1, size_bytes)
        self._memory[:] = bytes(size_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._agent.register_memory([(self._address, size_bytes, 0, "")], "DRAM")

    def hello(self) -> dict[str, Any]:
        return {"metadata": self._agent.get_agent_metadata().hex(), "address": self._address}

    def connect(self, owner: dict[str, Any]) -> None:
        self._peer = self._agent.add_remote_agent(bytes.fromhex(owner["metadata"]))
        self._remote = int(owner["address"])

    def prepare(self, *, write: bool, block_bytes: int, batch: int) -> Any:
        here, there = (
            self._agent.get_xfer_descs(
                [(start + i * block_bytes, block_bytes, 0) for i in range(batch)], "DRAM"
            )
            for start in (self._address, self._remote)
        )
        return self._agent.initialize_xfer("WRITE" if write else "READ", here, there, self._peer)

    def run(self, prepared: Any) -> None:
        end_s = time.monotonic() + _TIMEOUT_S
        state = self._agent.transfer(prepared)
        while state == "PROC" and time.monotonic() < end_s:
            state = self._agent.check_xfer_state(prepared)
        if state != "DONE":
            raise RuntimeError(f"a request of NIXL ended as {state}")


class OriginalSide:
    """The original's Transfer Engine over TCP."""

    def __init__(self, name: str, wire: str, size_bytes: int) -> None:
        del name, wire
        from mooncake.engine import TransferEngine as Original  # type: ignore[import-not-found, unused-ignore]

        self._engine: Any = Original()
        if self._engine.__class__.__module__.startswith("mooncache."):
            raise RuntimeError(
                "the package mooncake is ours here; name a folder with the original's in PYTHONPATH"
            )
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("the original's engine did not start")
        self._memory = mmap.mmap(-1, size_bytes)
        self._memory[:] = bytes(size_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if self._engine.register_memory(self._address, size_bytes) != 0:
            raise RuntimeError("the original's engine did not register memory")

    def hello(self) -> dict[str, Any]:
        return {"session": f"127.0.0.1:{self._engine.get_rpc_port()}", "address": self._address}

    def connect(self, owner: dict[str, Any]) -> None:
        self._session, self._remote = owner["session"], int(owner["address"])

    def prepare(self, *, write: bool, block_bytes: int, batch: int) -> Any:
        here, there = (
            [start + i * block_bytes for i in range(batch)] for start in (self._address, self._remote)
        )
        return write, here, there, [block_bytes] * batch

    def run(self, prepared: Any) -> None:
        write, here, there, sizes = prepared
        call = self._engine.batch_transfer_sync_write if write else self._engine.batch_transfer_sync_read
        if call(self._session, here, there, sizes) != 0:
            raise RuntimeError("a batch of the original's engine failed")


SIDES: dict[str, Callable[[str, str, int], Side]] = {
    "mooncache": OurSide,
    "nixl": NixlSide,
    "original": OriginalSide,
}


def measure(side: Side, write: bool, block_bytes: int, batch: int, seconds: float) -> dict[str, Any]:
    """Bytes moved, and in how many seconds."""
    prepared = side.prepare(write=write, block_bytes=block_bytes, batch=batch)
    for _ in range(_WARM_UP_BATCHES):
        side.run(prepared)
    rounds, begun = 0, time.perf_counter()
    now = begun
    while not rounds or now - begun < seconds:
        side.run(prepared)
        rounds += 1
        now = time.perf_counter()
    return {"bytes": rounds * batch * block_bytes, "seconds": now - begun}


def _main(role: str, engine: str, wire: str, size_bytes: int) -> None:
    side = SIDES[engine](role, wire, size_bytes)

    def connect(owner: dict[str, Any]) -> dict[str, Any]:
        side.connect(owner)
        return {}

    def run(write: bool, block_bytes: int, batch: int, seconds: float) -> dict[str, Any]:
        return measure(side, write, block_bytes, batch, seconds)

    serve(side.hello(), {"connect": connect, "run": run})


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
