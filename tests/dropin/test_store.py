"""The calls that programs written for Mooncake Store make, on a pool on loopback."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import mooncache
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.dropin import objects as objects_module
from mooncache.dropin.async_store import MooncakeDistributedStoreAsync
from mooncache.dropin.objects import Objects
from mooncache.dropin.values import ReplicateConfig, SoftPinAction
from tests.dropin.conftest import use

MIB = 1 << 20
NOT_FOUND, INVALID, INVALID_KEY = -704, -600, -400


class Memory:
    """Host memory with an address."""

    def __init__(self, size: int, fill: bytes = b"_") -> None:
        self.array = (ctypes.c_ubyte * size)()
        self.at = ctypes.addressof(self.array)
        self.size = size
        ctypes.memset(self.at, fill[0], size)

    def write(self, offset: int, data: bytes) -> int:
        ctypes.memmove(self.at + offset, data, len(data))
        return self.at + offset

    def read(self, offset: int, size: int) -> bytes:
        return ctypes.string_at(self.at + offset, size)


def test_an_object_is_stored_once_and_read_back(store: Any) -> None:
    assert store.put("once", b"first") == 0
    assert store.put("once", b"other") == 0, "as in the original: what is there stays"
    assert store.get("once") == b"first"
    assert (store.is_exist("once"), store.is_exist("never")) == (1, 0)
    assert (store.get_size("once"), store.get_size("never")) == (5, NOT_FOUND)
    assert store.get("never") == b""
    assert store.remove("once") == 0
    assert store.remove("once") == NOT_FOUND
    assert store.is_exist("once") == 0


def test_an_upsert_replaces_also_a_pinned_object_and_one_of_another_size(store: Any) -> None:
    config = ReplicateConfig()
    config.with_hard_pin = True
    assert store.put("changing", b"a", config) == 0
    assert store.upsert("changing", b"longer") == 0
    assert store.get("changing") == b"longer"
    assert store.upsert_parts("changing", b"in ", bytearray(b"parts")) == 0
    assert store.get("changing") == b"in parts"
    assert store.upsert_batch(["changing", "new"], [b"1", b"2"]) == 0
    assert store.get_batch(["changing", "new", "absent"]) == [b"1", b"2", b""]
    assert store.batch_remove(["changing", "new", "absent"]) == [0, 0, NOT_FOUND]


def test_what_is_empty_is_not_stored(store: Any) -> None:
    assert store.put("empty", b"") == 0
    assert store.is_exist("empty") == 0


def test_values_and_keys_of_wrong_types_are_refused(store: Any) -> None:
    with pytest.raises(TypeError):
        store.put("text", "not bytes")
    with pytest.raises(TypeError):
        store.put(key_arg="text", value=b"")
    assert store.put("", b"nameless") == INVALID_KEY
    assert store.put("k" * 70_000, b"long name") == INVALID_KEY
    assert store.batch_is_exist(["", "k"]) == [0, 0]


def test_buffers_are_read_with_an_address(store: Any) -> None:
    assert store.put_parts("parts", b"Hello, ", b"world") == 0
    handle, absent = store.batch_get_buffer(["parts", "absent"])
    assert absent is None
    assert (bytes(handle), handle.size(), len(handle)) == (b"Hello, world", 12, 12)
    assert ctypes.string_at(handle.ptr(), handle.size()) == b"Hello, world"


def test_memory_of_the_caller_is_written_and_read_in_place(store: Any) -> None:
    memory = Memory(4 * MIB)
    assert store.register_buffer(memory.at, memory.size) == 0
    assert store.register_buffer(memory.at + 100, 100) == INVALID, "it overlaps"
    data = bytes(range(256)) * 4096
    at = memory.write(0, data)
    assert store.put_from("whole", at, len(data)) == 0
    assert store.get_into("whole", memory.at + 2 * MIB, MIB) == len(data)
    assert memory.read(2 * MIB, len(data)) == data
    assert store.get_into("whole", memory.at + 2 * MIB, 1000) == INVALID, "it does not fit"
    assert store.get_into("whole", memory.at + 3 * MIB, 2 * MIB) == INVALID, "beyond the registered buffer"
    assert store.get_into("absent", memory.at, 100) == NOT_FOUND
    assert store.put_from_with_metadata("both", at, memory.write(MIB, b"head"), 8, 4) == 0
    assert store.get("both") == b"head" + data[:8]
    assert store.unregister_buffer(memory.at) == 0
    assert store.unregister_buffer(memory.at) == INVALID
    # Memory that is not registered is taken as well.
    assert store.get_into("whole", memory.at, MIB) == len(data)
    assert store.batch_remove(["whole", "both"]) == [0, 0]


def test_memory_that_is_not_the_programs_is_not_registered(store: Any) -> None:
    memory = Memory(MIB)
    assert store.register_buffer(4096, 4096) == INVALID, "nothing is mapped below 64 KiB"
    assert store.register_buffer(memory.at, 1 << 40) == INVALID, "it begins with memory and ends without"
    assert store.register_buffer(memory.at + 5, MIB - 5) == 0
    assert store.unregister_buffer(memory.at + 5) == 0


def test_a_read_changes_nothing_behind_the_object(store: Any) -> None:
    memory = Memory(100)
    assert store.put("short", b"12345") == 0
    assert store.batch_get_into(["short"], [memory.at], [100]) == [5]
    assert memory.read(0, 7) == b"12345__"


def test_batches_of_slices(store: Any) -> None:
    """What an engine does: an object is many slices, one a layer."""
    memory = Memory(MIB)
    assert store.register_buffer(memory.at, memory.size) == 0
    layers, keys = 8, [f"block-{i}" for i in range(16)]
    sizes = [[1000 + layer for layer in range(layers)] for _ in keys]
    places = [[memory.at + (i * layers + layer) * 2048 for layer in range(layers)] for i in range(len(keys))]
    wanted = [bytes([i]) * sum(sizes[i]) for i in range(len(keys))]
    for i, row in enumerate(places):
        for place, size in zip(row, sizes[i], strict=True):
            ctypes.memset(place, i, size)
    assert store.batch_put_from_multi_buffers(keys, places, sizes) == [0] * len(keys)
    assert store.get_batch(keys) == wanted
    ctypes.memset(memory.at, 255, memory.size)
    found = store.batch_get_into_multi_buffers([*keys, "absent"], [*places, places[0]], [*sizes, sizes[0]])
    assert found == [*map(len, wanted), NOT_FOUND]
    for i, row in enumerate(places):
        assert b"".join(ctypes.string_at(*item) for item in zip(row, sizes[i], strict=True)) == wanted[i]
    assert store.batch_put_from_multi_buffers(keys[:2], places[:3], sizes[:3]) == [INVALID] * 2
    assert store.batch_remove(keys) == [0] * len(keys)


def test_ranges_of_objects(store: Any) -> None:
    memory = Memory(64)
    store.put("digits", b"0123456789")
    store.put("letters", b"abcdefghij")
    asked = ([memory.at], [["digits", "letters", "absent"]], [[[0, 10], [20], [30]]], [[[3, 9], [0], [0]]])
    sizes = [[[2, 1], [4], [1]]]
    assert store.get_into_ranges(*asked, sizes) == [[[INVALID, INVALID], [INVALID], [INVALID]]], (
        "not registered"
    )
    assert store.register_buffer(memory.at, memory.size) == 0
    assert store.get_into_ranges(*asked, sizes) == [[[2, 1], [4], [NOT_FOUND]]]
    assert memory.read(0, 3) + memory.read(10, 1) + memory.read(20, 4) == b"34_9abcd"
    beyond = store.get_into_ranges([memory.at], [["digits"]], [[[0, 63]]], [[[8, 0]]], [[[3, 2]]])
    assert beyond == [[[INVALID, INVALID]]], "beyond the object, beyond the buffer"
    assert store.get_into_ranges([memory.at], [["digits"]], [[[0]]], [[[0, 1]]], [[[]]]) == [[[INVALID] * 2]]
    assert store.batch_remove(["digits", "letters"]) == [0, 0]


def test_an_object_larger_than_a_block_is_stored_in_parts(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, cluster)
    none = ReplicateConfig()
    with mooncache.connect(**cluster.client_settings()) as client:
        small = Objects(client, part_bytes=1000)
        value = bytes(i % 251 for i in range(3500))
        assert small.put(["large"], [[memoryview(value)[:1700], memoryview(value)[1700:]]], none) == [0]
        blocks = sum(1 for _ in client.list())
        assert blocks >= 5, "four parts and what names them"
        assert small.sizes(["large"]) == [3500]
        assert small.get(["large"]) == [value]
        into = bytearray(4000)
        cut = [memoryview(into)[:1234], memoryview(into)[1234:]]
        assert small.get_into(["large"], [cut]) == [3500]
        assert into[:3500] == value
        assert small.get_into(["large"], [[memoryview(bytearray(3499))]]) == [INVALID]
        part = memoryview(bytearray(2100))
        assert small.get_ranges([objects_module.Range("large", 950, part)]) == [2100]
        assert part == value[950:3050]
        # Whoever has other limits reads it as well.
        assert Objects(client).get(["large"]) == [value]
        assert small.upsert(["large"], [[memoryview(value[::-1])]], none) == [0]
        assert small.get(["large"]) == [value[::-1]]
        assert small.remove(["large"]) == [0]
        assert sum(1 for _ in client.list()) == blocks - 5, "the parts go with it"


def test_half_a_large_object_is_no_object(cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, cluster)
    with mooncache.connect(**cluster.client_settings()) as client:
        small = Objects(client, part_bytes=1000)
        assert small.put(["half"], [[memoryview(bytes(2500))]], ReplicateConfig()) == [0]
        manifest = objects_module.manifest_of(client.get("half") or b"")
        assert manifest is not None
        assert client.remove(manifest.keys()[1])
        assert small.get(["half"]) == [None]
        assert small.get_into(["half"], [[memoryview(bytearray(2500))]]) == [NOT_FOUND]
        assert small.remove(["half"]) == [0]


def test_a_value_that_looks_like_a_manifest_is_a_value(store: Any) -> None:
    forged = objects_module.Manifest(b"i" * 16, 10**15, 1 << 40).encode()
    assert store.put("forged", forged) == 0
    assert store.get("forged") == forged
    assert store.get_size("forged") == len(forged)
    memory = Memory(100)
    assert store.get_into("forged", memory.at, 100) == len(forged)
    assert memory.read(0, len(forged)) == forged
    assert store.remove("forged") == 0


def test_a_manifest_that_another_client_forged_reserves_no_memory(
    store: Any, cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mooncache.connect(**cluster.client_settings()) as client:
        client.put("hostile", objects_module.Manifest(b"i" * 16, 1 << 50, 1 << 40).encode())
        assert store.get("hostile") == b""
        assert store.remove("hostile") == 0


def test_fewer_copies_than_asked_for_are_no_failure(store: Any, cluster: EmbeddedCluster) -> None:
    config = ReplicateConfig()
    config.replica_num = 3  # there are two nodes
    assert store.put("few", b"data", config) == 0
    assert store.put_batch(["few too", "few more"], [b"data", b"data"], config) == 0
    assert len(store.batch_get_replica_desc(["few"])["few"]) == 2
    with mooncache.connect(**cluster.client_settings()) as client:
        small = Objects(client, part_bytes=1000)
        assert small.put(["few and large"], [[memoryview(bytes(3000))]], config) == [0]


def test_copies_go_to_nodes_and_are_described(store: Any) -> None:
    config = ReplicateConfig()
    config.replica_num = 2
    config.preferred_segment = "node-2"
    assert store.put("twice", b"data", config) == 0
    assert store.put("there", b"data", _preferring("node-2")) == 0
    found = store.batch_get_replica_desc(["twice", "there", "absent"])
    assert list(found) == ["twice", "there"]
    places = {item.get_memory_descriptor().buffer_descriptor.transport_endpoint for item in found["twice"]}
    assert places == {"node-1", "node-2"}
    (single,) = found["there"]
    assert single.is_memory_replica()
    assert not single.is_disk_replica()
    assert single.get_memory_descriptor().buffer_descriptor.size == 4
    assert single.get_memory_descriptor().buffer_descriptor.transport_endpoint == "node-2"
    assert store.batch_replica_clear(["twice", "absent"], "node-2") == ["twice"]
    (left,) = store.get_replica_desc("twice")
    assert left.get_memory_descriptor().buffer_descriptor.transport_endpoint == "node-1"
    assert store.batch_replica_clear(["twice"], "no-such-node:1") == []
    assert store.batch_replica_clear(["twice", "there", "absent"]) == ["twice", "there"]


def _preferring(node: str) -> ReplicateConfig:
    config = ReplicateConfig()
    config.preferred_segments = [node]
    return config


def test_pins_keep_objects_until_they_are_removed(store: Any) -> None:
    """More is written than two nodes of 64 MiB hold."""
    soft, hard = ReplicateConfig(), ReplicateConfig()
    soft.soft_pin_action, soft.soft_pin_ttl_ms, hard.with_hard_pin = SoftPinAction.ENABLE, 600_000, True
    for config in (soft, hard, None):
        for i in range(8):
            assert store.put(f"{id(config)}/{i}", bytes(MIB), config) == 0
    for i in range(200):
        assert store.put(f"flood/{i}", bytes([i]) * MIB) == 0
    kept = [
        sum(store.batch_is_exist([f"{id(config)}/{i}" for i in range(8)])) for config in (soft, hard, None)
    ]
    assert kept[:2] == [8, 8]
    assert kept[2] < 8
    assert store.batch_remove([f"{id(hard)}/{i}" for i in range(8)]) == [0] * 8
    assert store.remove_all() > 0
    assert store.get_size(f"{id(soft)}/0") == NOT_FOUND


def test_what_a_config_asks_for_in_vain_is_refused(store: Any) -> None:
    for name, value in (
        ("replica_num", 0),
        ("nof_replica_num", 1),
        ("dfs_replica_num", 1),
        ("soft_pin_ttl_ms", 5),
    ):
        config = ReplicateConfig()
        setattr(config, name, value)
        assert store.put("unwanted", b"data", config) == INVALID, name
    assert store.is_exist("unwanted") == 0
    config = ReplicateConfig()
    for wrong in (-1, 1 << 64, "1"):
        with pytest.raises(TypeError):
            config.soft_pin_ttl_ms = wrong  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        config.no_such_field = 1  # type: ignore[attr-defined]
    config.with_soft_pin = True
    assert config.soft_pin_action == SoftPinAction.ENABLE
    assert "replica_num=1" in str(config)


def test_removal_by_pattern_knows_what_this_store_wrote(store: Any, make_store: Callable[..., Any]) -> None:
    other = make_store()
    store.remove_all()
    assert store.put_batch(["user/1", "user/2", "model/1"], [b"1"] * 3) == 0
    assert other.put("user/3", b"3") == 0
    assert store.remove_by_regex("^user/") == 2
    assert store.batch_is_exist(["user/1", "user/2", "user/3", "model/1"]) == [0, 0, 1, 1]
    assert store.remove_by_regex("^user/") == 0
    assert store.remove_by_regex("(") == INVALID
    assert other.remove_all() == 2
    assert store.batch_is_exist(["user/3", "model/1"]) == [0, 0]


def test_a_store_that_is_not_set_up_says_so(mooncake_store: ModuleType) -> None:
    store = mooncake_store.MooncakeDistributedStore()
    assert store.put("k", b"v") == INVALID
    assert store.get("k") == b""
    assert store.get_batch(["k"]) == [b""]
    assert store.batch_is_exist(["a", "b"]) == [INVALID] * 2
    assert store.batch_get_into(keys=["a"], buffer_ptrs=[1], sizes=[1]) == [INVALID]
    assert store.get_into_ranges([1], [["a"]], [[[0]]], [[[0]]], [[[0]]]) == [[[INVALID]]]
    assert store.batch_get_replica_desc(["k"]) == {}
    assert store.health_check() == 1
    assert (store.close(), store.close()) == (0, 0)


def test_threads_share_a_store(store: Any) -> None:
    wrong: list[int] = []
    store.remove_all()

    def work(number: int) -> None:
        for i in range(20):
            value = bytes([number]) * (1000 + i)
            if store.put(f"{number}/{i}", value) or store.get(f"{number}/{i}") != value:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert store.remove_all() == 160


def test_calls_from_an_event_loop(cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, cluster)

    async def talk() -> bytes:
        store = MooncakeDistributedStoreAsync()
        setup = ("localhost", "", 0, 0, "tcp", "", cluster.master_target)
        assert await store.async_setup(*setup) == 0
        assert await store.async_put("loop", b"value") == 0
        found = await store.async_get("loop")
        assert await store.async_remove("loop") == 0
        assert store.close() == 0
        with pytest.raises(AttributeError):
            store.async_no_such_call  # noqa: B018
        return bytes(found)

    assert asyncio.run(talk()) == b"value"
