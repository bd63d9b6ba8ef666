"""An engine's own buffers (KV, states, metadata) by the addresses that it gives, and rows out of them and into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mooncache.connectors.sglang.core.parcels import KV, METADATA, Piece
from mooncache.errors import InvalidArgument
from mooncache.kvcache.memory import Region

RequestRows = Mapping[int, Any]
"""For each component the engine's own indices of the rows of a request, in the order of its positions."""


class _GpuRange:
    """A range of GPU memory, in the form that array libraries agree on."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


class EngineBuffers:
    """Buffers of one rank, each [rows, bytes of a row].

    Args:
        arguments: SGLang's KVArgs.
        device: "cpu", or "cuda:N" of the KV and the states. The metadata is always in host memory.
    """

    def __init__(self, arguments: Any, device: str) -> None:
        self._device = torch.device(device)
        self._arguments = arguments
        self.map()

    def map(self) -> None:
        """Take the addresses as they are now in the arguments."""
        given = self._arguments
        self._tables = {
            KV: self._table(given.kv_data_ptrs, given.kv_data_lens, given.kv_item_lens, self._device),
            METADATA: self._table(
                given.aux_data_ptrs, given.aux_data_lens, given.aux_item_lens, torch.device("cpu")
            ),
        }
        states = zip(given.state_data_ptrs, given.state_data_lens, given.state_item_lens, strict=True)
        for component, (addresses, sizes, row_bytes) in enumerate(states):
            self._tables[component] = self._table(addresses, sizes, row_bytes, self._device)

    def unmap(self) -> None:
        """Forget the memory: the engine gives it back, and has no request."""
        self._tables = {}

    def row_bytes(self, component: int) -> list[int]:
        """Of each buffer of a component."""
        return [table.shape[1] for table in self._tables[component]]

    def _table(
        self, addresses: Sequence[int], sizes: Sequence[int], row_bytes: Sequence[int], device: torch.device
    ) -> list[torch.Tensor]:
        return [
            _bytes_at(int(address), int(size) // int(each) * int(each), device).view(-1, int(each))
            for address, size, each in zip(addresses, sizes, row_bytes, strict=True)
        ]

    def gather(self, pieces: Sequence[Piece], rows: RequestRows, out: torch.Tensor) -> int:
        """Copy rows into host memory, one piece after the other; the number of bytes.

        Args:
            out: uint8 [bytes], host memory.

        Raises:
            InvalidArgument: a piece is not of these buffers.
        """
        at = 0
        for piece in pieces:
            table, index = self._find(piece.source, piece.source_offset_bytes, piece, rows)
            end = at + piece.size_bytes
            start = piece.source_offset_bytes
            shape = (piece.rows, piece.parts, piece.width_bytes)
            if not table.is_cuda and piece.parts * piece.width_bytes == table.shape[1]:
                torch.index_select(table, 0, index, out=out[at:end].view(piece.rows, -1))
            else:
                chosen = table.index_select(0, index).view(piece.rows, piece.parts, -1)
                out[at:end].view(shape).copy_(chosen[:, :, start : start + piece.width_bytes])
            at = end
        return at

    def scatter(self, pieces: Sequence[Piece], rows: RequestRows, source: torch.Tensor) -> None:
        """The way back. All bytes are in place when it returns. Raises InvalidArgument as `gather`."""
        at = 0
        for piece in pieces:
            table, index = self._find(piece.target, piece.target_offset_bytes, piece, rows)
            shape = (piece.rows, piece.parts, piece.width_bytes)
            chosen = source[at : at + piece.size_bytes].view(shape).to(table.device)
            start = piece.target_offset_bytes
            parts = table.view(table.shape[0], piece.parts, -1)[:, :, start : start + piece.width_bytes]
            parts.index_copy_(0, index, chosen)
            at += piece.size_bytes
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _find(
        self, buffer: int, offset_bytes: int, piece: Piece, rows: RequestRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tables, chosen = self._tables.get(piece.component, []), rows.get(piece.component)
        last = piece.first + piece.rows
        if not 0 <= buffer < len(tables) or chosen is None or not 0 <= piece.first < last <= len(chosen):
            raise InvalidArgument(
                f"Rows {piece.first} to {last} of buffer {buffer}, component {piece.component}, are not this request's."
            )
        table = tables[buffer]
        part_bytes, rest = divmod(table.shape[1], max(1, piece.parts))
        if rest or piece.width_bytes < 1 or not 0 <= offset_bytes <= part_bytes - piece.width_bytes:
            raise InvalidArgument(
                f"{piece.width_bytes} bytes at {offset_bytes} are not in each of {piece.parts} parts of a row of "
                f"{table.shape[1]} bytes."
            )
        index = torch.from_numpy(np.array(chosen[piece.first : last], np.int64))
        if int(index.min()) < 0 or int(index.max()) >= table.shape[0]:
            raise InvalidArgument(f"A row is beyond a buffer of {table.shape[0]} rows.")
        return table, index.to(table.device)


def _bytes_at(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.as_tensor(_GpuRange(address, size_bytes), device=device)
    return torch.frombuffer(Region(address, size_bytes, None).view(), dtype=torch.uint8)
