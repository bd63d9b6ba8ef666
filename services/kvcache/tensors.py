"""An engine's KV tensors as blocks for the mover: on the host as they lie, on a GPU through pinned memory.

Idea: shape and strides of each tensor say where the bytes of a block are, so any engine whose tensors count blocks in
their first dimension can be served: one tensor for each layer, or one for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncache.kvcache.gpu_blocks import GpuBlocks, Ranges
from mooncache.kvcache.memory import HostMemory, LayerLayout, Region


def block_memory(tensors: Sequence[Any], block_count: int) -> HostMemory | GpuBlocks:
    """The blocks of torch tensors on the CPU or a CUDA GPU, in the order in which a block stores their parts.

    Raises:
        InvalidArgument: their memory does not make `block_count` blocks.
    """
    layouts = [layout_of(tensor) for tensor in tensors]
    device = tensors[0].device
    if device.type == "cpu":
        return HostMemory(list(zip(layouts, map(_region_of, tensors), strict=True)), block_count)
    ranges = [
        Ranges(tensor.data_ptr(), layout.block_step_bytes(block_count), tuple(layout.segments(block_count)))
        for layout, tensor in zip(layouts, tensors, strict=True)
    ]
    return GpuBlocks(
        ranges,
        block_count,
        ordinal=device.index or 0,
        owner=list(tensors),
        record=lambda: event_behind(device),
    )


def layout_of(tensor: Any) -> LayerLayout:
    """Shape and strides of a KV tensor."""
    return LayerLayout(tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size())


def event_behind(device: object) -> tuple[object, int]:
    """An event behind all that the calling thread's stream was given so far, and its CUDA handle.

    A step in the middle of a prompt is not waited for by any other reader, and its blocks are saved, or given back and
    loaded into, while it may still write them: copies begin behind it.
    """
    import torch

    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event, int(event.cuda_event)


def _region_of(tensor: Any) -> Region:
    """The memory from a host tensor's first byte to the end of its storage."""
    storage = tensor.untyped_storage()
    skipped = tensor.data_ptr() - storage.data_ptr()
    return Region(tensor.data_ptr(), storage.nbytes() - skipped, tensor)
