"""The memory of KV blocks: one tensor in which a block of all layers is one run of bytes.

Idea: `[blocks, layers, K and V, tokens, kv heads, head size]`. A block of the pool is then exactly one slice, so it is
put and got without a copy on the host; on a GPU it goes through pinned memory. For attention the same memory is seen as
rows, one for each (block, layer, K or V), and a sequence's context is a selection of rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

Tensor = Any
Result = TypeVar("Result")
_STAGED_BLOCKS = 64


class KvMemory:
    """See the module's text. `staged` moves bytes through (pinned) host memory; None: for every device but the CPU."""

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
        self._staged = self.device.type != "cpu" if staged is None else staged
        self._local = threading.local()
        self._views = None if self._staged else _views(self._raw)

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

    def fill(self, block_ids: Sequence[int], get: Callable[[list[Any]], Result]) -> Result:
        """Let `get` write into the blocks' bytes; what it returns. Called from loader threads."""
        if self._views is not None:
            return get([self._views[block] for block in block_ids])
        stage = self._stage(len(block_ids))
        result = get(_views(stage))
        with _stream(self.device) as finish:
            index = torch.tensor(list(block_ids), dtype=torch.int64, device=self.device)
            self._raw.index_copy_(0, index, stage.to(self.device, non_blocking=True))
            finish()
        return result

    def show(self, block_ids: Sequence[int], put: Callable[[list[Any]], Result]) -> Result:
        """Let `put` read the blocks' bytes; what it returns. Called from saver threads."""
        if self._views is not None:
            return put([self._views[block] for block in block_ids])
        stage = self._stage(len(block_ids))
        with _stream(self.device) as finish:
            index = torch.tensor(list(block_ids), dtype=torch.int64, device=self.device)
            stage.copy_(self._raw.index_select(0, index), non_blocking=True)
            finish()
        return put(_views(stage))

    def _stage(self, count: int) -> Tensor:
        """Host memory of this thread for `count` blocks, pinned where there is a GPU."""
        stage = getattr(self._local, "stage", None)
        if stage is None or stage.shape[0] < count:
            pinned = self.device.type == "cuda"
            shape = (max(count, _STAGED_BLOCKS), self.block_bytes)
            stage = self._local.stage = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        return stage[:count]


def _views(stage: Tensor) -> list[Any]:
    """One flat view of bytes for each row of a host tensor."""
    count, size = stage.shape
    whole = memoryview(stage.reshape(-1).numpy())
    return [whole[number * size : (number + 1) * size] for number in range(count)]


class _stream:  # noqa: N801  (used as a statement)
    """A GPU stream of its own for copies, so that they run beside the model; nothing on other devices.

    It begins behind all that the model's stream was given so far: a step in the middle of a prompt is not waited for by
    anybody else, and its blocks are saved, or given back and loaded into, while it may still write them.
    """

    def __init__(self, device: Any) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(device))
        self._context = torch.cuda.stream(self._stream) if self._stream else None

    def __enter__(self) -> Callable[[], None]:
        if self._context is not None:
            self._context.__enter__()
        return self._finish

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def __exit__(self, *error: object) -> None:
        if self._context is not None:
            self._context.__exit__(*error)
