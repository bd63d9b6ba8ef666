"""The engine against native servers inside the test: corruption, large clusters that need the directory."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import mooncache
from mooncache import _native
from mooncache.auth import Token, tenant_id
from mooncache.client.engine import ClientCore
from mooncache.client.keys import pack_keys, to_block_key, to_block_keys
from mooncache.client.options import ClientOptions, new_native
from mooncache.client.results import ClusterView, NodeView
from mooncache.errors import InvalidArgument, MasterUnavailable
from mooncache.store_node.copier import batches

SECRET = bytes(range(32))
TOKEN = Token("default", admin=True, key=SECRET).text
TENANT = tenant_id("default")


@contextlib.contextmanager
def servers(count: int, host_id: str = "", unix_paths: Sequence[str] = ()) -> Iterator[list[Any]]:
    """Native store servers of 4 MiB on loopback, each on a host of its own unless one is named."""
    running = []
    try:
        for number in range(count):
            server = _native.StoreServer(
                {
                    "node_id": f"n{number}",
                    "host_id": host_id or f"h{number}",
                    "secret": SECRET,
                    "incarnation": number + 1,
                    "capacity_bytes": 4 << 20,
                    "io_threads": 1,
                    "huge_pages": False,
                    **({"unix_path": unix_paths[number]} if unix_paths else {}),
                }
            )
            server.start()
            running.append(server)
        yield running
    finally:
        for server in running:
            server.stop(1.0)


def addresses(running: list[Any]) -> list[str]:
    return [f"n{i}@127.0.0.1:{server.endpoints()['tcp_port']}" for i, server in enumerate(running)]


def test_a_flipped_bit_is_a_miss_and_never_data() -> None:
    with servers(1) as running, mooncache.connect(nodes=addresses(running), token=TOKEN, shm=False) as pool:
        data = bytes(100_000)
        pool.put_many(["whole", "damaged"], [data, data]).raise_for_errors()
        assert running[0].corrupt(TENANT, to_block_key("damaged"), 12_345) == 0
        got = pool.get_many(["whole", "damaged"])
        assert got.values == (data, None)
        assert got.codes[1] in {200, 202}
        assert pool.get("damaged") is None
        assert pool.get_into("damaged", bytearray(100_000)) is None
        assert pool.put("damaged", data), "the key can be stored again"
        assert pool.get("damaged") == data
        assert running[0].stats()["misses_checksum"] >= 1
        assert running[0].check() == ""


def test_a_flipped_bit_is_survived_by_the_other_copy() -> None:
    with servers(2) as running, mooncache.connect(nodes=addresses(running), token=TOKEN, shm=False) as pool:
        data = bytes(range(256)) * 100
        pool.put("twice", data, replicas=2)
        (first,) = pool.get_many_into(["twice"], [bytearray(len(data))]).node_ids  # it would be read again
        damaged = running[int(first.removeprefix("n"))]
        assert damaged.corrupt(TENANT, to_block_key("twice"), 7) == 0
        for _ in range(3):
            assert pool.get("twice") == data
        # whoever met the damage told its holder: the copy is gone there and can be made anew
        assert damaged.check() == ""
        assert damaged.stats()["misses_checksum"] + damaged.stats()["store_removed_corrupt"] >= 1
        assert pool.put("twice", data, replicas=2)
        assert all(server.stats()["store_blocks"] == 1 for server in running)


def test_a_damaged_block_of_one_byte_can_be_stored_again() -> None:
    with servers(1) as running, mooncache.connect(nodes=addresses(running), token=TOKEN, shm=False) as pool:
        pool.put("tiny", b"x")
        assert running[0].corrupt(TENANT, to_block_key("tiny"), 3) == 0
        assert pool.get("tiny") is None
        assert pool.put("tiny", b"x"), "the key can be stored again"
        assert pool.get("tiny") == b"x"


def make_engine(running: list[Any], locate: Any) -> ClientCore:
    options = ClientOptions.gather(nodes=["127.0.0.1:1"], token=TOKEN, shm=False)
    engine = ClientCore(new_native(options), default_timeout_s=10.0, locate=locate)
    nodes = tuple(
        NodeView(i, f"n{i}", f"h{i}", i + 1, "active", "127.0.0.1", server.endpoints()["tcp_port"], "")
        for i, server in enumerate(running)
    )
    engine.apply_view(ClusterView(epoch=1, term=1, nodes=nodes))
    return engine


def test_a_node_that_fails_takes_no_block_of_another_with_it(tmp_path: Path) -> None:
    """A block of unknown size is asked for once more in a better way: that is no retry and needs no budget."""
    paths = [str(tmp_path / f"{number}.sock") for number in range(2)]
    data = bytes(1 << 20)
    options = ClientOptions.gather(nodes=["127.0.0.1:1"], token=TOKEN)

    def near(running: list[Any]) -> ClientCore:
        config = {"key": options.key, "tenant": options.tenant, "host_id": "here", "retry_burst": 0}
        engine = ClientCore(
            _native.Client(config), default_timeout_s=10.0, locate=lambda keys, _: bytes(len(keys) // 16)
        )
        ports = [server.endpoints()["tcp_port"] for server in running]
        engine.apply_view(
            ClusterView(
                epoch=1,
                term=1,
                nodes=tuple(
                    NodeView(i, f"n{i}", "here", i + 1, "active", "127.0.0.1", ports[i], paths[i])
                    for i in range(2)
                ),
            )
        )
        return engine

    with servers(2, host_id="here", unix_paths=paths) as running:
        writer, reader = near(running), near(running)
        for number, key in enumerate("ab"):
            assert writer.put_many([key], [data], 1, None, node=number).codes == (0,)
        reader.exists_many(["a", "b"], None)  # connected, and no size is known yet
        running[1].stop(1.0)
        got = reader.get_many(["a", "b"], None)
        assert got.codes[0] == 0
        assert got.values[0] == data
        assert got.codes[1] != 0
        writer.close()
        reader.close()


def test_large_clusters_ask_the_directory_once_for_keys_without_a_place() -> None:
    keys = [f"far-{i}" for i in range(20)]
    asked: list[int] = []
    with servers(10) as running:

        def locate(packed: bytes, timeout_s: float) -> bytes:
            asked.append(len(packed) // 32)
            return b"".join(struct.pack("<HHBBQ", 1, 9, 1, 0, 4) for _ in range(len(packed) // 32))

        engine = make_engine(running, locate)
        put = engine.put_many(keys, [b"data"] * 20, 1, None, node=9)
        assert set(put.node_ids) == {"n9"}
        engine.close()
        reader = make_engine(running, locate)
        got = reader.get_many(keys, None)
        assert got.values == (b"data",) * 20
        assert len(asked) == 1
        assert reader.exists_many(keys, None) == (True,) * 20
        assert reader.match(keys, True, None).leading_blocks == 20
        assert len(asked) == 1, "places that are known are not asked for again"
        chain = pack_keys(to_block_keys(keys))
        assert reader.match(chain, True, None) == reader.match(keys, True, None)
        fresh = make_engine(running, locate)
        assert fresh.match(chain, True, None).present == (True,) * 20
        assert asked[1:] == asked[:1], "a packed chain asks like a list of keys"
        assert fresh.match(chain + bytes(32), True, None).leading_blocks == 20
        for wrong in (chain[:-1], bytes(32 * 65_537)):
            with pytest.raises(InvalidArgument):
                fresh.match(wrong, True, None)
        fresh.close()
        assert all(code == 0 for code, _ in reader.stat_many(keys, None))
        reader.close()


def test_an_unreachable_directory_means_misses_not_errors() -> None:
    def locate(packed: bytes, timeout_s: float) -> bytes:
        raise MasterUnavailable("gone")

    with servers(10) as running:
        engine = make_engine(running, locate)
        assert engine.get_many(["a", "b"], None).codes == (200, 200)
        assert engine.exists_many(["a"], None) == (False,)
        engine.close()


def test_native_refusals_are_typed() -> None:
    options = ClientOptions.gather(nodes=["127.0.0.1:1"], token=TOKEN)
    engine = ClientCore(new_native(options), default_timeout_s=1.0, locate=None)
    nodes = (NodeView(0, "n", "h", 1, "sleepy", "127.0.0.1", 1, ""),)
    with pytest.raises(InvalidArgument, match="sleepy"):
        engine.apply_view(ClusterView(nodes=nodes))
    engine.close()


def test_batches_are_bounded_by_bytes() -> None:
    assert batches([], 10) == []
    assert batches([4, 4, 4, None, 20, 1], 10) == [[0, 1], [2], [4], [5]]
    assert batches([None, None], 10) == []


async def test_the_number_of_copies_comes_from_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    with servers(3) as running:

        def copies() -> int:
            return sum(server.stats()["store_blocks"] for server in running)

        monkeypatch.setenv("MOONCACHE_CLIENT_REPLICAS", "2")
        with mooncache.connect(nodes=addresses(running), token=TOKEN, shm=False) as pool:
            assert pool.put("a", b"data")
            assert copies() == 2
            assert pool.put("b", b"data", replicas=1), "the caller's number goes first"
            assert copies() == 3
        client = await mooncache.AsyncClient.connect(nodes=addresses(running), token=TOKEN, shm=False)
        async with client:
            await client.put_many(["c", "d"], [b"data", b"data"])
            assert copies() == 7
