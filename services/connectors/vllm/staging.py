"""KV memory of a GPU behind the mover's interface: through a pinned host buffer, on a stream of its own.

Idea: the mover wants host bytes. Reading waits on a side stream for the event that the engine's stream recorded after
the step, copies the blocks' ranges into pinned memory and waits for those copies only. Writing copies the other way and
waits, so that "written" means "in the GPU's memory". The engine's stream is never made to wait.

One buffer per thread, so loads and saves do not wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mooncache.errors import InvalidArgument
from mooncache.kvcache.memory import LayerLayout, Region


class DeviceMemory:
    """See the module's text. Implements mooncache.kvcache.memory.BlockMemory for CUDA tensors."""

    def __init__(self, layers: Sequence[tuple[LayerLayout, Any]], block_count: int) -> None:
        """`layers`: layout and tensor of each, in the order in which a block stores them."""
        import torch

        self._torch = torch
        self._device = layers[0][1].device
        self.block_count = block_count
        self._ranges: list[tuple[Any, int, list[tuple[int, int]]]] = []
        for layout, tensor in layers:
            storage = tensor.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            skipped = tensor.data_ptr() - storage.data_ptr()
            self._ranges.append(
                (flat[skipped:], layout.block_step_bytes(block_count), layout.segments(block_count))
            )
        self.block_bytes = sum(length for _, _, parts in self._ranges for _, length in parts)
        self._local = threading.local()

    def fence(self) -> Any:
        """An event behind everything that the engine has enqueued so far."""
        event = self._torch.cuda.Event()
        event.record(self._torch.cuda.current_stream(self._device))
        return event

    def _mine(self, count: int) -> tuple[Any, Any]:
        """This thread's stream and pinned buffer of at least `count` blocks."""
        if not hasattr(self._local, "stream"):
            self._local.stream = self._torch.cuda.Stream(self._device)
            self._local.buffer = None
        size = count * self.block_bytes
        if self._local.buffer is None or self._local.buffer.numel() < size:
            self._local.buffer = None
            self._local.buffer = self._torch.empty(size, dtype=self._torch.uint8, pin_memory=True)
        return self._local.stream, self._local.buffer

    def _pairs(self, blocks: Sequence[int], buffer: Any) -> Iterator[tuple[Any, Any]]:
        """(device range, its place in the buffer) of all ranges of the blocks."""
        at = 0
        for block in blocks:
            if not 0 <= block < self.block_count:
                raise InvalidArgument(f"there is no block {block}")
            for flat, step, parts in self._ranges:
                for offset, length in parts:
                    begin = block * step + offset
                    yield flat[begin : begin + length], buffer[at : at + length]
                    at += length

    def _views(self, count: int, buffer: Any) -> list[list[memoryview]]:
        whole = Region(buffer.data_ptr(), count * self.block_bytes, buffer).view()
        size = self.block_bytes
        return [[whole[index * size : (index + 1) * size]] for index in range(count)]

    @contextmanager
    def reading(self, blocks: Sequence[int], fence: Any) -> Iterator[list[list[memoryview]]]:
        stream, buffer = self._mine(len(blocks))
        with self._torch.cuda.stream(stream):
            if fence is not None:
                stream.wait_event(fence)
            for device, host in self._pairs(blocks, buffer):
                host.copy_(device, non_blocking=True)
        stream.synchronize()
        yield self._views(len(blocks), buffer)

    @contextmanager
    def writing(self, blocks: Sequence[int]) -> Iterator[list[list[memoryview]]]:
        stream, buffer = self._mine(len(blocks))
        yield self._views(len(blocks), buffer)
        with self._torch.cuda.stream(stream):
            for device, host in self._pairs(blocks, buffer):
                device.copy_(host, non_blocking=True)
        stream.synchronize()
