"""Breaking a real cluster: every loss is a miss, another replica, or a typed error within its deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mooncache
from mooncache.client.keys import to_block_key
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import DeadlineExceeded, MasterUnavailable, MooncacheError, NoNodes
from tests.client.conftest import make_cluster
from tests.conditions import wait_until
from tests.processes import freeze

pytestmark = pytest.mark.slow


@pytest.fixture
def fragile(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    """A cluster that a test may break."""
    cluster = make_cluster(tmp_path, nodes=2)
    cluster.start()
    yield cluster
    cluster.stop()


def holders(client: mooncache.Client, key: str) -> set[str]:
    return {entry.node_id for entry in client.list(limit=1_000_000) if entry.key == to_block_key(key)}


def client_process(cluster: EmbeddedCluster, body: str) -> subprocess.Popen[str]:
    """A client in a process of its own; `pool` is connected, and it prints "ready" when the body says so."""
    script = "import mooncache, os, sys, time\n"
    script += f"pool = mooncache.connect(**{cluster.client_settings()!r})\n" + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def test_a_client_killed_in_mid_put_leaves_nothing(fragile: EmbeddedCluster) -> None:
    with mooncache.connect(**fragile.client_settings()) as pool:
        empty = [pool.node_stat(node.index)["store_used_bytes"] for node in pool.nodes()]
        victim = client_process(
            fragile,
            """
            block = pool.reserve("half-written", 8 << 20)
            block.write(0, bytes(4 << 20))
            print("ready", flush=True)
            time.sleep(60)
            """,
        )
        assert victim.stdout is not None
        assert victim.stdout.readline() == "ready\n"
        assert pool.get("half-written") is None
        taken = [pool.node_stat(node.index)["store_used_bytes"] for node in pool.nodes()]
        assert sum(taken) >= sum(empty) + (8 << 20)
        victim.kill()
        victim.wait(60)
        victim.stdout.close()
        wait_until(
            lambda: [pool.node_stat(n.index)["store_used_bytes"] for n in pool.nodes()] == empty,
            "the space to come back",
        )
        assert pool.get("half-written") is None
        assert pool.put("half-written", b"now whole")
        assert pool.get("half-written") == b"now whole"


def test_a_killed_node_costs_its_own_blocks_only(fragile: EmbeddedCluster) -> None:
    keys = [f"k{i}" for i in range(40)]
    values = {key: os.urandom(2000) for key in keys}
    with mooncache.connect(**fragile.client_settings(), timeout_s=5) as pool:
        pool.put_many(keys, list(values.values()), replicas=2).raise_for_errors()
        pool.put("only-on-one", b"x" * 100)
        alone = holders(pool, "only-on-one")
        victim = alone.pop()
        fragile.kill(victim)
        got = pool.get_many(keys)
        assert list(got) == list(values.values()), "every block has a copy on the other node"
        begun_s = time.monotonic()
        assert pool.get_many(["only-on-one"]).codes[0] // 100 in {2, 4}, "a miss, or unreachable"
        assert time.monotonic() - begun_s < 10, "bounded by the deadline"
        wait_until(
            lambda: victim in {n.node_id for n in pool.nodes() if n.state == "dead"},
            "the master to give the node up",
        )
        assert pool.get("only-on-one") is None, "a plain miss once the node is known to be dead"
        assert pool.put("after", b"goes on")
        fragile.restart(victim)
        fragile.wait_ready(20)
        wait_until(lambda: len([n for n in pool.nodes() if n.state == "active"]) == 2, "both nodes")
        assert pool.get("after") == b"goes on"
        assert pool.get("only-on-one") is None, "its memory was lost with it"
        pool.put("both-again", b"y", replicas=2)
        assert holders(pool, "both-again") == {"node-1", "node-2"}


def test_a_node_killed_in_mid_get_gives_a_clean_outcome(fragile: EmbeddedCluster) -> None:
    data = os.urandom(24 << 20)
    with mooncache.connect(**fragile.client_settings(), shm=False, timeout_s=10) as pool:
        pool.put("large", data, replicas=2)
        pool.put("lonely", data)
        victim = holders(pool, "lonely").pop()
        outcomes: list[object] = []

        def read() -> None:
            for _ in range(200):
                for key in ("large", "lonely"):
                    try:
                        outcomes.append(pool.get(key) in (data, None))
                    except MooncacheError as error:
                        outcomes.append(error.code // 100 == 4)
                if len(outcomes) > 40 and fragile.parts[victim].exit_code is not None:
                    return

        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: len(outcomes) >= 4, "some reads")
        fragile.kill(victim)
        reader.join(60)
        assert not reader.is_alive()
        assert all(outcomes), "whole blocks, misses or typed errors; never anything else"
        assert pool.get("large") == data


def test_the_master_can_be_killed_while_everything_goes_on(fragile: EmbeddedCluster) -> None:
    with mooncache.connect(**fragile.client_settings(), timeout_s=30) as pool:
        keys = [f"before-{i}" for i in range(200)]
        pool.put_many(keys, [key.encode() for key in keys]).raise_for_errors()
        fragile.kill("master")
        assert list(pool.get_many(keys)) == [key.encode() for key in keys]
        for i in range(50):
            assert pool.put(f"during-{i}", b"no master needed")
            assert pool.get(f"during-{i}") == b"no master needed"
        assert pool.match(keys).leading_blocks == 200
        with pytest.raises(MasterUnavailable):
            mooncache.connect(**fragile.client_settings(), connect_timeout_s=0.5)
        begun_s = time.monotonic()
        fragile.restart("master")
        fragile.wait_ready(30)
        assert list(pool.get_many(keys)) == [key.encode() for key in keys]
        assert time.monotonic() - begun_s < 60
        wait_until(lambda: directory_blocks(fragile) == 250, "the directory to be whole again")
        assert pool.put("after", b"x")
        assert {node.node_id for node in pool.nodes()} == {"node-1", "node-2"}


def directory_blocks(cluster: EmbeddedCluster) -> int:
    """Distinct blocks in the master's directory, as `mooncache status` shows them."""
    import json

    done = subprocess.run(
        [sys.executable, "-m", "mooncache.cli", "status", "--json", "--state-dir", str(cluster.state_dir)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    master = json.loads(done.stdout)["master"]
    return int(master["block_count"]) if master["directory_complete"] else -1


def test_a_full_node_evicts_and_goes_on(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path, nodes=1, capacity_bytes=16 << 20)
    cluster.start()
    try:
        with mooncache.connect(**cluster.client_settings(), timeout_s=30) as pool:
            for i in range(64):
                assert pool.put(f"fill-{i}", os.urandom(1 << 20))
            assert pool.get("fill-63") is not None
            held = [i for i in range(64) if pool.exists(f"fill-{i}")]
            assert 8 <= len(held) <= 16
            stats = pool.node_stat(0)
            assert stats["store_used_bytes"] <= 16 << 20
            for i in held:
                assert pool.pin(f"fill-{i}", ttl_s=600)
            begun_s = time.monotonic()
            codes = [pool.put_many([f"too-{i}"], [bytes(2 << 20)], timeout_s=3).codes[0] for i in range(9)]
            assert set(codes) & {300, 301, 401}, "no space, and says so"
            assert set(codes) <= {0, 300, 301, 401}
            assert time.monotonic() - begun_s < 30
            assert all(pool.exists(f"fill-{i}") for i in held), "pinned blocks stay"
            for i in held:
                assert pool.unpin(f"fill-{i}")
            assert pool.put("fits-again", bytes(2 << 20))
    finally:
        cluster.stop()


def test_no_node_at_all_is_its_own_error(fragile: EmbeddedCluster) -> None:
    with mooncache.connect(**fragile.client_settings(), timeout_s=2) as pool:
        pool.put("k", b"v")
        fragile.kill("node-1")
        fragile.kill("node-2")
        wait_until(lambda: all(n.state == "dead" for n in pool.nodes()), "the master to give both up")
        with pytest.raises(NoNodes):
            pool.put("k2", b"v")
        with pytest.raises(NoNodes):
            pool.get("k")


def test_a_stopped_process_is_not_waited_for(fragile: EmbeddedCluster) -> None:
    """SIGSTOP: the connection stays open and nothing answers. The deadline, and the other copy, still hold."""
    with mooncache.connect(**fragile.client_settings(), timeout_s=4) as pool:
        pool.put("copied", b"twice", replicas=2)
        freeze(fragile.parts["node-1"].pid)
        try:
            for _ in range(3):
                begun_s = time.monotonic()
                assert pool.get("copied") == b"twice"
                assert time.monotonic() - begun_s < 8
        finally:
            fragile.parts["node-1"].send(signal.SIGCONT)


def test_reads_leave_a_stopped_node_and_come_back(fragile: EmbeddedCluster) -> None:
    """Late reads are asked of the other copy; then the node is read last, and read again once it answers in time."""
    with mooncache.connect(**fragile.client_settings(), timeout_s=30, shm=False) as pool:
        keys = [f"copied-{i}" for i in range(30)]
        values = [os.urandom(4096) for _ in keys]
        pool.put_many(keys, values, replicas=2).raise_for_errors()
        target = bytearray(4096)

        def read(position: int) -> str:
            answer = pool.get_many_into([keys[position]], [target])
            answer.raise_for_errors()
            assert target == values[position]
            return answer.node_ids[0]

        chosen = {read(position) for position in range(30)}
        assert len(chosen) == 1, "small reads of an idle client stay with one of equal holders"
        (name,) = chosen
        freeze(fragile.parts[name].pid)
        try:
            assert {read(position) for position in range(30)} == {"node-1", "node-2"} - {name}
            stats = pool.stats()
            assert stats["hedges_won"] >= 3
            assert stats["slow_nodes"] >= 1
            assert stats["hedges"] < 30, "not every read waits for it"
        finally:
            fragile.parts[name].send(signal.SIGCONT)
        wait_until(lambda: read(0) == name, f"reads to come back to {name}")


def test_a_put_leaves_a_stopped_node_behind(fragile: EmbeddedCluster) -> None:
    """What a stopped node was to have is stored on the other one, long before the call's deadline."""
    with mooncache.connect(**fragile.client_settings(), timeout_s=30) as pool:
        keys = [f"warm-{i}" for i in range(16)]
        pool.put_many(keys, [os.urandom(4096)] * 16).raise_for_errors()
        assert {entry.node_id for entry in pool.list()} == {"node-1", "node-2"}, "both get blocks"
        freeze(fragile.parts["node-1"].pid)
        try:
            for shm in (True, False):
                with mooncache.connect(**fragile.client_settings(), timeout_s=30, shm=shm) as fresh:
                    for pool_now in (pool, fresh):
                        values = [os.urandom(4096) for _ in keys]
                        names = [f"{id(pool_now)}-{shm}-{i}" for i in range(16)]
                        pool_now.put_many(names, values).raise_for_errors()
                        assert list(pool_now.get_many(names)) == values
        finally:
            fragile.parts["node-1"].send(signal.SIGCONT)


def test_reservations_of_a_stopped_node(fragile: EmbeddedCluster) -> None:
    """A call that is cut costs its own reservation, and letting go of one never waits for its node."""
    fragile.kill("node-2")
    for shm in (True, False):
        with mooncache.connect(**fragile.client_settings(), timeout_s=20, shm=shm) as pool:
            wait_until(lambda pool=pool: [n.state for n in pool.nodes()].count("active") == 1, "one node")
            index = next(node.index for node in pool.nodes() if node.state == "active")
            used = pool.node_stat(index)["store_used_bytes"]
            cut, kept = pool.reserve(f"cut-{shm}", 4096), pool.reserve(f"kept-{shm}", 8192)
            dropped = [pool.reserve(f"dropped-{shm}-{i}", 4096) for i in range(200)]
            cut.write(0, b"c" * 4096)
            kept.write(0, b"1" * 4096)
            freeze(fragile.parts["node-1"].pid)
            try:
                with pytest.raises(DeadlineExceeded):
                    cut.commit(timeout_s=0.3)
                begun_s = time.monotonic()
                dropped.clear()
                waited_s = time.monotonic() - begun_s
            finally:
                fragile.parts["node-1"].send(signal.SIGCONT)
            assert waited_s < 1.5, "four connections; each used to wait for two seconds, with Python's lock"
            kept.write(4096, b"2" * 4096)
            kept.commit()
            assert pool.get(f"kept-{shm}") == b"1" * 4096 + b"2" * 4096
            if shm:
                continue  # memory that this process may still write to is given back when the connection ends
            wait_until(
                lambda pool=pool, used=used, index=index: (
                    pool.node_stat(index)["store_used_bytes"] <= used + 8192 + 4096
                ),
                "the dropped reservations to be given back",
            )


def test_drain_moves_blocks_and_keeps_tenants(fragile: EmbeddedCluster) -> None:
    with (
        mooncache.connect(**fragile.client_settings()) as pool,
        mooncache.connect(**fragile.client_settings(), tenant="team-a") as team,
    ):
        keys = [f"moved-{i}" for i in range(60)]
        pool.put_many(keys, [key.encode() * 10 for key in keys]).raise_for_errors()
        team.put_many(keys, [key.encode() * 3 for key in keys]).raise_for_errors()
        counts = {entry.node_id for entry in pool.list(limit=10_000)}
        victim = sorted(counts)[0]
        done = subprocess.run(
            [
                sys.executable,
                *("-m", "mooncache.cli", "drain", victim, "--timeout", "60s"),
                *("--json", "--state-dir", str(fragile.state_dir)),
            ],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert '"state": "done"' in done.stdout
        fragile.kill(victim, signal.SIGTERM)
        wait_until(
            lambda: [n.node_id for n in pool.nodes() if n.state == "active"] != [victim],
            "the map without the drained node",
        )
        assert list(pool.get_many(keys)) == [key.encode() * 10 for key in keys]
        assert list(team.get_many(keys)) == [key.encode() * 3 for key in keys]


def test_children_end_with_their_parent(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
        cluster = EmbeddedCluster(ClusterSettings(state_dir=Path({str(tmp_path)!r}), nodes=1, port=0))
        cluster.start()
        print(*[part.pid for part in cluster.parts.values()], flush=True)
        time.sleep(60)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait(60)
    parent.stdout.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of the children")
