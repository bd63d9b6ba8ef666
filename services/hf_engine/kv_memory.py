"""The memory of KV blocks: one tensor in which a block of all layers is one run of bytes.

Idea: `[blocks, layers, K and V, tokens, kv heads, head size]`. A block of the pool is then exactly one slice, so it is
put and got without a copy on the host; on a GPU it goes through pinned memory (mooncache.kvcache.gpu_blocks). For
attention the same memory is seen as rows, one for each (block, layer, K or V), and a sequence's context is a selection
of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mooncache.kvcache.memory import BlockMemory
from mooncache.kvcache.tensors import block_memory

Tensor = Any


class KvMemory:
    """One tensor with the KV of all blocks. `movable`: the blocks as the pool's mover sees them."""

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
        direct = self.device.type in {"cpu", "cuda"}
        self.movable: BlockMemory = block_memory([self._raw], blocks) if direct else StagedBlocks(self._raw)

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
        """Zero blocks whose bytes belong to no sequence: a masked position must never be a NaN."""
        for block in block_ids:
            self._raw[block].zero_()


class StagedBlocks:
    """Blocks of a device that is neither CPU nor CUDA: a batch passes through host memory. Implements BlockMemory.

    Args:
        raw: one row of bytes for each block.
    """

    is_staged = True

    def __init__(self, raw: Tensor) -> None:
        self._raw = raw
        self.block_count, self.block_bytes = raw.shape

    def bytes_of(self, blocks: Sequence[int]) -> int:
        return len(blocks) * int(self.block_bytes)

    def buffers(self) -> tuple[memoryview, ...]:
        """None: each batch has memory of its own."""
        return ()

    def on_new_buffers(self, changed: Callable[[], None]) -> None:
        """There are never any."""

    def fence(self) -> None:
        """The copies themselves begin behind the model's work."""

    @contextmanager
    def reading(
        self, blocks: Sequence[int], fence: Any, deadline_s: float
    ) -> Iterator[list[list[memoryview]]]:
        yield _views(self._raw.index_select(0, self._index(blocks)).cpu())

    @contextmanager
    def writing(
        self, blocks: Sequence[int], fence: Any, deadline_s: float
    ) -> Iterator[list[list[memoryview]]]:
        stage = torch.empty((len(blocks), self.block_bytes), dtype=torch.uint8)
        yield _views(stage)
        self._raw.index_copy_(0, self._index(blocks), stage.to(self._raw.device))

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(list(blocks), dtype=torch.int64, device=self._raw.device)


def _views(stage: Tensor) -> list[list[memoryview]]:
    """The bytes of each row of a host tensor."""
    count, size = stage.shape
    whole = memoryview(stage.reshape(-1).numpy())
    return [[whole[number * size : (number + 1) * size]] for number in range(count)]
