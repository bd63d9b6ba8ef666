"""A process with a client forks a worker: what belongs to the parent ends with the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

import mooncache
from mooncache.cluster.embedded import EmbeddedCluster
from tests.conditions import wait_until

pytestmark = pytest.mark.slow

_BLOCK = 8 << 20


def used(pool: mooncache.Client) -> list[int]:
    return [pool.node_stat(node.index)["store_used_bytes"] for node in pool.nodes()]


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
def test_a_forked_worker_keeps_nothing_of_a_parent_that_was_killed(
    cluster: EmbeddedCluster, shm: bool
) -> None:
    script = f"""
        import mooncache, os, sys, time
        pool = mooncache.connect(**{cluster.client_settings()!r}, shm={shm})
        pool.put("whole", bytes(1 << 20))
        assert pool.get("whole") == bytes(1 << 20)
        block = pool.reserve("half-written", {_BLOCK})
        block.write(0, bytes({_BLOCK // 2}))
        mapped = "memfd:" in open("/proc/self/maps").read()
        ready, tell = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.write(tell, b"!")  # what is done at the fork is done
            time.sleep(600)
        os.read(ready, 1)
        print(worker, mapped, flush=True)
        time.sleep(600)
    """
    with mooncache.connect(**cluster.client_settings()) as pool:
        pool.remove("whole")
        empty = used(pool)
        parent = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
        )
        assert parent.stdout is not None
        worker, mapped = parent.stdout.readline().split()
        try:
            assert mapped == str(shm)
            with open(f"/proc/{worker}/maps") as maps:
                assert "memfd:" not in maps.read()
            open_files = [
                os.readlink(f"/proc/{worker}/fd/{name}") for name in os.listdir(f"/proc/{worker}/fd")
            ]
            assert not [name for name in open_files if "memfd:" in name]
            pool.remove("whole")
            assert sum(used(pool)) >= sum(empty) + _BLOCK
            parent.kill()
            parent.wait(60)
            wait_until(lambda: used(pool) == empty, "the reserved space to come back while the worker lives")
            os.kill(int(worker), 0)
        finally:
            os.kill(int(worker), signal.SIGKILL)
            parent.kill()
            parent.wait(60)
            parent.stdout.close()


def run_script(script: str) -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)


def test_the_parent_goes_on_when_its_workers_end(cluster: EmbeddedCluster) -> None:
    """Several, because the threads of gRPC are found in another state each time."""
    with mooncache.connect(**cluster.client_settings()) as pool:
        pool.put("before", b"x" * 1000)
        run_script(f"""
            import mooncache, os
            pool = mooncache.connect(**{cluster.client_settings()!r})
            assert pool.get("before") == b"x" * 1000
            for _ in range(12):
                worker = os.fork()
                if worker == 0:
                    del pool
                    os._exit(0)
                assert os.waitpid(worker, 0)[1] == 0
            assert pool.get("before") == b"x" * 1000
            pool.put("after", bytes(1 << 20))
            assert pool.get("after") == bytes(1 << 20)
            assert pool.stats()["connects"] <= len(pool.nodes()) * 2
        """)


def test_a_child_is_told_that_the_client_is_its_parents(cluster: EmbeddedCluster) -> None:
    """Threads of the parent are in calls of the client and hold its locks while the child is made."""
    run_script(f"""
        import mooncache, os, sys, threading
        from mooncache.errors import Closed
        pool = mooncache.connect(**{cluster.client_settings()!r})
        pool.put("a", b"x" * 1000)
        held = pool.reserve("held", 1 << 20)
        over = threading.Event()

        def work():
            while not over.is_set():
                pool.get("a")
                pool.reserve("never", 1000).abort()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        calls = {{
            "get": lambda: pool.get("a"),
            "put": lambda: pool.put("b", b"1"),
            "match": lambda: pool.match(["a"]),
            "reserve": lambda: pool.reserve("c", 10),
            "write": lambda: held.write(0, b"1"),
        }}
        for _ in range(10):
            worker = os.fork()
            if worker == 0:
                for name, call in calls.items():
                    try:
                        call()
                        os._exit(1)
                    except Closed as error:
                        assert "fork" in str(error), error
                assert pool.stats() == {{}}
                held.abort()
                pool.close()
                del held, pool
                sys.exit(0)
            assert os.waitpid(worker, 0)[1] == 0
        over.set()
        for thread in threads:
            thread.join()
        held.write(0, bytes(1 << 20))
        held.commit()
        assert pool.get("held") == bytes(1 << 20)
        assert pool.remove("held")
    """)


def test_a_child_is_told_that_grpc_ends_at_the_fork_and_reaches_nodes_without_it(
    cluster: EmbeddedCluster,
) -> None:
    settings = cluster.client_settings()
    run_script(f"""
        import mooncache, os
        from mooncache.errors import Unsupported
        pool = mooncache.connect(**{settings!r})
        pool.put("a", b"x" * 1000)
        nodes = [f"{{node.tcp_host}}:{{node.tcp_port}}" for node in pool.nodes()]
        worker = os.fork()
        if worker == 0:
            try:
                mooncache.connect(**{settings!r})
                os._exit(1)
            except Unsupported as error:
                assert "forkserver" in str(error), error
            with mooncache.connect(nodes=nodes, token_file={settings["token_file"]!r}) as own:
                assert own.get("a") == b"x" * 1000
                own.put("b", b"y" * 1000)
            os._exit(0)
        assert os.waitpid(worker, 0)[1] == 0
        assert pool.get("b") == b"y" * 1000
    """)
