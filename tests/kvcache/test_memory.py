"""Blocks as byte ranges: every physical order gives each byte to exactly one block."""

from __future__ import annotations

import itertools

import pytest

from mooncache.errors import InvalidArgument
from mooncache.kvcache.memory import HostMemory, LayerLayout, Region
from tests.kvcache.conftest import BLOCK_BYTES, BLOCKS, Engine


def strides_of(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in memory in `order`, outermost first."""
    strides, step = [0] * len(shape), 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= shape[dimension]
    return tuple(strides)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
@pytest.mark.parametrize("kernel", [1, 2])
def test_every_byte_belongs_to_one_block(order: tuple[int, ...], kernel: int) -> None:
    blocks, shape = 3, (3 * kernel, 2, 4, 5)
    layout = LayerLayout(shape, strides_of(shape, order), 2)
    seen: dict[int, int] = {}
    for block in range(blocks):
        for offset, length in layout.segments(blocks):
            for byte in range(length):
                at = block * layout.block_step_bytes(blocks) + offset + byte
                assert at not in seen
                seen[at] = block
    assert sorted(seen) == list(range(3 * kernel * 2 * 4 * 5 * 2))
    strides = layout.strides
    for index in itertools.product(*(range(size) for size in shape)):
        at = sum(i * stride for i, stride in zip(index, strides, strict=True)) * 2
        assert seen[at] == index[0] // kernel


def test_a_block_that_lies_together_is_one_range() -> None:
    layout = LayerLayout((8, 2, 16, 32), (1024, 512, 32, 1), 2)
    assert layout.segments(8) == [(0, 2048)]
    assert layout.segments(4) == [(0, 4096)]  # two kernel blocks make one


def test_the_description_names_shape_and_order_but_not_the_number_of_blocks() -> None:
    few = LayerLayout((8, 2, 16, 32), (1024, 512, 32, 1), 2)
    many = LayerLayout((800, 2, 16, 32), (1024, 512, 32, 1), 2)
    assert few.describe(8) == many.describe(800)
    other = LayerLayout((8, 2, 16, 32), (1024, 32, 64, 1), 2)
    assert other.describe(8) != few.describe(8)
    assert few.describe(4) != few.describe(8)


def test_memory_that_cannot_be_blocks_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        LayerLayout((7, 4), (4, 1), 1).segments(2)
    with pytest.raises(InvalidArgument):
        LayerLayout((4, 4), (0, 1), 1).segments(2)
    with pytest.raises(InvalidArgument, match="more than"):
        LayerLayout((2, 1 << 14), (1, 2), 1).segments(2)
    buffer = bytearray(16)
    with pytest.raises(InvalidArgument, match="end at byte"):
        HostMemory([(LayerLayout((8, 4), (4, 1), 1), Region(0, len(buffer), buffer))], 8)


def test_slices_are_views_on_the_engines_own_memory() -> None:
    engine = Engine()
    assert engine.memory.block_bytes == BLOCK_BYTES
    with engine.memory.writing([2, 5]) as places:
        for number, slices in enumerate(places):
            for piece in slices:
                piece[:] = bytes([number + 1]) * len(piece)
    assert engine.block(2) == bytes([1]) * BLOCK_BYTES
    assert engine.block(5) == bytes([2]) * BLOCK_BYTES
    assert engine.block(3) == bytes(BLOCK_BYTES)
    for block in (-1, BLOCKS):
        with pytest.raises(InvalidArgument):
            engine.memory.slices(block)
