"""Engines with one and with two tensor parallel ranks read each other's KV: what that costs over equal sizes.

Each rank is a thread with a client of its own, and KV tensors of the shape and order that vLLM allocates for a rank.
Engines of equal size keep a rank's blocks whole. Engines of different size keep them in two parts, by groups of heads
(connector.head_groups), so the one that has all heads moves twice as many ranges, half as long. What a hand-over
between different sizes takes is compared with the write of the one size and the read of the other, each between equals.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import mooncache
from mooncache.bench.store.ours import start_cluster
from mooncache.errors import ChecksumMismatch, InvalidArgument
from mooncache.reporting.rows import Row, bar_row

AT_MOST: Final = 1.25
_LAYERS: Final = 16
_HEADS: Final = 8
_TOKENS: Final = 32  # of a block
_CONTENT: Final = 256  # numbers of K and V of one head and token
_BLOCKS: Final = 48
_ROUNDS: Final = 7
_CALL_S: Final = 60.0
_ORDERS: Final = {
    # How layers, blocks, heads, tokens and content lie in memory. The connector asks vLLM for the first one, and gets
    # the other one where vLLM's attention has no other.
    "heads before tokens": (0, 1, 2, 3, 4),
    "tokens before heads": (0, 1, 3, 2, 4),
}


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank's tensors, and its client."""

    tensors: dict[str, Any]
    client: mooncache.Client
    tp_rank: int
    tp_size: int

    def parts(self, head_groups: int) -> list[tuple[int, Any]]:
        """Number and memory of each part that this rank has, of `head_groups`."""
        from mooncache.connectors.vllm.core.kv_parts import EngineShape, parts_of_rank
        from mooncache.connectors.vllm.part_memory import tensors_of
        from mooncache.kvcache.tensors import block_memory

        shape = EngineShape(
            _HEADS, _HEADS // self.tp_size, self.tp_rank, self.tp_size, 1, tuple(self.tensors), _LAYERS
        )
        parts = parts_of_rank(shape, head_groups, 1)
        return [
            (number, block_memory(list(tensors_of(part, self.tensors).values()), _BLOCKS))
            for number, part in zip(parts.numbers, parts.own, strict=True)
        ]

    def write(self, keys: Sequence[bytes], head_groups: int) -> None:
        """Every block of every part. Raises MooncacheError."""
        for number, memory in self.parts(head_groups):
            values = [memory.slices(block) for block in range(_BLOCKS)]
            self.client.put_many(_keys(keys, number), values).raise_for_errors()

    def read(self, keys: Sequence[bytes], head_groups: int) -> None:
        """The same into the tensors. Raises MooncacheError."""
        for number, memory in self.parts(head_groups):
            places = [memory.slices(block) for block in range(_BLOCKS)]
            self.client.get_many_into(_keys(keys, number), places).raise_for_errors()


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Times of both directions over those between equals; medians of the rounds.

    Raises:
        InvalidArgument: PyTorch or vLLM's side of the connector is not there.
        ChecksumMismatch: a tensor differs from the one that was written.
    """
    for module in ("torch", "mooncache.connectors.vllm.part_memory"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise InvalidArgument(f"this case needs {error.name}, which vLLM brings") from None
    rows: list[Row] = []
    with start_cluster(nodes=1, capacity_bytes=1 << 30) as cluster, ThreadPoolExecutor(2) as threads:
        clients = [mooncache.connect(**cluster.client_settings(), timeout_s=_CALL_S) for _ in range(2)]
        try:
            for order, permutation in _ORDERS.items():
                engines = {size: _engine(permutation, size, clients) for size in (1, 2)}
                taken: dict[tuple[int, int], list[tuple[float, float]]] = {}
                for number in range(2 if quick else _ROUNDS):
                    progress(f"{order}, round {number + 1}")
                    for writer, reader in ((1, 1), (2, 2), (1, 2), (2, 1)):
                        found = _hand_over(threads, engines[writer], engines[reader])
                        taken.setdefault((writer, reader), []).append(found)
                rows += _rows(order, taken)
        finally:
            for client in clients:
                client.close()
    return rows


def _engine(permutation: Sequence[int], size: int, clients: Sequence[mooncache.Client]) -> list[_Rank]:
    return [_Rank(_tensors(permutation, size), clients[rank], rank, size) for rank in range(size)]


def _tensors(permutation: Sequence[int], size: int) -> dict[str, Any]:
    import torch

    sizes = (_LAYERS, _BLOCKS, _HEADS // size, _TOKENS, _CONTENT)
    memory = torch.zeros([sizes[at] for at in permutation], dtype=torch.float16)
    logical = memory.permute([permutation.index(at) for at in range(len(sizes))])
    return {f"layers.{layer}": logical[layer] for layer in range(_LAYERS)}


def _hand_over(threads: ThreadPoolExecutor, writer: list[_Rank], reader: list[_Rank]) -> tuple[float, float]:
    """Seconds of the write and of the read, of all ranks side by side."""
    import torch

    head_groups = max(len(writer), len(reader))
    right = torch.randn(_LAYERS, _BLOCKS, _HEADS, _TOKENS, _CONTENT).half()
    for rank in writer:
        for layer, tensor in enumerate(rank.tensors.values()):
            tensor.copy_(_own(right[layer], rank))
    keys = [os.urandom(31) for _ in range(_BLOCKS)]
    begun_s = time.perf_counter()
    list(threads.map(lambda rank: rank.write(keys, head_groups), writer))
    write_s = time.perf_counter() - begun_s
    for rank in reader:  # those of an equal size are the writer's
        for tensor in rank.tensors.values():
            tensor.zero_()
    begun_s = time.perf_counter()
    list(threads.map(lambda rank: rank.read(keys, head_groups), reader))
    read_s = time.perf_counter() - begun_s
    for rank in reader:
        for layer, tensor in enumerate(rank.tensors.values()):
            if not torch.equal(tensor, _own(right[layer], rank)):
                raise ChecksumMismatch(
                    f"rank {rank.tp_rank} of {rank.tp_size} has other numbers in layer {layer}"
                )
    for rank in writer:
        for number, _ in rank.parts(head_groups):
            rank.client.remove_many(_keys(keys, number))
    return write_s, read_s


def _own(layer: Any, rank: _Rank) -> Any:
    """The heads of a rank in one layer of all."""
    each = _HEADS // rank.tp_size
    return layer[:, rank.tp_rank * each : (rank.tp_rank + 1) * each]


def _keys(keys: Sequence[bytes], part: int) -> list[bytes]:
    return [key + bytes([part]) for key in keys]


def _rows(order: str, taken: dict[tuple[int, int], list[tuple[float, float]]]) -> list[Row]:
    middle = {sizes: [median(times) for times in zip(*found, strict=True)] for sizes, found in taken.items()}
    size_mb = _BLOCKS * _LAYERS * _HEADS * _TOKENS * _CONTENT * 2 / 1e6
    rows = [
        Row(
            f"{order}: {size} to {size} ranks, {size_mb:.0f} MB written and read",
            1e3 * sum(middle[size, size]),
            "ms",
        )
        for size in (1, 2)
    ]
    for writer, reader in ((1, 2), (2, 1)):
        equal_s = middle[writer, writer][0] + middle[reader, reader][1]
        rows.append(
            bar_row(
                f"{order}: {writer} to {reader} ranks, in two parts",
                1e3 * sum(middle[writer, reader]),
                "ms",
                against="equal sizes",
                reference=1e3 * equal_s,
                at_most=AT_MOST if order == next(iter(_ORDERS)) else None,
            )
        )
    return rows
