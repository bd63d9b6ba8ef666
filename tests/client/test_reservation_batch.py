"""Blocks that are written range by range, many in one call, over every way of this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

import mooncache
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import OK, AlreadyExists, Closed, Incomplete, InvalidArgument

LAYERS, LAYER_BYTES = 4, 3000
BLOCK_BYTES = LAYERS * LAYER_BYTES


@pytest.fixture(params=[True, False], ids=["shm", "tcp"])
def pool(cluster: EmbeddedCluster, request: pytest.FixtureRequest) -> Iterator[mooncache.Client]:
    with mooncache.connect(**cluster.client_settings(), shm=request.param) as client:
        yield client


def layer_of(block: bytes, number: int) -> list[memoryview]:
    """A layer's bytes in two slices."""
    at = number * LAYER_BYTES
    return [memoryview(block)[at : at + 1000], memoryview(block)[at + 1000 : at + LAYER_BYTES]]


def test_layers_of_many_blocks(pool: mooncache.Client) -> None:
    keys = [os.urandom(32) for _ in range(40)]
    blocks = [os.urandom(BLOCK_BYTES) for _ in keys]
    batch = pool.reserve_many(keys, BLOCK_BYTES)
    assert (len(batch), batch.block_bytes, set(batch.codes)) == (40, BLOCK_BYTES, {OK})
    for number in (0, 2, 3, 1):
        assert batch.write(number * LAYER_BYTES, [layer_of(block, number) for block in blocks]).ok
    assert pool.exists_many(keys) == (False,) * 40, "invisible until their commit"
    stored = batch.commit()
    assert stored.ok and all(stored.created) and set(stored.node_ids) <= {"node-1", "node-2"}
    assert pool.get_many(keys).values == tuple(blocks)
    assert set(batch.codes) == {Closed.code}
    assert pool.reserve_many(keys, BLOCK_BYTES).codes == (AlreadyExists.code,) * 40


def test_layers_gathered_from_tensors(pool: mooncache.Client) -> None:
    """Two ranges of each place, as keys and values of a layer; places in any order, with others between them."""
    keys = [os.urandom(32) for _ in range(40)]
    places = [(7 * block + 3) % 64 for block in range(40)]
    tensors = [bytearray(os.urandom(64 * 5000)) for _ in range(LAYERS)]
    ranges = [(100, 1000), (2500, LAYER_BYTES - 1000)]
    batch = pool.reserve_many(keys, BLOCK_BYTES)
    for number, tensor in enumerate(tensors):
        source = mooncache.StridedBuffer(tensor, 5000, ranges)
        odd = [place if block % 2 else None for block, place in enumerate(places)]
        even = [None if block % 2 else place for block, place in enumerate(places)]
        assert batch.write_gathered(number * LAYER_BYTES, source, odd).ok
        assert batch.write_gathered(number * LAYER_BYTES, source, even).ok
    assert batch.commit().ok

    def block_at(place: int) -> bytes:
        begin = 5000 * place
        return b"".join(t[begin + at : begin + at + size] for t in tensors for at, size in ranges)

    assert pool.get_many(keys).values == tuple(map(block_at, places))


def test_gathered_ranges_lie_inside_of_their_buffer(pool: mooncache.Client) -> None:
    batch = pool.reserve_many([os.urandom(32), os.urandom(32)], 100)
    for step_bytes, ranges, places in (
        (10, [(0, 10)], [0, 10]),
        (10, [(1, 10)], [0, 9]),
        (10, [(0, 101)], [0, 0]),
        (2**63, [(0, 1)], [0, 2]),
        (1, [(2**64 - 1, 2)], [0, 0]),
        (0, [(2**64 - 1, 1)], [0, 2**64 - 1]),
        (10, [(0, 10)], [0, -1]),
        (10, [(0, 10)], [0, "1"]),
        (10, [(-1, 10)], [0, 1]),
        (10, [("a", 10)], [0, 1]),
    ):
        with pytest.raises(InvalidArgument, match=r"not inside|whole numbers"):
            batch.write_gathered(0, mooncache.StridedBuffer(bytes(100), step_bytes, ranges), places)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="As many places"):
        batch.write_gathered(0, mooncache.StridedBuffer(bytes(100), 10, [(0, 10)]), [1])
    assert batch.write_gathered(0, mooncache.StridedBuffer(bytes(200), 100, [(0, 100)]), [1, 0]).ok
    assert batch.commit().ok


