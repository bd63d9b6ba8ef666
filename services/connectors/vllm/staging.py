"""vLLM's KV tensors on a GPU as blocks for the mover: where their bytes are, and the event of the engine's stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncache.kvcache.gpu_blocks import GpuBlocks, Ranges
from mooncache.kvcache.memory import LayerLayout


def device_memory(layers: Sequence[tuple[LayerLayout, Any]], block_count: int) -> GpuBlocks:
    """The blocks of CUDA tensors; `layers` in the order in which a block stores them.

    Only called for such tensors, so importing torch here costs nothing that was not paid.
    """
    import torch

    device = layers[0][1].device

    def record() -> tuple[Any, int]:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event, int(event.cuda_event)

    return GpuBlocks(
        [ranges_of(layout, tensor.data_ptr(), block_count) for layout, tensor in layers],
        block_count,
        ordinal=device.index or 0,
        owner=[tensor for _, tensor in layers],
        record=record,
    )


def ranges_of(layout: LayerLayout, address: int, block_count: int) -> Ranges:
    """Where a tensor that begins at `address` has its part of the blocks."""
    return Ranges(address, layout.block_step_bytes(block_count), tuple(layout.segments(block_count)))
