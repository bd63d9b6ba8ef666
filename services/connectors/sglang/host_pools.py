"""SGLang's host pools as bytes: where a page lies, without a copy.

Idea: a host pool says at which addresses a page's pieces are. Here they become views of the pool's own memory, checked
to lie inside of it: an address that a pool computes wrongly is an error, and not a process that ends.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mooncache.connectors.sglang.core.layout import PageShape, k_before_v
from mooncache.errors import ConfigInvalid, InvalidArgument


class _HostRange(NamedTuple):
    address: int
    end: int
    whole: memoryview
    tensor: Any  # keeps the memory


def tensors_of(pool: Any) -> Iterator[Any]:
    """The tensors in which a host pool has its pages."""
    hybrid = getattr(pool, "get_hybrid_pool_buffer", None)
    found = pool.kv_buffer if hybrid is None else hybrid()
    yield from found if isinstance(found, list | tuple) else [found]


def is_logical(pool: Any) -> bool:
    """Whether a pool only counts places, and others have the bytes."""
    return getattr(pool, "kv_buffer", None) is None and not hasattr(pool, "get_hybrid_pool_buffer")


class PagePool:
    """One host pool.

    Raises:
        ConfigInvalid: memory that is not the host's or has gaps, or a size that is no multiple of the page size.
    """

    def __init__(self, name: str, pool: Any) -> None:
        self.name = name
        self.pool = pool
        self.page_tokens = int(pool.page_size or 1)
        self.dtype = str(pool.dtype).removeprefix("torch.")
        if self.page_tokens < 1 or int(pool.size) % self.page_tokens:
            raise ConfigInvalid(
                f"The host pool {name} has {pool.size} tokens, which its page size {self.page_tokens} does not divide."
            )
        if getattr(pool, "shared_allocation_domain", None) is not None:
            raise ConfigInvalid(
                f"The pages of the host pool {name} move about in its memory (--enable-unified-memory): they cannot be "
                "shared."
            )
        regions = [_region(name, tensor) for tensor in tensors_of(pool)]
        self._regions = sorted(regions, key=lambda region: region.address)
        self._starts = [region.address for region in self._regions]
        _, sizes = pool.get_page_buffer_meta(_first_page(self.page_tokens))
        self.shape = _shape(pool, tuple(map(int, sizes)))
        self.page_bytes = sum(self.shape.piece_bytes)

    def buffers(self) -> list[memoryview]:
        """All memory of the pool."""
        return [region.whole for region in self._regions]

    def pieces(self, indices: Any, pages: int, split: int = 1) -> list[list[memoryview]]:
        """Views of the pieces of pages, one list for each page; with `split` one for each of its groups of heads.

        Args:
            indices: SGLang's host indices, one for each token.

        Raises:
            InvalidArgument: there are not as many indices as the pages have tokens, or an address is not the pool's.
        """
        if len(indices) != pages * self.page_tokens:
            raise InvalidArgument(
                f"{len(indices)} host indices make no {pages} pages of {self.page_tokens} tokens."
            )
        if split == 1:
            pointers, sizes = self.pool.get_page_buffer_meta(indices)
        else:
            pointers, sizes = self.pool.get_split_heads_page_buffer_meta(indices, split)
        each, rest = divmod(len(pointers), pages * split)
        if rest or not each or len(pointers) != len(sizes):
            raise InvalidArgument(
                f"{len(pointers)} pieces do not make {pages * split} blocks of equal number."
            )
        views = list(map(self._view, pointers, sizes))
        blocks = [views[at : at + each] for at in range(0, len(views), each)]
        return list(map(k_before_v, blocks)) if self.shape.interleaved else blocks

    def _view(self, address: int, size: int) -> memoryview:
        at = bisect_right(self._starts, address) - 1
        region = self._regions[max(at, 0)]
        offset = address - region.address
        if offset < 0 or address + size > region.end:
            raise InvalidArgument(f"{size} bytes at {address:#x} are not in the host pool {self.name}.")
        return region.whole[offset : offset + size]


def _region(name: str, tensor: Any) -> _HostRange:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ConfigInvalid(f"The host pool {name} is not contiguous host memory ({tensor.device}).")
    address, size = int(tensor.data_ptr()), int(tensor.nbytes)
    whole = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
    return _HostRange(address, address + size, whole, tensor)


def _first_page(tokens: int) -> Any:
    import torch

    return torch.arange(tokens, dtype=torch.int64)


def _shape(pool: Any, sizes: tuple[int, ...]) -> PageShape:
    widths = [getattr(pool, name, None) for name in ("head_dim", "v_head_dim", "kv_cache_dim")]
    return PageShape(
        pool=type(pool).__name__,
        layout=str(pool.layout),
        layers=(int(getattr(pool, "start_layer", 0) or 0), int(getattr(pool, "end_layer", 0) or 0)),
        layer_count=int(getattr(pool, "layer_num", 0) or 0),
        heads=int(getattr(pool, "head_num", 1) or 1),
        widths=tuple(int(width) for width in widths if isinstance(width, int)),
        piece_bytes=sizes,
        page_format=str(getattr(pool, "storage_format_tag", "") or ""),
    )


class HostPools:
    """The host pools of one rank, as memory worth registering."""

    is_staged = False

    def __init__(self) -> None:
        self._pools: dict[str, PagePool] = {}
        self._changed: Callable[[], None] = lambda: None

    def add(self, pool: PagePool) -> None:
        """Take a pool in place of the one with its name."""
        self._pools[pool.name] = pool
        self._changed()

    def get(self, name: str) -> PagePool:
        """The pool with a name. Raises InvalidArgument: none was registered."""
        if name not in self._pools:
            raise InvalidArgument(
                f"There is no host pool {name}; there are {', '.join(self._pools) or 'none'}."
            )
        return self._pools[name]

    def __contains__(self, name: str) -> bool:
        return name in self._pools

    def buffers(self) -> Sequence[memoryview]:
        """The memory of all pools."""
        return [buffer for pool in self._pools.values() for buffer in pool.buffers()]

    def on_new_buffers(self, changed: Callable[[], None]) -> None:
        """Call `changed` after a pool was added."""
        self._changed = changed
