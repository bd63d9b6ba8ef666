"""Tensors as objects: a head of 128 bytes (dtype and shape), then the elements in row-major order.

torch is imported by the first call that needs it. What is read was written by another program: a head that makes no
sense, or whose size is not the object's, is no tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

from mooncache.dropin import codes
from mooncache.dropin.base import StoreBase, each, failed, first_failure, one, other
from mooncache.dropin.memory import DeviceRange, ObjectPart, view_of
from mooncache.dropin.objects import Source
from mooncache.dropin.values import ReplicateConfig
from mooncache.errors import InvalidArgument, MooncacheError

_MARK: Final = b"mcTensor"
_HEAD: Final = struct.Struct("<8s16sII12Q")
HEAD_BYTES: Final = _HEAD.size
_DIMENSIONS_MAX: Final = 12
_ELEMENTS_MAX: Final = 1 << 48
_DTYPES: Final = frozenset(
    {
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    }
)


def head_of(tensor: Any) -> bytes:
    """The head of a tensor. Raises InvalidArgument for what is none, or one of too many dimensions."""
    dtype = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
    if dtype not in _DTYPES or not hasattr(tensor, "data_ptr"):
        raise InvalidArgument(f"{type(tensor).__name__} is no tensor, or its dtype {dtype!r} is not known.")
    shape = tuple(tensor.shape)
    if len(shape) > _DIMENSIONS_MAX:
        raise InvalidArgument(f"A tensor may have at most {_DIMENSIONS_MAX} dimensions; got {len(shape)}.")
    padded = (*shape, *(0,) * (_DIMENSIONS_MAX - len(shape)))
    return _HEAD.pack(_MARK, dtype.encode(), len(shape), 0, *padded)


def source_of(tensor: Any) -> Source:
    """Head and elements of a tensor, which is kept alive by them. Raises InvalidArgument as head_of does."""
    head: ObjectPart = memoryview(head_of(tensor))
    flat = tensor.detach().contiguous()
    size = flat.numel() * flat.element_size()
    if not size:
        return [head]
    if flat.device.type == "cuda":
        return [head, KeptRange(flat, size)]
    import torch

    return [head, memoryview(flat.reshape(-1).view(torch.uint8).numpy())]


class KeptRange(DeviceRange):
    """The elements of a tensor in GPU memory."""

    __slots__ = ("owner",)

    def __init__(self, tensor: Any, size: int) -> None:
        super().__init__(tensor.data_ptr(), size, tensor.device.index or 0)
        self.owner = tensor


def tensor_of(memory: Any) -> Any:
    """The tensor that begins in a writable buffer, over its memory; None when there is none."""
    import torch

    view = memoryview(memory)
    if view.nbytes < HEAD_BYTES:
        return None
    mark, name, dimensions, _, *padded = _HEAD.unpack_from(view)
    name = name.rstrip(b"\0").decode("ascii", "replace")
    if mark != _MARK or name not in _DTYPES or dimensions > _DIMENSIONS_MAX:
        return None
    shape, dtype = padded[:dimensions], getattr(torch, name, None)
    count = prod(shape)
    if (
        dtype is None or prod(max(length, 1) for length in shape) > _ELEMENTS_MAX
    ):  # strides, also of an empty tensor
        return None
    if HEAD_BYTES + count * dtype.itemsize > view.nbytes:
        return None
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype, count=count, offset=HEAD_BYTES).reshape(shape)


def shard_key(key: str, rank: int) -> str:
    """Under which name the original keeps one rank's shard."""
    return f"{key}_tp_{rank}"


def _shards(tensor: Any, tp_size: int, split_dim: int) -> list[Any]:
    """A tensor in equal parts, as torch.chunk makes them. Raises InvalidArgument where there are fewer."""
    if tp_size < 1:
        raise InvalidArgument(f"tp_size must be at least 1; got {tp_size}.")
    if not hasattr(tensor, "chunk") or not -tensor.dim() <= split_dim < tensor.dim():
        raise InvalidArgument(f"split_dim {split_dim} is no dimension of this value.")
    found = list(tensor.chunk(tp_size, split_dim))
    if len(found) != tp_size:
        raise InvalidArgument(f"Dimension {split_dim} does not give {tp_size} shards.")
    return found


