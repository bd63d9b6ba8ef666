"""What was read from the pool was written by another program: heads of tensors and manifests of any bytes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mooncache.dropin.objects import Manifest, manifest_of
from mooncache.dropin.tensors import HEAD_BYTES, tensor_of

MARK = Manifest(b"", 0, 0).encode()[:24]
NUMBERS = st.integers(0, (1 << 64) - 1)


@given(st.binary(max_size=100) | st.binary(min_size=40, max_size=40).map(lambda rest: MARK + rest))
def test_any_manifest(block: bytes) -> None:
    manifest = manifest_of(block)
    if manifest is None:
        return
    assert block[:24] == MARK
    assert len(block) == 64
    keys = manifest.keys()
    assert 0 < len(keys) <= 65_536
    assert (len(keys) - 1) * manifest.part_bytes < manifest.size_bytes <= len(keys) * manifest.part_bytes


@given(
    st.binary(max_size=200)
    | st.tuples(
        st.sampled_from([b"float32", b"int8", b"bool", b"float8_e4m3fn", b"object", b"\xff"]),
        st.integers(0, 20),
        st.lists(NUMBERS | st.integers(0, 4), min_size=12, max_size=12),
        st.binary(max_size=100),
    ).map(lambda it: struct.pack("<8s16sII12Q", b"mcTensor", it[0], it[1], 0, *it[2]) + it[3])
)
@example(struct.pack("<8s16sII12Q", b"mcTensor", b"int8", 3, 0, 0, 1 << 63, 1 << 63, *[0] * 9))
def test_any_tensor(data: bytes) -> None:
    pytest.importorskip("torch")
    tensor = tensor_of(bytearray(data))
    if tensor is not None:
        assert HEAD_BYTES + tensor.numel() * tensor.element_size() <= len(data)
