"""Staging, gathering, dma-buf and IPC on a real GPU; rates are compared with the device's own copies in the same run.

These are the only tests that look at speed: a path that stages much slower than a plain pinned copy is broken.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from mooncache import _native

pytestmark = pytest.mark.gpu
SIZE = 256 << 20
WAIT_S = 60.0


@pytest.fixture(scope="module")
def gpu() -> Any:
    try:
        return _native.GpuDevice(0)
    except RuntimeError as error:
        pytest.skip(str(error.args[-1]))


def view(stager: Any, slot: int) -> memoryview:
    address, size = stager.slot(slot)
    return memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")


def seconds(run: Callable[[], None]) -> float:
    run()
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def staged(stager: Any, slices: list[tuple[int, int]], blocks: list[int], *, out: bool) -> list[int]:
    (stager.start_out if out else stager.start_in)(0, slices, blocks)
    return list(stager.wait(0, WAIT_S))


def test_gather_brings_the_bytes_and_their_crc(gpu: Any) -> None:
    stager = gpu.make_stager(64 << 20, 2)
    if not stager.how.startswith("one launch"):
        pytest.skip(stager.how)
    memory = gpu.allocate(64 << 20)
    try:
        source = os.urandom(64 << 20)
        view(stager, 0)[:] = source
        crc = staged(stager, [(memory, 64 << 20)], [1], out=False)
        assert crc == [_native.crc32c(source)]
        pages = [(memory + number * 32_768, 16_384) for number in range(0, 2048, 3)]
        counts = [len(pages) - 5, 5]
        crcs = staged(stager, pages, counts, out=True)
        expected = b"".join(source[at - memory : at - memory + size] for at, size in pages)
        packed = bytes(view(stager, 0)[: len(expected)])
        assert packed == expected
        cut = counts[0] * 16_384
        assert crcs == [_native.crc32c(expected[:cut]), _native.crc32c(expected[cut:])]
    finally:
        gpu.release(memory)


@pytest.mark.parametrize("out", [True, False])
def test_staging_is_as_fast_as_a_pinned_copy(gpu: Any, out: bool) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA here; it makes the copy that is compared with")
    stager = gpu.make_stager(SIZE, 1)
    device = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    host = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)

    def plain() -> None:
        if out:
            host.copy_(device, non_blocking=True)
        else:
            device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    pages = [(device.data_ptr() + at, 16_384) for at in range(0, SIZE, 16_384)]
    for slices, bound in (([(device.data_ptr(), SIZE)], 0.9), (pages, 0.8)):
        ours = seconds(lambda taken=slices: staged(stager, taken, [len(taken)], out=out))  # type: ignore[misc]
        ratio = seconds(plain) / ours
        assert ratio >= bound, f"{len(slices)} slices, {stager.how}: {ratio:.2f}x of a pinned copy"


def test_dma_buf(gpu: Any) -> None:
    memory = gpu.allocate(1 << 20)
    try:
        fd, offset, length = gpu.export_dma_buf(memory + 4096, 8192)
        assert length == 8192
        assert (memory + 4096 - offset) % os.sysconf("SC_PAGE_SIZE") == 0
        os.close(fd)
    finally:
        gpu.release(memory)


def test_ipc_between_processes(gpu: Any) -> None:
    memory = gpu.allocate(1 << 20)
    stager = gpu.make_stager(4096, 1)
    try:
        view(stager, 0)[:] = b"\x5a" * 4096
        staged(stager, [(memory + 8192, 4096)], [1], out=False)
        handle, offset = gpu.share(memory + 8192, 4096)
        code = (
            "import ctypes, sys\nfrom mooncache import _native\n"
            "gpu = _native.GpuDevice(0)\nat = gpu.attach(bytes.fromhex(sys.argv[1]), int(sys.argv[2]))\n"
            "stager = gpu.make_stager(4096, 1)\nstager.start_out(0, [(at, 4096)], [1])\nstager.wait(0, 10.0)\n"
            "print(bytes((ctypes.c_uint8 * 4096).from_address(stager.slot(0)[0])) == b'\\x5a' * 4096)\n"
            "del stager\ngpu.detach(at)\n"
        )
        command = [sys.executable, "-c", code, handle.hex(), str(offset)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == "True"
    finally:
        gpu.release(memory)