def test_each_block_has_its_own_end(pool: mooncache.Client) -> None:
    keys = [os.urandom(32) for _ in range(4)]
    block = os.urandom(BLOCK_BYTES)
    pool.put(keys[0], block, replicas=2)
    batch = pool.reserve_many(keys, BLOCK_BYTES, prefer_node="node-2")
    assert batch.codes == (AlreadyExists.code, OK, OK, OK)
    batch.write(0, [block[:-1]] * 4)
    with pytest.raises(InvalidArgument, match="overlaps"):
        batch.write(5, [b"x", b"x", b"x", b"x"])
    batch.write(BLOCK_BYTES - 1, [None, block[-1:], None, block[-1:]])
    pool.put(keys[3], block, replicas=2)  # another writer is faster
    found = batch.commit()
    assert found.codes[1:] == (OK, Incomplete.code, OK)
    assert found.created[1:] == (True, False, False)
    assert found.node_ids[1] == "node-2"
    assert pool.get(keys[1]) == block
    assert pool.get(keys[2]) is None


def test_an_abort_gives_the_space_back(pool: mooncache.Client) -> None:
    keys = [os.urandom(32) for _ in range(3)]
    batch = pool.reserve_many(keys, BLOCK_BYTES)
    batch.write(0, [bytes(BLOCK_BYTES)] * 3)
    batch.abort()
    batch.abort()
    assert set(batch.write(0, [bytes(1)] * 3).codes) == {Closed.code}
    assert pool.exists_many(keys) == (False,) * 3


def test_wrong_arguments(pool: mooncache.Client) -> None:
    with pytest.raises(InvalidArgument, match="block_bytes"):
        pool.reserve_many(["k"], 0)
    batch = pool.reserve_many(["a", "b"], 100)
    with pytest.raises(InvalidArgument, match="As many values"):
        batch.write(0, [b"x"])
    with pytest.raises(InvalidArgument, match="offset"):
        batch.write(100, [b"x", b"x"])
    with pytest.raises(InvalidArgument, match="not inside"):
        batch.write(99, [b"xx", None])
    assert len(pool.reserve_many([], 100)) == 0


def test_the_asyncio_twin(cluster: EmbeddedCluster) -> None:
    keys = [os.urandom(32) for _ in range(3)]

    async def save() -> tuple[bytes | None, ...]:
        async with await mooncache.connect_async(**cluster.client_settings()) as pool:
            batch = await pool.reserve_many(keys, 10)
            assert (await batch.write(5, [b"world"] * 3)).ok
            hello = mooncache.StridedBuffer(b"hello", 0, [(0, 5)])
            assert (await batch.write_gathered(0, hello, [0] * 3)).ok
            assert (await batch.commit()).created == (True,) * 3
            await batch.abort()
            return (await pool.get_many(keys)).values

    assert asyncio.run(save()) == (b"helloworld",) * 3


def test_a_dropped_batch_leaves_nothing(pool: mooncache.Client) -> None:
    keys = [os.urandom(32) for _ in range(3)]
    batch = pool.reserve_many(keys, BLOCK_BYTES)
    batch.write(0, [bytes(BLOCK_BYTES)] * 3)
    del batch
    again = pool.reserve_many(keys, BLOCK_BYTES)
    assert set(again.codes) == {OK}
    again.abort()
