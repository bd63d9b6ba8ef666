"""The kernel kills a process that is over its limit of memory: it is started again, and its end is named."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import mooncache
from mooncache.client.state_dir import read_cluster_file
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.supervisor import PartNews
from mooncache.errors import MooncacheError
from tests.conditions import wait_until
from tests.memory_limit import memory_limit

MIB = 1 << 20
BLOCK = 1 * MIB
COUNT = 96
MORE = 24 * MIB


def filled(client: mooncache.Client) -> dict[str, bytes]:
    """Blocks that were stored until a put failed, each with its bytes."""
    values: dict[str, bytes] = {}
    for number in range(COUNT):
        value = os.urandom(BLOCK)
        try:
            client.put(f"block-{number}", value)
        except MooncacheError:
            break
        values[f"block-{number}"] = value
    return values


def test_a_node_over_its_limit_of_memory(tmp_path: Path) -> None:
    """Its blocks are misses, and it takes new ones once it runs again."""
    settings = ClusterSettings(
        state_dir=tmp_path / "state",
        nodes=1,
        capacity_bytes=2 * COUNT * MIB,
        port=0,
        extra_env=(("MOONCACHE_STORE_NODE_PREFAULT", "false"),),
    )
    said: list[str] = []

    def hear(name: str, news: PartNews) -> None:
        said.append(f"{name}: {news.text}")

    with EmbeddedCluster(settings) as cluster:
        node = cluster.parts["node-1"]
        former = node.pid
        ends = threading.Event()
        keeper = threading.Thread(target=cluster.supervise, args=(hear, ends.is_set))
        keeper.start()
        try:
            with mooncache.connect(**cluster.client_settings(), shm=False, timeout_s=30.0) as client:
                client.put("before", b"b" * BLOCK)
                with memory_limit(former, MORE):
                    values = filled(client)
                    wait_until(lambda: "node-1: answers again" in said, lambda: str(said))
                assert node.pid != former
                assert MORE // BLOCK // 2 < len(values) < COUNT
                assert client.get("before") is None
                assert list(client.get_many(list(values))) == [None] * len(values)
                client.put_many(list(values), list(values.values())).raise_for_errors()
                assert list(client.get_many(list(values))) == list(values.values())
            found = read_cluster_file(cluster.state_dir)
            assert found is not None
            (part,) = (part for part in found.parts if part.name == "node-1")
        finally:
            ends.set()
            keeper.join()
    assert part.last_end == "signal SIGKILL, perhaps out of memory"
    assert said[0].startswith("node-1: ended with signal SIGKILL, perhaps out of memory; restarting in ")
