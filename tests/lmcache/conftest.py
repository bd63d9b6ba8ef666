"""What tests of the LMCache plug-ins share: a model, a pool, and plug-ins that are closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncache.cluster.embedded import EmbeddedCluster
from tests.client.conftest import make_cluster
from tests.kvcache.faulty import FaultyPool


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights: its files are the identity of chunks."""
    from mooncache import tiny_model

    return tiny_model.build(tmp_path_factory.mktemp("model") / "tiny", layers=2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """One node of 64 MiB that no test of the module may break."""
    with make_cluster(tmp_path_factory.mktemp("pool"), nodes=1) as running:
        yield running


@pytest.fixture
def fragile(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    """One node, for tests that break it."""
    with make_cluster(tmp_path / "pool", nodes=1) as running:
        yield running


@pytest.fixture
def worker(model_dir: Path, cluster: EmbeddedCluster) -> Iterator[Callable[..., Any]]:
    """Makes workers of the in-process mode; every one is a new engine's."""
    from tests.lmcache.workers import Worker

    made: list[Any] = []

    def build(
        extra: dict[str, Any] | None = None, *, at: EmbeddedCluster = cluster, model: str = "", **more: Any
    ) -> Any:
        settings = {"mooncache.state_dir": str(at.state_dir), **(extra or {})}
        made.append(Worker(settings, model or str(model_dir), **more))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.fixture
def server(model_dir: Path, cluster: EmbeddedCluster) -> Iterator[Callable[..., Any]]:
    """Makes L2 adapters of the multi-process mode; every one is a new server's."""
    from tests.lmcache.servers import Server

    made: list[Any] = []

    def build(params: dict[str, Any] | None = None, *, at: EmbeddedCluster = cluster) -> Any:
        settings = {
            "mooncache.state_dir": str(at.state_dir),
            "mooncache.models": {"tiny": str(model_dir)},
            **(params or {}),
        }
        made.append(Server(settings))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> FaultyPool:
    """The pool that plug-ins of this test connect to."""
    from mooncache.connectors.lmcache import pool as pool_module

    pool = FaultyPool()
    monkeypatch.setattr(pool_module, "connect_pool", lambda **_: lambda: pool)
    return pool
