"""What the bytes of a page are: their order, in words that enter the passport.

Idea: K of a page comes before V, whatever the layout of the host pool; then pools whose pages have the same order of
dimensions hold the same bytes and share them, also when one has a page in one piece and another in a piece per layer.
Of host pools that are not known here the class and the sizes of all pieces are the description, so that a pool shares
with its equal alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Final, TypeVar

T = TypeVar("T")
LAYER_FIRST: Final = "layer_first"
ORDERS: Final = MappingProxyType(
    {
        LAYER_FIRST: "layer,token,head",
        "page_first": "token,layer,head",
        "page_first_direct": "layer,token,head",
        "page_head": "head,token,layer",
    }
)
"""Order of dimensions within K (and V) of a page, by SGLang's name of the layout."""
K_AND_V: Final = "MHATokenToKVPoolHost"
LATENT: Final = "MLATokenToKVPoolHost"
"""The host pools whose order is known, by the names of their classes: subclasses may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """Facts about a host pool that decide what the bytes of one of its pages are."""

    pool: str
    """Class of the host pool."""
    layout: str
    layers: tuple[int, int]
    """First layer of the model that it holds, and the one after the last."""
    layer_count: int
    """Layers that it holds; a packed draft model adds to them."""
    heads: int
    widths: tuple[int, ...]
    """Elements of one token and head: of K and of V, or of the latent vector."""
    piece_bytes: tuple[int, ...]
    """Sizes of the pieces of one page, in the pool's order."""
    page_format: str = ""
    """SGLang's own name of the format, of pools that have one."""

    @property
    def has_k_and_v(self) -> bool:
        """Whether it has heads, which tensor parallelism cuts."""
        return self.pool.startswith("MHA")

    @property
    def interleaved(self) -> bool:
        """Whether pieces of K and V alternate, one pair for each layer."""
        return self.pool == K_AND_V and self.layout == LAYER_FIRST

    def share(self, count: int) -> PageShape:
        """The shape of one of so many groups of heads."""
        sizes = tuple(size // count for size in self.piece_bytes)
        return replace(self, heads=self.heads // count, piece_bytes=sizes)

    def describe(self) -> str:
        """The layout as the passport has it."""
        order = ORDERS.get(self.layout) if self.pool in (K_AND_V, LATENT) else None
        if order is None:
            sizes = ",".join(f"{len(list(run))}*{size}" for size, run in groupby(self.piece_bytes))
            head = f"{self.pool}/{self.layout}:{sizes}"
        else:
            head = f"{'k,v' if self.pool == K_AND_V else 'latent'}:{order}:{sum(self.piece_bytes)}"
        first, last = self.layers
        shape = f"layers {first}-{last} of {self.layer_count}, {self.heads} x {list(self.widths)}"
        return "; ".join(filter(None, (head, shape, self.page_format)))


def k_before_v(pieces: Sequence[T]) -> list[T]:
    """Pieces of one page that alternate between K and V, all of K first."""
    return [*pieces[::2], *pieces[1::2]]
