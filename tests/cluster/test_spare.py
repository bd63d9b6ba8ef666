"""The spare process of a node: it takes over after a crash, and only then; it never outlives who prepared it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import mooncache
from mooncache.cluster import supervisor
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.interpreter import choose_interpreter, forget_interpreter
from mooncache.cluster.processes import Part, processes_of_run
from mooncache.errors import NodeUnavailable
from tests.conditions import wait_until

MIB = 1 << 20


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    settings = ClusterSettings(
        state_dir=tmp_path / "state", nodes=1, capacity_bytes=32 * MIB, keep_memory=True, port=0
    )
    with EmbeddedCluster(settings) as running:
        yield running


@contextmanager
def supervised(cluster: EmbeddedCluster) -> Iterator[None]:
    ends = threading.Event()
    thread = threading.Thread(target=cluster.supervise, args=(lambda *_: None, ends.is_set))
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def are_there(client: mooncache.Client, keys: list[bytes]) -> bool:
    """Whether the pool has these blocks; not while a node is away."""
    try:
        return all(client.exists_many(keys))
    except NodeUnavailable:
        return False


def spare_pid(part: Part) -> int:
    """The process id of its spare process; 0 without one."""
    spare = part.spare
    return spare.process.pid if spare is not None and spare.waits() else 0


def test_it_takes_over_after_a_crash_with_all_blocks_and_another_one_waits(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SPARE_AFTER_S", 0.1)
    node = cluster.parts["node-1"]
    keys = [os.urandom(32) for _ in range(50)]
    with mooncache.connect(**cluster.client_settings(), timeout_s=60.0) as client:
        client.put_many(keys, [b"x" * 4096] * len(keys)).raise_for_errors()
        with supervised(cluster):
            wait_until(lambda: spare_pid(node) != 0, "a spare process")
            former, spare = node.pid, spare_pid(node)
            node.send(signal.SIGKILL)
            wait_until(lambda: node.pid != former, "another process")
            assert node.pid == spare
            wait_until(lambda: are_there(client, keys), "all blocks")
            assert all(client.get(key) == b"x" * 4096 for key in keys)
            wait_until(lambda: spare_pid(node) not in (0, spare), "the next spare process")
            last = spare_pid(node)
        wait_until(lambda: last not in processes_of_run(cluster.run_id), "its end, with the supervisor's")
    assert node.spare is None


def test_a_process_that_ended_by_itself_is_followed_by_one_that_is_started_then(
    cluster: EmbeddedCluster,
) -> None:
    node = cluster.parts["node-1"]
    node.prepare_spare()
    spare = spare_pid(node)
    node.send(signal.SIGTERM)
    assert node.wait(60.0) == 0
    node.start()
    assert node.pid != spare
    assert spare not in processes_of_run(cluster.run_id)


def test_one_of_another_version_does_not_take_over(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    node = cluster.parts["node-1"]
    other = tmp_path / "python"
    other.symlink_to(os.path.realpath("/bin/false"))
    node.prepare_spare()
    spare = spare_pid(node)
    choose_interpreter(cluster.state_dir, str(other))
    try:
        cluster.kill("node-1")
        node.start()
        assert (node.pid != spare, node.wait(60.0)) == (True, 1)
    finally:
        forget_interpreter(cluster.state_dir)
    assert spare not in processes_of_run(cluster.run_id)


def test_one_that_has_ended_is_replaced(cluster: EmbeddedCluster) -> None:
    node = cluster.parts["node-1"]
    node.prepare_spare()
    spare = spare_pid(node)
    node.prepare_spare()
    assert spare_pid(node) == spare
    os.kill(spare, signal.SIGKILL)
    wait_until(lambda: spare_pid(node) == 0, "its end")
    node.prepare_spare()
    assert spare_pid(node) not in (0, spare)
    node.end_spare()


def test_it_ends_with_the_pipe_of_who_prepared_it(cluster: EmbeddedCluster) -> None:
    node = cluster.parts["node-1"]
    node.prepare_spare()
    assert node.spare is not None and node.spare.process.stdin is not None
    node.spare.process.stdin.close()
    assert node.spare.process.wait(60.0) == 0
    node.end_spare()
