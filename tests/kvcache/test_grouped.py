"""Groups of layers whose blocks have different sizes and may lie in the same bytes."""

from __future__ import annotations

import ctypes

import pytest

from mooncache.errors import InvalidArgument
from mooncache.kvcache.grouped import GroupedMemory
from mooncache.kvcache.memory import HostMemory, LayerLayout, Region

BLOCKS, SIZE = 6, 16


class Engine:
    """The first group has two layers, the second one, which lies where the first layer of the other does."""

    def __init__(self) -> None:
        self.bytes = bytearray(2 * BLOCKS * SIZE)
        layout, start = (
            LayerLayout((BLOCKS, SIZE), (SIZE, 1), 1),
            ctypes.addressof(ctypes.c_char.from_buffer(self.bytes)),
        )
        first, second = (Region(start + at * BLOCKS * SIZE, BLOCKS * SIZE, self.bytes) for at in range(2))
        self.large = HostMemory([(layout, first), (layout, second)], BLOCKS)
        self.small = HostMemory([(layout, first)], BLOCKS)
        self.memory = GroupedMemory([self.large, self.small])


def test_a_block_is_named_by_group_and_number_and_has_the_bytes_of_its_group() -> None:
    engine = Engine()
    memory = engine.memory
    assert (memory.block_count, memory.block_bytes) == (2 * BLOCKS, 2 * SIZE)
    places = [memory.place(1, 3), memory.place(0, 2), memory.place(1, 0), memory.place(0, 5)]
    assert memory.bytes_of(places) == 6 * SIZE
    with memory.writing(places, None, 0.0) as views:
        for number, view in enumerate(views, start=1):
            for piece in view:
                piece[:] = bytes([number]) * len(piece)
    with memory.reading(places, None, 0.0) as views:
        assert [b"".join(view) for view in views] == [
            bytes([1]) * SIZE,
            bytes([2]) * (2 * SIZE),
            bytes([3]) * SIZE,
            bytes([4]) * (2 * SIZE),
        ]
    assert bytes(b"".join(engine.small.slices(3))) == bytes([1]) * SIZE
    assert bytes(b"".join(engine.large.slices(2))) == bytes([2]) * (2 * SIZE)


def test_bytes_that_groups_share_are_one_buffer() -> None:
    engine = Engine()
    assert sorted(len(view) for view in engine.memory.buffers()) == [BLOCKS * SIZE, BLOCKS * SIZE]


def test_blocks_that_do_not_exist_and_groups_that_do_not_fit_are_refused() -> None:
    memory = Engine().memory
    for group, block in [(0, BLOCKS), (0, -1), (2, 0), (-1, 0)]:
        with pytest.raises(InvalidArgument):
            memory.place(group, block)
    for place in (-1, 2 * BLOCKS):
        with pytest.raises(InvalidArgument), memory.reading([place], None, 0.0):
            pass
    with pytest.raises(InvalidArgument):
        GroupedMemory([])
    layout, other = LayerLayout((3, SIZE), (SIZE, 1), 1), bytearray(3 * SIZE)
    fewer = HostMemory(
        [(layout, Region(ctypes.addressof(ctypes.c_char.from_buffer(other)), len(other), other))], 3
    )
    with pytest.raises(InvalidArgument):
        GroupedMemory([Engine().large, fewer])
