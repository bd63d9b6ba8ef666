"""The SDK against a real cluster: every operation, every form, sync and asyncio."""

from __future__ import annotations

import array
import asyncio
import os
import threading
from typing import Any

import numpy as np
import pytest

import mooncache
from mooncache.client.keys import to_block_key
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import (
    OK,
    AlreadyExists,
    BufferTooSmall,
    Closed,
    Incomplete,
    InvalidArgument,
    KeyInvalid,
    NodeUnavailable,
    NotFound,
    Pinned,
    TooLarge,
    Unauthenticated,
    UnknownNode,
)


def test_put_and_get(pool: mooncache.Client) -> None:
    assert pool.put("a", b"hello") is True
    assert pool.put("a", b"hello") is False, "an equal key means equal bytes: nothing is stored twice"
    assert pool.get("a") == b"hello"
    assert pool.get("missing") is None
    assert pool.exists("a")
    assert not pool.exists("missing")
    assert pool.get(to_block_key("a")) == b"hello", "a name and its block key are the same block"


@pytest.mark.parametrize("size_bytes", [1, 4095, 4096, 1 << 20, (5 << 20) + 3])
def test_sizes(pool: mooncache.Client, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    pool.put(f"size-{size_bytes}", data)
    assert pool.get(f"size-{size_bytes}") == data


def test_values_are_shared_not_copied_into_other_types(pool: mooncache.Client) -> None:
    values: list[Any] = [
        bytearray(b"12345678"),
        memoryview(b"12345678"),
        array.array("H", [1, 2, 3, 4]),
        np.arange(4, dtype=np.uint16),
        [b"123", b"45678"],
    ]
    for i, value in enumerate(values):
        pool.put(f"kind-{i}", value)
    assert pool.get("kind-0") == b"12345678"
    assert pool.get("kind-3") == np.arange(4, dtype=np.uint16).tobytes()
    assert pool.get("kind-4") == b"12345678"
    target = np.zeros(4, dtype=np.uint16)
    assert pool.get_into("kind-3", target) == 8
    assert list(target) == [0, 1, 2, 3]


def test_a_tensor_that_only_knows_dlpack(pool: mooncache.Client) -> None:
    class Tensor:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __dlpack__(self) -> Any:
            return self.inner.__dlpack__()

    source = np.arange(1000, dtype=np.float32)
    pool.put("tensor", Tensor(source))
    target = np.zeros(1000, dtype=np.float32)
    assert pool.get_into("tensor", Tensor(target)) == 4000
    assert np.array_equal(source, target)


def test_scatter_and_gather(pool: mooncache.Client) -> None:
    layers = [os.urandom(1000 + i) for i in range(40)]
    pool.put_iov("layers", layers)
    assert pool.get("layers") == b"".join(layers)
    targets = [bytearray(len(layer)) for layer in layers]
    assert pool.get_iov("layers", targets) == sum(map(len, layers))
    assert [bytes(target) for target in targets] == layers


def test_ranges(pool: mooncache.Client) -> None:
    data = os.urandom(10_000)
    pool.put("range", data)
    part = bytearray(100)
    assert pool.get_into("range", part, offset=5000) == 100
    assert bytes(part) == data[5000:5100]
    tail = bytearray(100)
    assert pool.get_into("range", tail, offset=9950) == 50
    assert bytes(tail[:50]) == data[9950:]


def test_a_destination_that_is_too_small_is_told_the_size(pool: mooncache.Client) -> None:
    pool.put("large", bytes(5000))
    with pytest.raises(BufferTooSmall, match="5000"):
        pool.get_into("large", bytearray(100))
    assert pool.get_into("large", bytearray(9000)) == 5000
    assert pool.get_into("missing", bytearray(1)) is None


def test_batches_answer_for_each_key(pool: mooncache.Client) -> None:
    keys = [f"batch-{i}" for i in range(100)]
    values = [os.urandom(500 + i) for i in range(100)]
    put = pool.put_many(keys, values)
    assert put.ok
    assert all(put.created)
    assert set(put.node_ids) <= {"node-1", "node-2"}
    put.raise_for_errors()
    got = pool.get_many([*keys, "missing"])
    assert list(got)[:100] == values
    assert got[100] is None
    assert got.codes[100] == 200
    assert got.hits == 100
    assert got.ok, "a miss is not an error"
    targets = [bytearray(1000) for _ in keys]
    into = pool.get_many_into(keys, targets)
    assert list(into.sizes_bytes) == [len(value) for value in values]
    assert all(bytes(t[: len(v)]) == v for t, v in zip(targets, values, strict=True))
    assert pool.exists_many([*keys[:3], "missing"]) == (True, True, True, False)
    small = pool.get_many_into(keys[:1], [bytearray(1)])
    assert small.errors == {0: BufferTooSmall.code}
    with pytest.raises(BufferTooSmall, match="1 of 1"):
        small.raise_for_errors()


def test_empty_batches(pool: mooncache.Client) -> None:
    assert len(pool.put_many([], [])) == 0
    assert len(pool.get_many([])) == 0
    assert pool.exists_many([]) == ()
    assert pool.match([]).leading_blocks == 0
    assert pool.stat_many([]) == ()
    assert pool.remove_many([]).ok


def test_match_finds_the_leading_run(pool: mooncache.Client) -> None:
    chain = [f"chain-{i}" for i in range(20)]
    pool.put_many(chain[:7], [b"x"] * 7)
    pool.put(chain[9], b"x")
    found = pool.match(chain)
    assert found.leading_blocks == 7
    assert found.present == tuple(i < 7 or i == 9 for i in range(20))
    assert found.unreachable_nodes == 0


def test_stat_pin_and_remove(pool: mooncache.Client) -> None:
    pool.put("statted", b"12345")
    stat = pool.stat("statted")
    assert stat is not None
    assert (stat.size_bytes, stat.tier) == (5, "dram")
    assert pool.stat("missing") is None
    assert pool.pin("statted", ttl_s=60)
    assert not pool.pin("missing")
    assert pool.unpin("statted")
    assert pool.remove("statted")
    assert not pool.remove("statted")
    assert pool.get("statted") is None


def test_a_block_has_one_pin_whoever_set_it(cluster: EmbeddedCluster, pool: mooncache.Client) -> None:
    with mooncache.connect(**cluster.client_settings()) as other:
        pool.put("one pin", b"x")
        assert pool.pin("one pin", ttl_s=60)
        assert other.pin("one pin", ttl_s=60)
        with pytest.raises(Pinned):
            other.remove("one pin")
        assert other.unpin("one pin")
        assert pool.remove("one pin")


def test_one_node_s_copy_is_removed(pool: mooncache.Client) -> None:
    pool.put("copied", b"two copies", replicas=2)
    assert pool.remove_many(["copied", "missing"], node="node-1").codes == (OK, NotFound.code)
    stat = pool.stat("copied")
    assert stat is not None
    assert stat.node_ids == ("node-2",)
    with pytest.raises(UnknownNode):
        pool.remove_many(["copied"], node="no-such-node")
    assert pool.remove("copied")


def test_a_node_that_has_left_lists_nothing(pool: mooncache.Client) -> None:
    assert pool._engine.list_page(99, 0, 10, None) == (0, [])


def test_replicas_go_to_distinct_nodes(pool: mooncache.Client) -> None:
    pool.put("twice", b"two copies", replicas=2)
    holders = {entry.node_id for entry in pool.list(limit=100_000) if entry.key == to_block_key("twice")}
    assert holders == {"node-1", "node-2"}
    assert pool.remove("twice")
    assert not [e for e in pool.list(limit=100_000) if e.key == to_block_key("twice")]


def test_reserve_write_commit(pool: mooncache.Client) -> None:
    data = os.urandom(3000)
    with pool.reserve("layered", 3000) as block:
        block.write(2000, data[2000:])
        assert pool.get("layered") is None, "invisible until its commit"
        block.write(0, [data[:500], data[500:1000]])
        block.write(1000, data[1000:2000])
    assert pool.get("layered") == data
    with pytest.raises(AlreadyExists):
        pool.reserve("layered", 3000)
    with pytest.raises(Closed):
        block.write(0, b"late")


def test_an_unfinished_reservation_leaves_nothing(pool: mooncache.Client) -> None:

    def leave(error: Exception | None) -> None:
        with pool.reserve("half", 1000) as block:
            block.write(0, bytes(500))
            if error is not None:
                raise error

    with pytest.raises(RuntimeError, match="stop"):
        leave(RuntimeError("stop"))
    assert pool.get("half") is None
    with pytest.raises(Incomplete):
        leave(None)
    assert pool.get("half") is None
    again = pool.reserve("half", 1000)
    again.abort()
    again.abort()
    assert again.finished


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda p: p.put("k", "text"), InvalidArgument, "Encode"),
        (lambda p: p.put("k", b""), InvalidArgument, "at least one byte"),
        (lambda p: p.put(b"short", b"v"), KeyInvalid, "32 bytes"),
        (lambda p: p.put("k", b"v", replicas=0), InvalidArgument, "replicas"),
        (lambda p: p.put("k", b"v", timeout_s=-1), InvalidArgument, "timeout_s"),
        (lambda p: p.put_many("k", [b"v"]), InvalidArgument, "Wrap it"),
        (lambda p: p.put_many(["k"], b"v"), InvalidArgument, "Wrap it"),
        (lambda p: p.put_many(["k"], []), InvalidArgument, "As many"),
        (lambda p: p.get_into("k", b"frozen"), InvalidArgument, "read-only"),
        (lambda p: p.get_into("k", bytearray(1), offset=-1), InvalidArgument, "offset"),
        (lambda p: p.pin("k", ttl_s=0), InvalidArgument, "ttl_s"),
        (lambda p: p.reserve("k", 0), InvalidArgument, "size_bytes"),
        (lambda p: p.get_many(7), InvalidArgument, "list of keys"),
        (lambda p: p.put("huge", bytes(65 << 20)), TooLarge, "failed"),
    ],
)
def test_wrong_arguments(pool: mooncache.Client, call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(pool)


def test_many_threads_share_one_client(pool: mooncache.Client) -> None:
    failures: list[BaseException] = []

    def work(name: int) -> None:
        try:
            for i in range(30):
                data = f"{name}-{i}".encode() * 100
                pool.put(f"thread-{name}-{i}", data)
                assert pool.get(f"thread-{name}-{i}") == data
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_tenants_are_apart(cluster: EmbeddedCluster, pool: mooncache.Client) -> None:
    with (
        mooncache.connect(**cluster.client_settings(), tenant="team-a") as a,
        mooncache.connect(**cluster.client_settings(), tenant="team-b") as b,
    ):
        a.put("shared-name", b"of a")
        b.put("shared-name", b"of b!")
        assert a.get("shared-name") == b"of a"
        assert b.get("shared-name") == b"of b!"
        assert pool.get("shared-name") is None
        assert a.remove("shared-name")
        assert b.exists("shared-name")
        assert {entry.size_bytes for entry in b.list()} == {5}
        assert list(a.list()) == []


def test_without_a_master_and_without_shared_memory(cluster: EmbeddedCluster, pool: mooncache.Client) -> None:
    addresses = [f"{node.node_id}@{node.tcp_host}:{node.tcp_port}" for node in pool.nodes()]
    with mooncache.connect(nodes=addresses, token_file=str(cluster.token_path), shm=False) as direct:
        direct.put("direct", b"no master was asked")
        assert direct.get("direct") == b"no master was asked"
        assert pool.get("direct") == b"no master was asked"
        assert all(direct.ping(node.index) >= 0 for node in direct.nodes())
        assert direct.node_stat(0)["store_capacity_bytes"] >= 64 << 20
    unnamed = [address.rpartition("@")[2] for address in addresses]
    with mooncache.connect(nodes=unnamed, token_file=str(cluster.token_path), shm=False) as direct:
        assert direct.get("direct") == b"no master was asked"
        direct.put_many([f"unnamed-{i}" for i in range(20)], [b"x"] * 20).raise_for_errors()
        assert pool.get_many([f"unnamed-{i}" for i in range(20)]).hits == 20
    wrong = [f"other-name@{unnamed[0]}"]
    with (
        mooncache.connect(nodes=wrong, token_file=str(cluster.token_path), shm=False) as direct,
        pytest.raises(NodeUnavailable),
    ):
        direct.put("direct-2", b"v")


def test_a_wrong_token_is_refused_everywhere(cluster: EmbeddedCluster, pool: mooncache.Client) -> None:
    wrong = "mcc1." + "ab" * 32
    with pytest.raises(Unauthenticated):
        mooncache.connect(cluster.master_target, token=wrong)
    address = f"{pool.nodes()[0].tcp_host}:{pool.nodes()[0].tcp_port}"
    with (
        mooncache.connect(nodes=[address], token=wrong, shm=False) as stranger,
        pytest.raises(Unauthenticated),
    ):
        stranger.put("k", b"v")


def test_a_closed_client_says_so(cluster: EmbeddedCluster) -> None:
    client = mooncache.connect(**cluster.client_settings())
    client.close()
    client.close()
    with pytest.raises(Closed):
        client.get("a")


# --- asyncio ----------------------------------------------------------------------------------------------------


async def test_the_asyncio_client_does_the_same(cluster: EmbeddedCluster) -> None:
    async with await mooncache.connect_async(**cluster.client_settings()) as pool:
        assert await pool.put("async", b"value") is True
        assert await pool.get("async") == b"value"
        assert await pool.get("async-missing") is None
        keys = [f"async-{i}" for i in range(50)]
        (await pool.put_many(keys, [key.encode() for key in keys])).raise_for_errors()
        assert list(await pool.get_many(keys)) == [key.encode() for key in keys]
        assert (await pool.match(keys)).leading_blocks == 50
        target = bytearray(5)
        assert await pool.get_into("async", target) == 5
        async with await pool.reserve("async-layered", 10) as block:
            await block.write(0, b"0123456789")
        assert await pool.get("async-layered") == b"0123456789"
        stat = await pool.stat("async")
        assert stat is not None
        assert stat.size_bytes == 5
        assert [entry async for entry in pool.list(limit=3)]
        assert await pool.pin("async")
        assert await pool.unpin("async")
        assert await pool.remove("async")
        with pytest.raises(InvalidArgument):
            await pool.put("k", "text")


async def test_many_tasks_run_at_the_same_time(cluster: EmbeddedCluster) -> None:
    async with await mooncache.connect_async(**cluster.client_settings(), threads=4) as pool:

        async def work(name: int) -> bool:
            data = os.urandom(10_000)
            await pool.put(f"task-{name}", data)
            return await pool.get(f"task-{name}") == data

        assert all(await asyncio.gather(*(work(name) for name in range(40))))


async def test_a_cancelled_task_leaves_its_buffer_alone(cluster: EmbeddedCluster) -> None:
    """After the task has ended no byte moves any more: the buffer keeps what the caller puts into it."""
    async with await mooncache.connect_async(**cluster.client_settings(), shm=False) as pool:
        data = os.urandom(16 << 20)
        await pool.put("cancel-me", data)
        for delay_s in (0.0, 0.0005, 0.002, 0.005):
            target = bytearray(len(data))
            task = asyncio.create_task(pool.get_into("cancel-me", target))
            await asyncio.sleep(delay_s)
            task.cancel()
            outcome = (await asyncio.gather(task, return_exceptions=True))[0]
            assert outcome == len(data) or isinstance(outcome, asyncio.CancelledError)
            mark = bytes(len(target))
            target[:] = mark
            await asyncio.sleep(0.02)
            assert target == mark
        assert await pool.get("cancel-me") == data, "the client is as good as before"
