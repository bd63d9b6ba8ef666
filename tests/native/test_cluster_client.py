"""The C++ cluster client, its C API and the examples, in a real cluster, and what happens without its parts.

The library and the examples know one address of a store node, and nothing of gRPC.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import mooncache
from mooncache.client.keys import to_block_key
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import MasterUnavailable, NodeUnavailable, NotFound, Unauthenticated
from tests.client.conftest import make_cluster
from tests.conditions import wait_until
from tests.native.building import BUILD, can_build, is_built, run
from tests.native.mooncache_c import Pool

pytestmark = pytest.mark.skipif(
    not can_build() or not is_built(), reason="needs a compiler and the native libraries: `make native-test`"
)
LIBRARY = BUILD / "libmooncache.so"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """Three nodes; the last test breaks them."""
    cluster = make_cluster(tmp_path_factory.mktemp("pool"), nodes=3)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def sdk(running: EmbeddedCluster) -> Iterator[mooncache.Client]:
    with mooncache.connect(**running.client_settings(), timeout_s=10) as client:
        wait_for_whole_maps(running, client)
        yield client


def seeds_of(sdk: mooncache.Client) -> dict[str, str]:
    """Data ports by the names of nodes."""
    return {node.node_id: f"{node.tcp_host}:{node.tcp_port}" for node in sdk.nodes()}


def connected(cluster: EmbeddedCluster, seeds: list[str]) -> Pool:
    pool = Pool(LIBRARY)
    code = pool.connect(seeds, cluster.token_path.read_text(encoding="ascii"))
    assert code == 0, (pool.name(code), pool.message)
    return pool


def wait_for_whole_maps(cluster: EmbeddedCluster, sdk: mooncache.Client) -> None:
    """Return once each node hands out a map of all three: nodes hear of one another some time after they joined."""
    wait_until(lambda: len(sdk.nodes()) == 3, "three nodes")
    for seed in seeds_of(sdk).values():
        pool = connected(cluster, [seed])
        try:
            wait_until(lambda pool=pool: pool.state().nodes == 3, f"the whole map at {seed}")  # type: ignore[misc]
        finally:
            pool.close()


def test_c_and_python_store_and_find_the_same_blocks(running: EmbeddedCluster, sdk: mooncache.Client) -> None:
    pool = connected(running, [next(iter(seeds_of(sdk).values()))])
    try:
        assert pool.state().nodes == 3, "one seed is enough for all"
        assert pool.key("from C") == to_block_key("from C")
        assert pool.put(pool.key("from C"), b"head", b"-" * 5000) == 0
        assert sdk.get("from C") == b"head" + b"-" * 5000
        assert sdk.put("from Python", b"p" * 3000)
        assert pool.get(pool.key("from Python"), 3000) == (0, b"p" * 3000)
        assert pool.exists(pool.key("from Python"), pool.key("nowhere")) == [0, NotFound.code]
        assert pool.get(pool.key("nowhere"), 10) == (NotFound.code, b"")
        assert pool.name(NotFound.code) == "NOT_FOUND"
        assert pool.name(7) == "UNKNOWN"
    finally:
        pool.close()


def test_what_makes_no_sense_has_a_code_and_a_sentence(running: EmbeddedCluster) -> None:
    pool = Pool(LIBRARY)
    assert pool.connect([], "mcc1.x") == Unauthenticated.code or "seeds" in pool.message
    token = running.token_path.read_text(encoding="ascii")
    assert pool.connect(["127.0.0.1:1"], token, timeout_ms=200) == NodeUnavailable.code
    assert "127.0.0.1:1" in pool.message
    assert pool.lib.mooncache_put(None, None, 0, 1, 1, None) == mooncache.errors.InvalidArgument.code
    assert "client" in pool.message
    pool.close()


def test_the_examples_of_an_installed_prefix_use_the_cluster(
    programs: Path, running: EmbeddedCluster, sdk: mooncache.Client
) -> None:
    first, second, _ = seeds_of(sdk).values()
    token = running.token_path
    assert run(programs / "c_put_get", first, token) == (
        "put and got 4096 bytes: equal\nafter its removal: NOT_FOUND\n"
    )
    assert (
        run(programs / "engine", first, token, "100")
        == "loaded 0 blocks (right), computed 6, saved 6, 3 nodes\n"
    )
    assert (
        run(programs / "engine", second, token, "200")
        == "loaded 6 blocks (right), computed 6, saved 6, 3 nodes\n"
    )
    assert run(programs / "engine", second, token, "200", "7").startswith(
        "loaded 0 blocks (right), computed 12"
    )


def test_it_goes_on_when_nodes_and_the_master_die(running: EmbeddedCluster, sdk: mooncache.Client) -> None:
    """What is on other nodes stays readable, new blocks go there; a client can begin while there is no master."""
    seeds = seeds_of(sdk)
    values = {f"k{i}": bytes([i]) * 2000 for i in range(60)}
    for key, value in values.items():
        assert sdk.put(key, value)
    holders = {entry.key: entry.node_id for entry in sdk.list(limit=100_000)}
    victim = sdk.nodes()[0].node_id
    assert victim in holders.values()
    pool = connected(running, [seeds[victim]])
    try:
        running.kill(victim)
        for key, value in values.items():
            code, got = pool.get(pool.key(key), 2000)
            if holders[to_block_key(key)] == victim:
                assert code != 0
            else:
                assert (code, got) == (0, value)
        wait_until(lambda: pool.state().nodes == 2, "the dead node to leave the client's map")
        assert [pool.put(pool.key(f"new{i}"), b"n" * 100) for i in range(20)] == [0] * 20
        running.restart(victim)
        wait_until(lambda: pool.state().nodes == 3, "the node to be back in the client's map")
        wait_for_whole_maps(running, sdk)

        running.kill("master")
        with pytest.raises(MasterUnavailable):
            mooncache.connect(**running.client_settings(), connect_timeout_s=0.5)
        other = next(name for name in seeds if name != victim)
        late = connected(running, [seeds[other]])
        try:
            assert late.state().nodes == 3
            assert [late.get(late.key(f"new{i}"), 100) for i in range(20)] == [(0, b"n" * 100)] * 20
            assert late.put(late.key("without a master"), b"w") == 0
        finally:
            late.close()
        running.restart("master")
        term = pool.state().term
        wait_until(lambda: pool.state().term > term, "the client to follow the new master")
        assert pool.get(pool.key("without a master"), 1) == (0, b"w")
    finally:
        pool.close()
