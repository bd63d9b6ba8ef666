"""NIXL as a measured transport: a process that registers memory, and this process's link to it (one thread).

`measure_plain` is the yardstick beside it: NIXL's own requests between registered memory of both processes, without
our staging, checksums and bounds.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from mooncache import _native
from mooncache.bench.worker import Worker, WorkerError, serve
from mooncache.errors import InvalidArgument, TransportUnavailable
from mooncache.fabrics.contract import Extent, Transfer
from mooncache.fabrics.nixl import NixlLink, NixlNode, make_agent, unavailable_reason

_WARM_UP_BATCHES = 2
_BATCH_TIMEOUT_S = 60.0
_QUIET = {"NIXL_LOG_LEVEL": "ERROR"}


@contextlib.contextmanager
def _beside(name: str, block_bytes: int, batch: int) -> Iterator[tuple[Worker, Any]]:
    """A process with registered memory, and an agent of this one that knows nothing of it yet.

    Raises TransportUnavailable without NIXL or when the process ends.
    """
    if reason := unavailable_reason():
        raise TransportUnavailable(reason)
    sizes = [str(block_bytes), str(batch)]
    try:
        with Worker("mooncache.bench.transfer.nixl_lane", sizes, env=_QUIET) as node:
            yield node, make_agent(f"bench-{name}-{time.monotonic_ns()}")
    except WorkerError as error:
        raise TransportUnavailable(str(error)) from error


def measure_nixl(
    *, write: bool, block_bytes: int, batch: int, threads: int, duration_ms: int
) -> dict[str, Any]:
    """As _native.transfer_probe: bytes, seconds, cpu_seconds (of both processes), batch_us.

    Raises TransportUnavailable without NIXL or when its process ends, InvalidArgument for more than one thread.
    """
    if threads != 1 and unavailable_reason() is None:
        raise InvalidArgument("NIXL is measured with one thread; its own threads move the bytes.")
    with _beside("client", block_bytes, batch) as (node, agent):
        link = NixlLink(agent, bytes.fromhex(node.hello["metadata"]))
        try:
            return _run(link, node, write, block_bytes, batch, duration_ms / 1e3)
        finally:
            link.release()


def measure_plain(*, write: bool, block_bytes: int, batch: int, duration_s: float) -> float:
    """GB/s of one NIXL request after another, each a list of `batch` blocks.

    Raises TransportUnavailable without NIXL or when its process ends.
    """
    with _beside("plain", block_bytes, batch) as (node, agent):
        peer = agent.add_remote_agent(bytes.fromhex(node.hello["metadata"]))
        own = NixlNode(agent)
        try:
            here = own.register(memoryview(bytearray(block_bytes * batch))).address
            ends = [
                agent.get_xfer_descs(
                    [(start + i * block_bytes, block_bytes, 0) for i in range(batch)], "DRAM"
                )
                for start in (here, node.hello["address"])
            ]
            request = agent.initialize_xfer("WRITE" if write else "READ", *ends, peer)
            try:
                rounds, seconds = _repeat(agent, request, duration_s)
            finally:
                agent.release_xfer_handle(request)
        finally:
            own.close()
            agent.remove_remote_agent(peer)
    return rounds * batch * block_bytes / 1e9 / seconds


def _repeat(agent: Any, request: Any, duration_s: float) -> tuple[int, float]:
    """How often the request went through, and in how many seconds."""
    rounds = -_WARM_UP_BATCHES
    begun = now = time.perf_counter()
    while rounds < 1 or now - begun < duration_s:
        state = agent.transfer(request)
        while state == "PROC" and time.perf_counter() - now < _BATCH_TIMEOUT_S:
            state = agent.check_xfer_state(request)
        if state != "DONE":
            raise TransportUnavailable(f"a plain NIXL request of the benchmark ended as {state}")
        now = time.perf_counter()
        rounds += 1
        if rounds == 0:
            begun = now
    return rounds, now - begun


def _run(
    link: NixlLink, node: Worker, write: bool, block_bytes: int, batch: int, duration_s: float
) -> dict[str, Any]:
    whole = Extent(node.hello["address"], block_bytes * batch, writable=True)
    memory = memoryview(bytearray(block_bytes * batch))
    expected = _native.crc32c(memory[:block_bytes])
    transfers = [
        Transfer(i, write, whole, [memory[i * block_bytes :][:block_bytes]], i * block_bytes)
        for i in range(batch)
    ]
    for _ in range(_WARM_UP_BATCHES):
        _batch(link, transfers, expected)
    batch_us: list[float] = []
    cpu_s = time.process_time() + node.ask("cpu")["seconds"]
    begun = now = time.perf_counter()
    while not batch_us or now - begun < duration_s:
        _batch(link, transfers, expected)
        before, now = now, time.perf_counter()
        batch_us.append((now - before) * 1e6)
    return {
        "bytes": len(batch_us) * batch * block_bytes,
        "seconds": now - begun,
        "cpu_seconds": time.process_time() + node.ask("cpu")["seconds"] - cpu_s,
        "batch_us": batch_us,
    }


def _batch(link: NixlLink, transfers: list[Transfer], expected: int) -> None:
    end_s = time.monotonic() + _BATCH_TIMEOUT_S
    link.submit(transfers)
    done = 0
    while done < len(transfers):
        completions = link.poll(end_s)
        if not completions or any(item.code or item.crc32c != expected for item in completions):
            raise TransportUnavailable("a NIXL transfer of the benchmark failed or moved other bytes")
        done += len(completions)


def _child(block_bytes: int, batch: int) -> None:
    node = NixlNode(make_agent(f"bench-node-{time.monotonic_ns()}"))
    extent = node.register(memoryview(bytearray(block_bytes * batch)))
    hello = {"metadata": node.metadata.hex(), "address": extent.address}
    serve(hello, {"cpu": lambda: {"seconds": time.process_time()}})


if __name__ == "__main__":
    _child(int(sys.argv[1]), int(sys.argv[2]))
