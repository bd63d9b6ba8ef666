"""A real cluster on loopback for the tests of the SDK: one for each module, ports and folders of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import mooncache
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster


def make_cluster(
    folder: Path, *, nodes: int = 2, capacity_bytes: int = 64 << 20, **env: str
) -> EmbeddedCluster:
    return EmbeddedCluster(
        ClusterSettings(
            state_dir=folder,
            nodes=nodes,
            capacity_bytes=capacity_bytes,
            port=0,
            extra_env=tuple({"MOONCACHE_METRICS_ENABLED": "true", **env}.items()),
        )
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """Two nodes of 64 MiB that no test of the module may break."""
    running = make_cluster(tmp_path_factory.mktemp("pool"))
    running.start()
    yield running
    killed = running.stop()
    assert not killed, f"did not end by themselves: {killed}"


@pytest.fixture(scope="module")
def pool(cluster: EmbeddedCluster) -> Iterator[mooncache.Client]:
    """A client of that cluster."""
    with mooncache.connect(**cluster.client_settings()) as client:
        yield client