class TensorCalls(StoreBase):
    """put, upsert, pub and get of torch tensors, also in shards for tensor parallelism, and safetensors files."""

    # --- put -------------------------------------------------------------------------------------------------

    def _put_tensors(
        self,
        call: str,
        keys: Sequence[str],
        tensors: Sequence[Any],
        config: ReplicateConfig | None = None,
        *,
        replace: bool = False,
    ) -> list[int]:
        return self._put(call, keys, [source_of(tensor) for tensor in tensors], config, replace=replace)

    @one
    def put_tensor(self, key: str, tensor: Any) -> int:
        """Store a tensor; 0, or a negative code."""
        return self._put_tensors("put_tensor", [key], [tensor])[0]

    @one
    def pub_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        """`put_tensor` with a ReplicateConfig."""
        return self._put_tensors("pub_tensor", [key], [tensor], config)[0]

    @one
    def upsert_tensor(self, key: str, tensor: Any) -> int:
        """`put_tensor`, in place of what is there."""
        return self._put_tensors("upsert_tensor", [key], [tensor], replace=True)[0]

    @one
    def upsert_pub_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        """`upsert_tensor` with a ReplicateConfig."""
        return self._put_tensors("upsert_pub_tensor", [key], [tensor], config, replace=True)[0]

    @each
    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        """`put_tensor` for a batch, one code for each key."""
        return self._put_tensors("batch_put_tensor", keys, tensors_list)

    @each
    def batch_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: ReplicateConfig | None = None
    ) -> list[int]:
        """`pub_tensor` for a batch, one code for each key."""
        return self._put_tensors("batch_pub_tensor", keys, tensors_list, config)

    @each
    def batch_upsert_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        """`upsert_tensor` for a batch, one code for each key."""
        return self._put_tensors("batch_upsert_tensor", keys, tensors_list, replace=True)

    @each
    def batch_upsert_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: ReplicateConfig | None = None
    ) -> list[int]:
        """`upsert_pub_tensor` for a batch, one code for each key."""
        return self._put_tensors("batch_upsert_pub_tensor", keys, tensors_list, config, replace=True)

    # --- put, from memory that begins with a head ---------------------------------------------------------------

    def _put_from(
        self, call: str, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], *, replace: bool
    ) -> list[int]:
        sources = [[part] for part in self._registry.parts(addresses, sizes)]
        for source in sources:
            part = source[0]
            if isinstance(part, memoryview) and tensor_of(part) is None:
                raise InvalidArgument(f"{call}: no tensor begins at one of the addresses.")
        return self._put(call, keys, sources, None, replace=replace)

    @one
    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Store the tensor at an address, as `get_tensor_into` leaves one there."""
        return self._put_from("put_tensor_from", [key], [buffer_ptr], [size], replace=False)[0]

    @one
    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """`put_tensor_from`, in place of what is there."""
        return self._put_from("upsert_tensor_from", [key], [buffer_ptr], [size], replace=True)[0]

    @each
    def batch_put_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """`put_tensor_from` for a batch, one code for each key."""
        return self._put_from("batch_put_tensor_from", keys, buffer_ptrs, sizes, replace=False)

    @each
    def batch_upsert_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """`upsert_tensor_from` for a batch, one code for each key."""
        return self._put_from("batch_upsert_tensor_from", keys, buffer_ptrs, sizes, replace=True)

    # --- put, in shards ------------------------------------------------------------------------------------------

    def _put_shards(
        self,
        call: str,
        keys: Sequence[str],
        tensors: Sequence[Any],
        config: ReplicateConfig | None,
        size: int,
        dim: int,
    ) -> list[int]:
        if len(keys) != len(tensors):
            raise InvalidArgument(f"{len(keys)} keys and {len(tensors)} tensors do not belong together.")
        if size == 1:
            return self._put_tensors(call, keys, tensors, config)
        pieces = [piece for tensor in tensors for piece in _shards(tensor, size, dim)]
        names = [shard_key(key, rank) for key in keys for rank in range(size)]
        found = self._put_tensors(call, names, pieces, config)
        return [first_failure(found[i : i + size]) for i in range(0, len(found), size)]

    @one
    def put_tensor_with_tp(
        self,
        key: str,
        tensor: Any,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """Store a tensor in `tp_size` shards along `split_dim`, each under a name of its rank."""
        return self._put_shards("put_tensor_with_tp", [key], [tensor], None, tp_size, split_dim)[0]

    @one
    def pub_tensor_with_tp(
        self,
        key: str,
        tensor: Any,
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """`put_tensor_with_tp` with a ReplicateConfig."""
        return self._put_shards("pub_tensor_with_tp", [key], [tensor], config, tp_size, split_dim)[0]

    @each
    def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Any],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """`put_tensor_with_tp` for a batch, one code for each key."""
        return self._put_shards("batch_put_tensor_with_tp", base_keys, tensors_list, None, tp_size, split_dim)

    @each
    def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Any],
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """`pub_tensor_with_tp` for a batch, one code for each key."""
        return self._put_shards(
            "batch_pub_tensor_with_tp", base_keys, tensors_list, config, tp_size, split_dim
        )

    # --- get -------------------------------------------------------------------------------------------------

    @other(None)
    def get_tensor(self, key: str) -> Any:
        """The tensor, in host memory of its own; None when it is not there."""
        return self._get_tensors([key])[0]

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Any]:
        """`get_tensor` for a batch."""
        return _each_of("batch_get_tensor", keys, self._get_tensors)

    def _get_tensors(self, keys: Sequence[str]) -> list[Any]:
        objects = self._objects
        sizes = objects.sizes(keys)
        made = [bytearray(max(size, 0)) for size in sizes]
        there = [i for i, size in enumerate(sizes) if size >= HEAD_BYTES]
        found: list[Any] = [None] * len(keys)
        answer = objects.get_into([keys[i] for i in there], [[memoryview(made[i])] for i in there])
        for i, size in zip(there, answer, strict=True):
            if size == sizes[i]:
                found[i] = tensor_of(made[i])
        return found

    @other(None)
    def get_tensor_with_tp(
        self,
        key: str,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> Any:
        """The shard of a rank; of one rank the whole tensor."""
        return self._get_tensors([key if tp_size <= 1 else shard_key(key, tp_rank)])[0]

    def batch_get_tensor_with_tp(
        self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1
    ) -> list[Any]:
        """`get_tensor_with_tp` for a batch."""
        names = [key if tp_size <= 1 else shard_key(key, tp_rank) for key in base_keys]
        return _each_of("batch_get_tensor_with_tp", names, self._get_tensors)

    def _get_tensors_into(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[Any]:
        parts = self._registry.parts(addresses, sizes)
        if len(keys) != len(parts):
            raise InvalidArgument(f"{len(keys)} keys and {len(parts)} buffers do not belong together.")
        found = self._objects.get_into(keys, [[part] for part in parts])
        return [
            tensor_of(view_of(address, size)) if size > 0 and isinstance(part, memoryview) else None
            for address, part, size in zip(addresses, parts, found, strict=True)
        ]

    @other(None)
    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Any:
        """Read a tensor, head and elements, to an address in host memory; a tensor over that memory, None on a miss."""
        return self._get_tensors_into([key], [buffer_ptr], [size])[0]

    def batch_get_tensor_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Any]:
        """`get_tensor_into` for a batch."""
        return _each_of(
            "batch_get_tensor_into", keys, lambda names: self._get_tensors_into(names, buffer_ptrs, sizes)
        )

    @other(None)
    def get_tensor_with_tp_into(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> Any:
        """`get_tensor_into` for the shard of a rank."""
        name = key if tp_size <= 1 else shard_key(key, tp_rank)
        return self._get_tensors_into([name], [buffer_ptr], [size])[0]

    # --- files -----------------------------------------------------------------------------------------------

    @one
    def save_tensor_to_safetensor(self, key: str, file_name: str | None = None) -> int:
        """Write a tensor into a safetensors file, by default one named like the key. Needs the package safetensors."""
        from safetensors.torch import save_file

        tensor = self._get_tensors([key])[0]
        if tensor is None:
            return codes.NOT_FOUND
        try:
            save_file({key: tensor}, file_name or key)
        except OSError as error:
            raise InvalidArgument(f"The file cannot be written: {error}") from error
        return codes.OK

    @other(None)
    def load_tensor_from_safetensor(self, key: str | None = None, file_name: str = "") -> Any:
        """Store a tensor of a safetensors file (the key's, else the first) and return it; None when it cannot be."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            loaded = load_file(file_name)
        except (OSError, SafetensorError) as error:
            raise InvalidArgument(f"The file cannot be read: {error}") from error
        if not loaded:
            return None
        tensor = loaded[key] if key in loaded else next(iter(loaded.values()))
        stored = self._put_tensors("load_tensor_from_safetensor", [key or file_name], [tensor])[0]
        return None if stored else tensor


def _each_of(what: str, keys: Sequence[str], call: Callable[[Sequence[str]], list[Any]]) -> list[Any]:
    """The answers of a batch; None for all of them when it failed as a whole."""
    try:
        return call(keys)
    except MooncacheError as error:
        failed(what, error)
        return [None] * len(keys)
