"""Calls that name the caller's memory by address: nothing is copied on the way, apart from what the transport needs."""

from __future__ import annotations

from collections.abc import Sequence

from mooncache.dropin import codes
from mooncache.dropin.base import StoreBase, each, failed, one
from mooncache.dropin.memory import DeviceRange, RegisteredBuffers, check_mapped, view_of
from mooncache.dropin.objects import Range, Source
from mooncache.dropin.values import ReplicateConfig
from mooncache.errors import InvalidArgument, MooncacheError, TransportUnavailable

Nested = list[list[list[int]]]


def _singles(registry: RegisteredBuffers, addresses: Sequence[int], sizes: Sequence[int]) -> list[Source]:
    return [[part] for part in registry.parts(addresses, sizes)]


def _lists(
    registry: RegisteredBuffers, addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
) -> list[Source]:
    if len(addresses) != len(sizes):
        raise InvalidArgument(
            f"{len(addresses)} lists of addresses and {len(sizes)} of sizes do not belong together."
        )
    return [registry.parts(own, lengths) for own, lengths in zip(addresses, sizes, strict=True)]


class ZeroCopyCalls(StoreBase):
    """The families `*_from`, `*_into`, `*_multi_buffers` and ranges."""

    @one
    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Memory that will be used often, so that RDMA devices reach it in place. 0, or a negative code."""
        whole = view_of(buffer_ptr, size)
        if not size:
            raise InvalidArgument("A buffer of 0 bytes cannot be registered.")
        if not isinstance(whole, DeviceRange):
            check_mapped(buffer_ptr, size)
        registered = None
        try:
            registered = self._objects.client.register_buffer(whole)
        except TransportUnavailable:
            if not isinstance(whole, DeviceRange):
                raise
        try:
            self._registry.add(whole, buffer_ptr, size, registered)
        except InvalidArgument:
            if registered is not None:
                registered.close()
            raise
        return codes.OK

    @one
    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Take memory back before it is freed; after this call nothing of the store touches it."""
        return codes.OK if self._registry.remove(buffer_ptr) else codes.INVALID_PARAMS

    # --- put -------------------------------------------------------------------------------------------------

    @one
    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """Store the bytes at an address."""
        return self._put("put_from", [key], [[self._registry.part(buffer_ptr, size)]], config)[0]

    @one
    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """Store the bytes at an address, in place of what is there."""
        source = [self._registry.part(buffer_ptr, size)]
        return self._put("upsert_from", [key], [source], config, replace=True)[0]

    @one
    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig | None = None,
    ) -> int:
        """Store the metadata and then the data as one object; of data without bytes nothing is stored."""
        if not size:
            return codes.OK
        source = self._registry.parts([metadata_buffer_ptr, buffer_ptr], [metadata_size, size])
        return self._put("put_from_with_metadata", [key], [source], config)[0]

    @each
    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """`put_from` for a batch, one code for each key."""
        return self._put("batch_put_from", keys, _singles(self._registry, buffer_ptrs, sizes), config)

    @each
    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """`upsert_from` for a batch, one code for each key."""
        sources = _singles(self._registry, buffer_ptrs, sizes)
        return self._put("batch_upsert_from", keys, sources, config, replace=True)

    @each
    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store objects whose slices lie at several addresses each, one code for each key."""
        sources = _lists(self._registry, all_buffer_ptrs, all_sizes)
        return self._put("batch_put_from_multi_buffers", keys, sources, config)

    # --- get -------------------------------------------------------------------------------------------------

    @one
    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Read an object to an address; the number of its bytes, or a negative code."""
        return self._objects.get_into([key], [[self._registry.part(buffer_ptr, size)]])[0]

    @each
    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """`get_into` for a batch, one number for each key."""
        return self._get_into(keys, _singles(self._registry, buffer_ptrs, sizes))

    @each
    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Read objects, each scattered over several addresses; one number for each key."""
        return self._get_into(keys, _lists(self._registry, all_buffer_ptrs, all_sizes))

    def _get_into(self, keys: Sequence[str], destinations: list[Source]) -> list[int]:
        if len(keys) != len(destinations):
            raise InvalidArgument(f"{len(keys)} keys and {len(destinations)} buffers do not belong together.")
        return self._objects.get_into(keys, destinations)

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> Nested:
        """Read parts of objects into registered buffers: for buffer b, its key k and range r, `all_sizes[b][k][r]`
        bytes from `all_src_offsets[b][k][r]` of the object to `all_dst_offsets[b][k][r]` of the buffer.

        Returns:
            The numbers of bytes, nested in the same way; a negative code where a range could not be read.
        """
        asked: list[tuple[list[int], int, Range]] = []
        answer: Nested = []
        for b, (address, names) in enumerate(zip(buffer_ptrs, all_keys, strict=False)):
            answer.append([])
            for k, name in enumerate(names):
                lists = [_at(rows, b, k) for rows in (all_dst_offsets, all_src_offsets, all_sizes)]
                numbers = [codes.INVALID_PARAMS] * max(map(len, lists))
                answer[-1].append(numbers)
                if len(set(map(len, lists))) == 1:
                    for r, (to, offset, size) in enumerate(zip(*lists, strict=True)):
                        if min(to, offset, size) >= 0 and to + size <= self._registry.room(address):
                            part = self._registry.part(address + to, size)
                            asked.append((numbers, r, Range(name, offset, part)))
        try:
            found = self._objects.get_ranges([item for _, _, item in asked])
        except MooncacheError as error:
            found = [failed("get_into_ranges", error)] * len(asked)
        for (numbers, r, _), number in zip(asked, found, strict=True):
            numbers[r] = number
        return answer


def _at(rows: Sequence[Sequence[Sequence[int]]], b: int, k: int) -> Sequence[int]:
    """The ranges of a buffer's key; none where the caller's lists are too short."""
    return rows[b][k] if b < len(rows) and k < len(rows[b]) else ()
