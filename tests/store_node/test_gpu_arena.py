"""A store node whose blocks lie on a fake GPU, as a process: what the cluster sees when that GPU hangs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mooncache
from mooncache.cli.app import run
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import MooncacheError
from tests.client.conftest import make_cluster
from tests.conditions import wait_until
from tests.gpu import fake_gpu

MIB = 1 << 20


@pytest.fixture
def hangs(tmp_path: Path) -> Path:
    """The GPU hangs while this file is there."""
    return tmp_path / "hangs"


@pytest.fixture
def gpu_cluster(tmp_path: Path, hangs: Path) -> Iterator[EmbeddedCluster]:
    drivers = tmp_path / "drivers"
    drivers.mkdir()
    shutil.copy(fake_gpu.library(), drivers / "libcuda.so.1")
    cluster = make_cluster(
        tmp_path / "state",
        nodes=1,
        MOONCACHE_STORE_NODE_ARENA_DEVICE="cuda:0",
        FAKE_CUDA_HANGS=str(hangs),
        LD_LIBRARY_PATH=f"{drivers}:{os.environ.get('LD_LIBRARY_PATH', '')}",
    )
    cluster.start()
    yield cluster
    hangs.unlink(missing_ok=True)
    assert not cluster.stop()


def test_the_cluster_sees_a_gpu_that_hangs_and_that_it_is_back(
    gpu_cluster: EmbeddedCluster, hangs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = gpu_cluster.client_settings()

    def status() -> dict[str, Any]:
        capsys.readouterr()
        token = ("--token-file", str(settings["token_file"]))
        assert run(["status", "--json", "--master", str(settings["master"]), *token]) == 0
        (node,) = json.loads(capsys.readouterr().out)["nodes"]
        assert isinstance(node, dict)
        return node

    with mooncache.connect(**settings, timeout_s=10.0) as client:
        client.put("before", b"b" * MIB)
        assert [node.state for node in client.nodes()] == ["active"]
        assert status()["arena"] == "gpu"
        hangs.touch()
        with pytest.raises(MooncacheError):
            client.put("meanwhile", b"m" * MIB)
        wait_until(lambda: [node.state for node in client.nodes()] == ["draining"], "the map says so")
        seen = status()
        assert (seen["state"], seen["arena_gone"], seen["weight"]) == ("draining", True, 0.0)
        hangs.unlink()
        wait_until(lambda: [node.state for node in client.nodes()] == ["active"], "the map says so")
        seen = status()
        assert (seen["state"], seen["arena_gone"]) == ("active", False)
        assert seen["weight"] > 0
        client.put("after", b"a" * MIB)
        assert bytes(client.get("before")) == b"b" * MIB
        assert bytes(client.get("after")) == b"a" * MIB
