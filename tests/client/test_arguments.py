"""Keys, buffers and tensors at the border: what is accepted is shared, what is refused is explained."""

from __future__ import annotations

import array
import ctypes
from typing import Any

import numpy as np
import pytest

from mooncache.client.buffers import size_bytes, to_destination, to_source, to_view
from mooncache.client.dlpack import dlpack_view
from mooncache.client.keys import to_block_key, to_block_keys
from mooncache.client.master_link import parse_targets
from mooncache.errors import InvalidArgument, KeyInvalid


def test_a_block_key_is_taken_as_it_is_and_a_name_is_hashed() -> None:
    raw = bytes(range(32))
    assert to_block_key(raw) == raw
    assert to_block_key(memoryview(raw)) == raw
    assert len(to_block_key("name")) == 32
    assert to_block_key("name") == to_block_key("name") != to_block_key("Name")


@pytest.mark.parametrize("key", [b"short", b"", "", "x" * 70_000, 7, None, 1.5, ["a"]])
def test_other_keys_are_refused(key: Any) -> None:
    with pytest.raises(KeyInvalid):
        to_block_key(key)


def test_a_single_key_is_not_a_batch() -> None:
    with pytest.raises(InvalidArgument, match="Wrap it"):
        to_block_keys("abc")
    with pytest.raises(InvalidArgument, match="list of keys"):
        to_block_keys(7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "buffer",
    [
        b"12345678",
        bytearray(b"12345678"),
        memoryview(b"12345678"),
        array.array("B", b"12345678"),
        np.arange(2, dtype=np.uint32),
        np.zeros((2, 2), dtype=np.uint16),
        (ctypes.c_uint8 * 8)(),
    ],
)
def test_buffers_become_flat_views(buffer: Any) -> None:
    view = to_view(buffer, writable=False)
    assert (view.nbytes, view.format, view.ndim) == (8, "B", 1)


def test_views_share_memory() -> None:
    target = np.zeros(4, dtype=np.uint32)
    to_view(target, writable=True)[0] = 7
    assert target[0] == 7


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        ("text", "Encode it"),
        (7, "holds no bytes"),
        (None, "holds no bytes"),
        (np.zeros((4, 4))[:, 1], "not contiguous"),
    ],
)
def test_other_buffers_are_refused(buffer: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        to_view(buffer, writable=False)


def test_a_destination_must_be_writable() -> None:
    with pytest.raises(InvalidArgument, match="read-only"):
        to_destination(b"frozen")
    with pytest.raises(InvalidArgument, match="must not be empty"):
        to_destination([])


def test_a_list_is_scatter_gather() -> None:
    source = to_source([b"ab", bytearray(b"cde")])
    assert isinstance(source, list)
    assert size_bytes(source) == 5
    assert size_bytes(to_source(b"abc")) == 3


class OnlyDlpack:
    """A tensor library that knows nothing but DLPack, like a bfloat16 tensor that NumPy cannot take."""

    def __init__(self, inner: np.ndarray[Any, Any]) -> None:
        self.inner = inner

    def __dlpack__(self) -> Any:
        return self.inner.__dlpack__()


def test_dlpack_shares_memory_without_the_buffer_protocol() -> None:
    inner = np.arange(6, dtype=np.int16).reshape(2, 3)
    view = to_view(OnlyDlpack(inner), writable=True)
    assert view.nbytes == 12
    assert bytes(view) == inner.tobytes()
    view[0:2] = b"\x07\x00"
    assert inner[0, 0] == 7


def test_a_dlpack_view_keeps_the_tensor_alive() -> None:
    view = dlpack_view(OnlyDlpack(np.full(1000, 3, dtype=np.uint8)))
    junk = [bytearray(1000) for _ in range(100)]
    assert bytes(view) == b"\x03" * 1000
    assert len(junk) == 100


def test_dlpack_refuses_strided_tensors_and_failures() -> None:
    with pytest.raises(InvalidArgument, match="not contiguous"):
        dlpack_view(OnlyDlpack(np.zeros((4, 4))[:, 1]))
    with pytest.raises(InvalidArgument, match="cannot be exported"):
        dlpack_view(object())
    assert dlpack_view(OnlyDlpack(np.zeros((0, 3)))).nbytes == 0


def test_master_targets() -> None:
    assert parse_targets("a:1, b:2") == ("a:1", "b:2")
    assert parse_targets(["a:1"]) == ("a:1",)
    for wrong in ("", "a", "a:", "a:0", "a:70000", ":1", "a:b", ",".join(["a:1"] * 17)):
        with pytest.raises(InvalidArgument):
            parse_targets(wrong)
