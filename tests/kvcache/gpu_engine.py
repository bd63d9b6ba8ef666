"""An engine of two layers in the memory of the fake GPU."""

from __future__ import annotations

from typing import Any

from mooncache.kvcache.gpu_blocks import GpuBlocks, Ranges
from tests.gpu.fake_gpu import FakeGpu

BLOCKS, STEP = 8, 3_000
SEGMENTS = ((0, 1_000), (1_024, 512), (2_001, 77))  # the last one is aligned to nothing
BLOCK_BYTES = 2 * sum(length for _, length in SEGMENTS)


class Engine:
    """Two layers in the memory of the fake GPU."""

    def __init__(self, gpu: FakeGpu, times: int = 1) -> None:
        """`times`: everything is so many times as large."""
        self.gpu = gpu
        self.step_bytes = STEP * times
        self.segments = tuple((offset * times, length * times) for offset, length in SEGMENTS)
        self.layers = [gpu.array(bytes(BLOCKS * self.step_bytes)) for _ in range(2)]
        self.events: list[Any] = []
        self.memory = GpuBlocks(
            [Ranges(layer.address, self.step_bytes, self.segments) for layer in self.layers],
            BLOCKS,
            ordinal=0,
            owner=self.layers,
            record=self._record,
        )
        self.lazy = False

    def _record(self) -> Any:
        event = self.gpu.event()
        self.events.append(event)
        if not self.lazy:
            self.gpu.complete(event)
        return event

    def write(self, block: int, value: int) -> None:
        for number, layer in enumerate(self.layers):
            for offset, length in self.segments:
                content = bytes([value + number]) * length
                self.gpu.lib.fake_cuda_poke(layer.address + block * self.step_bytes + offset, content, length)

    def read(self, block: int) -> bytes:
        parts = [
            layer.read()[block * self.step_bytes : (block + 1) * self.step_bytes] for layer in self.layers
        ]
        return b"".join(part[offset : offset + length] for part in parts for offset, length in self.segments)


def expected(value: int, times: int = 1) -> bytes:
    """A block in which that value was written."""
    return b"".join(bytes([value + number]) * (times * BLOCK_BYTES // 2) for number in range(2))
