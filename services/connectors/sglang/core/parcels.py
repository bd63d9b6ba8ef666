"""How the KV of a request is cut into parcels, and which bytes of a page go to a rank of another size. Pure.

Idea: both engines name rows of their buffers by positions in lists that each of them keeps: position 3 is the fourth
page of the request on both sides. So what is sent names no memory of the other engine, and a peer can reach nothing but
the rows of a request that the receiving side has announced itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from mooncache.errors import InvalidArgument, TooLarge

KV: Final = -1
METADATA: Final = -2
"""Components beside the states, which count from 0: the pages, and the rows with the first token."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Which bytes of a row go, and where to: a row is `parts` equal parts, of each of which `width_bytes` go."""

    parts: int
    source_offset_bytes: int
    target_offset_bytes: int
    width_bytes: int

    @classmethod
    def whole(cls, row_bytes: int) -> Cut:
        """All bytes of a row."""
        return cls(1, 0, 0, row_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes that go of one row."""
        return self.parts * self.width_bytes


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one buffer."""

    component: int
    source: int
    """Number of the sender's buffer in that component."""
    target: int
    """Number of the receiver's."""
    first: int
    """Position of the first row in the request."""
    rows: int
    parts: int
    source_offset_bytes: int
    target_offset_bytes: int
    width_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes in the parcel."""
        return self.rows * self.parts * self.width_bytes


class ParcelNote(msgspec.Struct, frozen=True):
    """What the sender says of a parcel that lies in its staging memory."""

    room: int
    opening: int
    """Of the room on the decode rank, which has chosen it."""
    number: int
    """Of this parcel; the sender counts over all rooms."""
    address: int
    size_bytes: int
    crc32c: int
    pieces: tuple[Piece, ...]
    reply_to: str
    """host:port of the sender's control socket."""


class ParcelTaken(msgspec.Struct, frozen=True):
    """The receiver's answer: the parcel's memory is free again."""

    room: int
    number: int
    problem: str = ""
    """Why its bytes are not in place; empty: they are, and were verified."""


@dataclass(frozen=True, slots=True)
class Heads:
    """How the KV heads of a model lie on the ranks of one engine."""

    ranks: int
    rank: int
    total: int

    @property
    def each(self) -> int:
        """Heads of one rank; with fewer heads than ranks each rank has a copy of one."""
        return max(1, self.total // self.ranks)

    @property
    def first(self) -> int:
        """The model's number of this rank's first head."""
        if self.ranks <= self.total:
            return self.rank % self.ranks * self.each
        return self.rank % self.ranks // (self.ranks // self.total)


def head_cut(
    source: Heads, target: Heads, *, tokens: int, source_row_bytes: int, target_row_bytes: int
) -> Cut:
    """What goes between two ranks: the heads that both have, of each token of a page [tokens, heads, bytes].

    Raises:
        InvalidArgument: the ranks have no head in common, or a page does not consist of their heads.
    """
    head_bytes, rest = divmod(source_row_bytes, tokens * source.each)
    if rest or head_bytes * tokens * target.each != target_row_bytes:
        raise InvalidArgument(
            f"Pages of {source_row_bytes} and {target_row_bytes} bytes do not consist of {source.each} and "
            f"{target.each} heads of equal size in {tokens} tokens."
        )
    first = max(source.first, target.first)
    end = min(source.first + source.each, target.first + target.each)
    if first >= end:
        raise InvalidArgument(
            f"Rank {source.rank} of {source.ranks} and rank {target.rank} of {target.ranks} have no head in common."
        )
    return Cut(
        parts=tokens,
        source_offset_bytes=(first - source.first) * head_bytes,
        target_offset_bytes=(first - target.first) * head_bytes,
        width_bytes=(end - first) * head_bytes,
    )


def pieces_of(
    component: int, pairs: Iterable[tuple[int, int]], cuts: Sequence[Cut], *, first: int, rows: int
) -> list[Piece]:
    """One piece for each pair of buffers; `cuts` are those of the sender's buffers."""
    if not rows:
        return []
    return [
        Piece(
            component,
            source,
            target,
            first,
            rows,
            cuts[source].parts,
            cuts[source].source_offset_bytes,
            cuts[source].target_offset_bytes,
            cuts[source].width_bytes,
        )
        for source, target in pairs
    ]


def parcels(pieces: Iterable[Piece], parcel_bytes_max: int) -> Iterator[tuple[Piece, ...]]:
    """The same rows in the same order, in parcels that are as large as they may be.

    Raises:
        TooLarge: one row is larger than a parcel.
    """
    packed: list[Piece] = []
    free_bytes = parcel_bytes_max
    for piece in pieces:
        row_bytes = piece.parts * piece.width_bytes
        if row_bytes > parcel_bytes_max:
            raise TooLarge(f"A row of {row_bytes} bytes is larger than a parcel ({parcel_bytes_max}).")
        done = 0
        while done < piece.rows:
            rows = min(piece.rows - done, free_bytes // row_bytes)
            if not rows:
                yield tuple(packed)
                packed, free_bytes = [], parcel_bytes_max
                continue
            packed.append(msgspec.structs.replace(piece, first=piece.first + done, rows=rows))
            done += rows
            free_bytes -= rows * row_bytes
    if packed:
        yield tuple(packed)
