"""Staging and gathering between a GPU and pinned memory, against the driver's own copies of the same bytes.

Ours take turns in two pinned buffers, as they do under the client: while one is on the bus, the other is prepared. What
they move is looked at once for each shape: bytes and checksums have to be right before a rate counts.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from mooncache import _native
from mooncache.bench.gpu.yardstick import PinnedCopies
from mooncache.bench.transfer.options import KIB, MIB
from mooncache.client import staging
from mooncache.client.native_call import call_native
from mooncache.errors import ChecksumMismatch
from mooncache.reporting.rows import Report, bar_row

Progress = Callable[[str], None]
WAIT_S = 20.0
STAGING_AT_LEAST, GATHER_AT_LEAST = 0.9, 0.8


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """Bytes of a buffer, sizes of slices, buffers of one measurement and measurements, of which medians count."""

    buffer_bytes: int = 32 * MIB
    slice_bytes: tuple[int, ...] = (4 * KIB, 16 * KIB, 64 * KIB)
    block_slices: int = 64
    buffers: int = 64
    rounds: int = 5


def measure(
    report: Report,
    options: CopyOptions,
    progress: Progress,
    *,
    device: _native.GpuDevice | None = None,
    library: str = "",
) -> None:
    """Add all rows. `device` and `library` are for tests.

    Raises:
        TransportUnavailable: no CUDA here; the message says why.
        ChecksumMismatch: wrong bytes were moved.
    """
    device = device or staging.open_device(0)
    report.machine["gpu"] = device.name
    yardstick = PinnedCopies(options.buffer_bytes, library)
    try:
        _measure(report, options, progress, device, yardstick)
    finally:
        yardstick.close()


def _measure(
    report: Report,
    options: CopyOptions,
    progress: Progress,
    device: _native.GpuDevice,
    yardstick: PinnedCopies,
) -> None:
    stager = call_native(device.make_stager, options.buffer_bytes, 2)
    memory = call_native(device.allocate, 2 * options.buffer_bytes)
    report.notes.append(f"staging: {stager.how}; medians of {options.rounds} rounds")
    bounds: dict[str, list[float]] = {"D2H": [], "H2D": [], "device": []}
    ours: dict[tuple[str, int], list[float]] = {}
    shapes = [0, *options.slice_bytes]
    try:
        for size in shapes:
            progress(f"verifying slices of {size or options.buffer_bytes} bytes")
            _verify(stager, memory, size, options)
        for number in range(options.rounds):
            progress(f"round {number + 1} of {options.rounds}")
            bounds["D2H"].append(yardstick.out(options.buffers))
            bounds["H2D"].append(yardstick.into(options.buffers))
            bounds["device"].append(yardstick.across(options.buffers))
            for size, way in itertools.product(shapes, ("D2H", "H2D")):
                rate = _rate(stager, memory, size, options, into=way == "H2D")
                ours.setdefault((way, size), []).append(rate)
    finally:
        call_native(device.release, memory)
    _add_rows(report, options, {name: statistics.median(rates) for name, rates in bounds.items()}, ours)


def _add_rows(
    report: Report,
    options: CopyOptions,
    bounds: dict[str, float],
    ours: dict[tuple[str, int], list[float]],
) -> None:
    label = f"{options.buffer_bytes // KIB} KiB"
    for way in ("D2H", "H2D"):
        report.add(bar_row(f"pinned cudaMemcpyAsync {way} {label}", bounds[way], "GB/s"))
    report.add(bar_row(f"cudaMemcpyAsync on the device {label}", bounds["device"], "GB/s"))
    for (way, size), rates in ours.items():
        bus = bounds[way]
        against, reference = f"pinned cudaMemcpyAsync {way} {label}", bus
        if size and bounds["device"] < bus:
            against, reference = f"cudaMemcpyAsync on the device {label}", bounds["device"]
        report.add(
            bar_row(
                f"gather+CRC {way} slices of {size // KIB} KiB" if size else f"staging {way} {label}",
                statistics.median(rates),
                "GB/s",
                against=against,
                reference=reference,
                at_least=GATHER_AT_LEAST if size else STAGING_AT_LEAST,
            )
        )


def _slices(memory: int, size: int, options: CopyOptions) -> tuple[list[list[tuple[int, int]]], bool]:
    """A buffer of slices that lie apart, in blocks; or one slice whose checksum is not wanted (size 0)."""
    if not size:
        return [[(memory, options.buffer_bytes)]], False
    count = options.buffer_bytes // size
    pieces = [(memory + 2 * number * size, size) for number in range(count)]
    return [pieces[at : at + options.block_slices] for at in range(0, count, options.block_slices)], True


def _verify(stager: _native.GpuStager, memory: int, size: int, options: CopyOptions) -> None:
    """Fill the slices from one buffer, copy them back into the other one, and compare."""
    slices, crc = _slices(memory, size, options)
    used = sum(length for block in slices for _, length in block)
    source, back = staging.pinned(stager, 0), staging.pinned(stager, 1)
    pattern = bytes(range(251)) * (used // 251 + 1)
    source[:used] = pattern[:used]
    end_s = time.monotonic() + WAIT_S
    staging.start(stager, 0, slices, into=True, crc=crc)
    written = staging.wait(stager, 0, end_s)
    back[:used] = bytes(used)
    staging.start(stager, 1, slices, into=False, crc=crc)
    read = staging.wait(stager, 1, end_s)
    if bytes(back[:used]) != pattern[:used]:
        raise ChecksumMismatch(f"Slices of {size} bytes came back with other bytes.")
    if not read:
        return  # no kernel, or it was not asked for
    expected, at = [], 0
    for block in slices:
        length = sum(piece for _, piece in block)
        expected.append(_native.crc32c(source[at : at + length]))
        at += length
    if not read == written == expected:
        raise ChecksumMismatch(f"The checksums of slices of {size} bytes are wrong.")


def _rate(stager: _native.GpuStager, memory: int, size: int, options: CopyOptions, *, into: bool) -> float:
    slices, crc = _slices(memory, size, options)
    used = sum(length for block in slices for _, length in block)
    flat = [piece for block in slices for piece in block]
    counts = [len(block) for block in slices]
    begin = stager.start_in if into else stager.start_out
    begin(0, flat, counts, crc)
    stager.wait(0, WAIT_S)
    begun_s = time.perf_counter()
    begin(0, flat, counts, crc)
    for number in range(1, options.buffers):
        begin(number % 2, flat, counts, crc)
        stager.wait((number - 1) % 2, WAIT_S)
    stager.wait((options.buffers - 1) % 2, WAIT_S)
    return options.buffers * used / (time.perf_counter() - begun_s) / 1e9
