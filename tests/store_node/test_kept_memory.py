"""A store node that is killed or restarted comes back with the blocks that it had, and with nothing else."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mooncache
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.layout import HOLDER_SOCKET
from mooncache.config import Config
from mooncache.errors import ConfigInvalid
from mooncache.store_node.keeping import ask, end_holder, keeping_of
from tests.conditions import wait_until
from tests.store_node.questions import found, known, stored, value_of

MIB = 1 << 20
METRICS = (("MOONCACHE_METRICS_ENABLED", "true"),)


def kept(cluster: EmbeddedCluster, name: str) -> int:
    """A counter of the first node's kept memory; -1 while it does not answer."""
    address = f"http://{cluster.parts['node-1'].metrics}/metrics"
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            text = answer.read().decode()
    except OSError:
        return -1
    found = re.search(rf"^mooncache_store_node_{name}(?:_total)? ([0-9.e+]+)$", text, re.MULTILINE)
    return int(float(found[1])) if found else -1


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    settings = ClusterSettings(
        state_dir=tmp_path / "state", nodes=1, capacity_bytes=32 * MIB, keep_memory=True, port=0
    )
    running = EmbeddedCluster(replace(settings, extra_env=METRICS))
    with running:
        yield running


def start_again(cluster: EmbeddedCluster) -> None:
    cluster.kill("node-1")
    cluster.restart("node-1")
    cluster.wait_ready(90.0)


def test_blocks_come_back_after_kill_9_and_removed_ones_do_not(cluster: EmbeddedCluster) -> None:
    with mooncache.connect(**cluster.client_settings()) as client:
        values = {f"block-{number}": value_of(number) for number in range(100)}
        for key, value in values.items():
            client.put(key, value)
        assert client.remove("block-7")
        expected = set(values) - {"block-7"}
        for _ in range(2):
            start_again(cluster)
            wait_until(lambda: known(client, list(values)) == expected, "the blocks are there again")
            for key in sorted(expected):
                assert client.get(key) == values[key]
            assert kept(cluster, "kept_blocks_adopted") == 99
            wait_until(lambda: kept(cluster, "kept_blocks_unchecked") == 0)
            assert kept(cluster, "kept_blocks_damaged") == 0
        client.put("block-7", values["block-7"])
        assert client.get("block-7") == values["block-7"]


def test_another_process_that_has_the_memory_keeps_the_node_out(cluster: EmbeddedCluster) -> None:
    cluster.kill("node-1")
    assert cluster._run_dir is not None
    _, files = ask(cluster._run_dir / HOLDER_SOCKET, {"op": "take", "node": "node-1"})
    for file in files:
        os.close(file)
    cluster.restart("node-1")
    wait_until(lambda: cluster.parts["node-1"].exit_code is not None, "the node gives up")
    assert f"process {os.getpid()} has the memory of node-1" in cluster.parts["node-1"].log_tail()


def test_a_damaged_block_is_a_miss_and_the_others_are_right(cluster: EmbeddedCluster) -> None:
    with mooncache.connect(**cluster.client_settings()) as client:
        values = {f"block-{number}": value_of(number) for number in range(20)}
        for key, value in values.items():
            client.put(key, value)
        cluster.kill("node-1")
        assert cluster._run_dir is not None
        flip = (
            "import os,sys\n"
            "from pathlib import Path\n"
            "from mooncache.store_node.keeping import ask\n"
            "_, files = ask(Path(sys.argv[1]), {'op': 'take', 'node': 'node-1'})\n"
            "content = os.pread(files[2], os.fstat(files[2]).st_size, 0)\n"
            "at = content.index((13).to_bytes(4, 'little') * 1000)\n"
            "os.pwrite(files[2], b'\\xff', at + 777)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", flip, str(cluster._run_dir / HOLDER_SOCKET)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        cluster.restart("node-1")
        cluster.wait_ready(90.0)
        expected = set(values) - {"block-13"}
        wait_until(lambda: known(client, list(values)) == expected, "the damaged block is gone")
        for key in sorted(expected):
            assert client.get(key) == values[key]
        assert kept(cluster, "kept_blocks_damaged") == 1


def test_without_a_holder_the_next_start_is_cold(cluster: EmbeddedCluster) -> None:
    with mooncache.connect(**cluster.client_settings()) as client:
        client.put("block", value_of(1))
        assert cluster._run_dir is not None
        cluster.parts["node-1"].send(signal.SIGSTOP)  # or it starts another holder
        end_holder(cluster._run_dir / HOLDER_SOCKET)
        start_again(cluster)
        assert "no memory was held for it" in cluster.parts["node-1"].log_path.read_text()
        wait_until(lambda: stored(client, "other", value_of(2)), "the client knows the new process")
        assert client.get("other") == value_of(2)
        assert found(client, "block") is False


def test_settings_that_contradict_each_other(tmp_path: Path) -> None:
    def of(**section: object) -> None:
        config = Config.model_validate({"cluster": {"state_dir": tmp_path}, "store_node": section})
        assert keeping_of(config, "node") is None

    of(capacity_bytes=64 * MIB)
    with pytest.raises(ConfigInvalid, match=r"needs store_node\.capacity_bytes"):
        of(keep_memory=True)
    with pytest.raises(ConfigInvalid, match="is for host memory"):
        of(keep_memory=True, capacity_bytes=64 * MIB, arena_path=tmp_path)
    with pytest.raises(ConfigInvalid, match="is for host memory"):
        of(keep_memory=True, capacity_bytes=64 * MIB, arena_device="cuda:0")


def test_one_command_restarts_a_node_with_its_blocks(tmp_path: Path) -> None:
    state = str(tmp_path / "state")

    def mooncache_json(*words: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "mooncache.cli", *words, "--state-dir", state, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    pool = ("--engine", "none", "--nodes", "1", "--capacity", "32MiB", "--master-port", "0")
    mooncache_json("up", *pool, "--keep-memory", "--detach", "--timeout", "2min")
    try:
        with mooncache.connect(state_dir=state) as client:
            for number in range(20):
                client.put(f"block-{number}", value_of(number))
            for how in ((), ("--kill",)):
                restarted = mooncache_json("node", "restart", "node-1", "--timeout", "2min", *how)
                assert restarted["node_id"] == "node-1"
                assert restarted["blocks"] == 20
                for number in range(20):
                    assert client.get(f"block-{number}") == value_of(number)
    finally:
        mooncache_json("down")
    assert not (tmp_path / "state" / "run" / HOLDER_SOCKET).exists()
