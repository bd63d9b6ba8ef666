"""Store nodes of the chart that keep their memory: what is rendered, and a node that is killed beside its holder."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from mooncache import Client
from mooncache.auth import create_cluster_token
from mooncache.config import load
from mooncache.store_node.holder import HolderError
from mooncache.store_node.keeping import ask
from tests.conditions import wait_until
from tests.deploy.chart import (
    INSECURE,
    SINGLE,
    VALUE_SETS,
    Object,
    component,
    container,
    environment,
    pod,
    rendered,
    template,
    workloads,
)
from tests.deploy.test_helm_processes import CAPACITY, Part
from tests.ports import own_port

KEPT = VALUE_SETS[0].with_name("ssd_hosts_shared_memory.yaml")
PLAIN = VALUE_SETS[0].with_name("pool_only.yaml")
VALUE = b"value" * 100_000
NODE = "rel-store-0"


def node_of(objects: tuple[Object, ...]) -> Object:
    (found,) = (each for each in workloads(objects) if component(each) == "store_node")
    return found


@cache
def kept_pool() -> tuple[Object, ...]:
    """The pool alone, whose nodes keep their memory."""
    yaml = pytest.importorskip("yaml", reason="PyYAML reads what helm renders")
    done = template("--values", str(PLAIN), "--set", "storeNode.keepMemory=true")
    assert done.returncode == 0, done.stderr
    return tuple(found for found in yaml.safe_load_all(done.stdout) if found)


def test_the_holder_is_beside_the_node_and_has_its_socket_alone() -> None:
    workload = node_of(rendered(KEPT))
    settings = load(env=environment(container(workload))).store_node
    assert settings.keep_memory and not settings.start_holder, "one of its own would end with its container"
    assert settings.holder_path is not None
    assert pod(workload)["shareProcessNamespace"] is True, "or the holder cannot wait for the node's end"
    node, holder = pod(workload)["containers"]
    module, path = holder["args"]
    assert module == "mooncache.store_node.holder"
    assert Path(path) == settings.holder_path
    (mount,) = holder["volumeMounts"]
    assert mount in node["volumeMounts"] and settings.holder_path.is_relative_to(mount["mountPath"])
    assert holder["image"] == node["image"], "both speak one protocol"
    assert "env" not in holder and "ports" not in holder


def test_without_the_value_pods_are_as_they_were() -> None:
    workload = node_of(rendered(PLAIN))
    assert "shareProcessNamespace" not in pod(workload)
    assert len(pod(workload)["containers"]) == 1
    assert not load(env=environment(container(workload))).store_node.keep_memory


def test_memory_is_not_kept_past_the_chart() -> None:
    done = template(*INSECURE, *SINGLE, "--set", "config.store_node.keep_memory=true")
    assert done.returncode != 0
    assert "config.store_node.keep_memory is set by the chart" in done.stderr


@pytest.mark.timeout(300)
def test_blocks_in_memory_survive_the_end_of_the_nodes_container(tmp_path: Path) -> None:
    token = create_cluster_token(tmp_path / "cluster.token")
    control = own_port()
    target = f"127.0.0.1:{control}"
    socket = tmp_path / "holder.sock"
    master = Part("master", tmp_path / "m", MOONCACHE_MASTER_PORT=str(control))
    node = Part(
        "store_node",
        tmp_path / "n",
        kept_pool(),
        MOONCACHE_CLUSTER_MASTER_TARGETS=target,
        MOONCACHE_STORE_NODE_NODE_ID=NODE,
        MOONCACHE_STORE_NODE_PORT="0",
        MOONCACHE_STORE_NODE_DATA_HOST="127.0.0.1",
        MOONCACHE_STORE_NODE_DATA_PORT="0",
        MOONCACHE_STORE_NODE_CAPACITY_BYTES=CAPACITY,
        MOONCACHE_STORE_NODE_HOLDER_PATH=str(socket),
    )
    _, holder = pod(node_of(kept_pool()))["containers"]
    words = [str(socket) if word.endswith(".sock") else word for word in holder["args"]]
    with master.running(), holding(words) as first, node.running(ends=-signal.SIGKILL) as process:
        wait_until(lambda: node.ask("readinessProbe") == 200, "the node is registered")
        with Client([target], token=token.text) as client:
            client.put("only here", VALUE)
        first.kill()
        first.wait(60)
        with holding(words):
            wait_until(lambda: has_files(socket), "the next holder has the node's memory")
            process.kill()
            process.wait(60)
            with node.running():
                wait_until(lambda: node.ask("readinessProbe") == 200, "its next process is registered")
                with Client([target], token=token.text) as client:
                    assert client.get("only here") == VALUE


@contextmanager
def holding(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The holder's container as a process."""
    with subprocess.Popen([sys.executable, "-m", *words]) as process:
        try:
            yield process
        finally:
            process.terminate()


def has_files(socket: Path) -> bool:
    try:
        nodes = ask(socket, {"op": "list"})[0]["nodes"]
    except HolderError:
        return False
    return bool(nodes.get(NODE, {}).get("files"))
