"""The memory of KV blocks: one tensor in which a block of all layers is one run of bytes.

Idea: `[blocks, layers, K and V, tokens, kv heads, head size]`. A block of the pool is then exactly one slice, so it is
put and got without a copy on the host; on a GPU it goes through pinned memory (mooncache.kvcache.gpu_blocks). For
attention the same memory is seen as
rows, one for each (block, layer, K or V), and a sequence's context is a selection of rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from mooncache.kvcache.gpu_blocks import GpuBlocks, Ranges

Tensor = Any
Result = TypeVar("Result")
_STAGED_BLOCKS = 64


class KvMemory:
    """See the module's text. `staged` moves bytes through host memory; None: for every device but CPU and CUDA."""

    def __init__(
        self,
        *,
        blocks: int,
        layers: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: Any,
        device: Any,
        staged: bool | None = None,
    ) -> None:
        self.blocks, self.layers, self.block_tokens = blocks, layers, block_tokens
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.device = torch.device(device)
        row = block_tokens * kv_heads * head_dim
        self.block_bytes = layers * 2 * row * torch.empty((), dtype=dtype).element_size()
        self._raw = torch.zeros((blocks, self.block_bytes), dtype=torch.uint8, device=self.device)
        typed = self._raw.view(dtype)
        self._rows = typed.view(blocks * layers * 2, row)
        self.cells = typed.view(blocks, layers, 2, block_tokens, kv_heads, head_dim)
        self._scratch = self._rows.new_empty((0, row))
        self._staged = self.device.type not in {"cpu", "cuda"} if staged is None else staged
        self._gpu = self._gpu_blocks() if self.device.type == "cuda" else None
        self._local = threading.local()
        self._views = None if self._staged or self._gpu else _views(self._raw)

    def layout(self) -> str:
        """Text that is equal exactly when blocks of two engines have the same shape."""
        return f"block/l{self.layers}/kv2/t{self.block_tokens}/h{self.kv_heads}/d{self.head_dim}"

    def write(self, layer: int, block_ids: Tensor, offsets: Tensor, key: Tensor, value: Tensor) -> None:
        """Store K and V of new tokens, `[tokens, kv heads, head size]`, each at its place of its block."""
        cells = self.cells[:, layer]
        cells[:, 0][block_ids, offsets] = key
        cells[:, 1][block_ids, offsets] = value

    def rows_of(self, tables: Tensor) -> Tensor:
        """Row numbers for `read`: of K, then of V, in layer 0, of block tables of any shape."""
        first = (tables.reshape(-1) * (self.layers * 2)).to(torch.int64)
        return torch.cat((first, first + 1))

    def read(self, layer: int, rows: Tensor) -> Tensor:
        """The selected rows of a layer, one below the other. Valid until the next `read`.

        The buffer is used again and again: fresh memory for every layer costs several times the copy itself.
        """
        if self._scratch.shape[0] < rows.shape[0]:
            self._scratch = self._rows.new_empty((rows.shape[0] * 5 // 4 + 64, self._rows.shape[1]))
        target = self._scratch[: rows.shape[0]]
        return torch.index_select(self._rows, 0, rows + layer * 2, out=target)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero blocks whose bytes are nobody's: a masked position must never be a NaN."""
        for block in block_ids:
            self._raw[block].zero_()

    def fill(self, block_ids: Sequence[int], get: Callable[[list[Any]], Result], deadline_s: float) -> Result:
        """Let `get` write into the blocks' bytes; what it returns. Called from loader threads.

        Raises:
            InDoubt: a copy of the GPU may still write into the blocks at `deadline_s` (of time.monotonic()).
        """
        if self._gpu is not None:
            with self._gpu.writing(block_ids, self._gpu.fence(), deadline_s) as places:
                return get(places)
        if self._views is not None:
            return get([self._views[block] for block in block_ids])
        stage = self._stage(len(block_ids))
        result = get(_views(stage))
        index = torch.tensor(list(block_ids), dtype=torch.int64, device=self.device)
        self._raw.index_copy_(0, index, stage.to(self.device))
        return result

    def show(self, block_ids: Sequence[int], put: Callable[[list[Any]], Result], deadline_s: float) -> Result:
        """Let `put` read the blocks' bytes; what it returns. Called from saver threads.

        Raises:
            DeadlineExceeded: the GPU did not bring them in time.
        """
        if self._gpu is not None:
            with self._gpu.reading(block_ids, self._gpu.fence(), deadline_s) as values:
                return put(values)
        if self._views is not None:
            return put([self._views[block] for block in block_ids])
        stage = self._stage(len(block_ids))
        index = torch.tensor(list(block_ids), dtype=torch.int64, device=self.device)
        stage.copy_(self._raw.index_select(0, index))
        return put(_views(stage))

    def _stage(self, count: int) -> Tensor:
        """Host memory of this thread for `count` blocks."""
        stage = getattr(self._local, "stage", None)
        if stage is None or stage.shape[0] < count:
            shape = (max(count, _STAGED_BLOCKS), self.block_bytes)
            stage = self._local.stage = torch.empty(shape, dtype=torch.uint8)
        return stage[:count]

    def _gpu_blocks(self) -> GpuBlocks:
        device = self.device
        ordinal = device.index if device.index is not None else torch.cuda.current_device()
        ranges = Ranges(self._raw.data_ptr(), self.block_bytes, ((0, self.block_bytes),))
        return GpuBlocks(
            [ranges],
            self.blocks,
            ordinal=ordinal,
            owner=self._raw,
            record=lambda: behind_the_model(device),
        )


def behind_the_model(device: Any) -> tuple[Any, int]:
    """An event behind all that the model's stream was given so far, and its handle.

    A step in the middle of a prompt is not waited for by anybody else, and its blocks are saved, or given back and
    loaded into, while it may still write them: copies begin behind it.
    """
    event = torch.cuda.Event()
    event.record(torch.cuda.default_stream(device))
    return event, int(event.cuda_event)


def _views(stage: Tensor) -> list[Any]:
    """One flat view of bytes for each row of a host tensor."""
    count, size = stage.shape
    whole = memoryview(stage.reshape(-1).numpy())
    return [whole[number * size : (number + 1) * size] for number in range(count)]
