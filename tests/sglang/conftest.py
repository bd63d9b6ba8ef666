"""What tests of the SGLang backend share: a model, a pool, and backends that are closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncache.cluster.embedded import EmbeddedCluster
from tests.client.conftest import make_cluster


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights: its files are the identity of pages."""
    from mooncache import tiny_model

    return tiny_model.build(tmp_path_factory.mktemp("model") / "tiny", layers=3)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """One node of 64 MiB that no test of the module may break."""
    with make_cluster(tmp_path_factory.mktemp("pool"), nodes=1) as running:
        yield running


@pytest.fixture
def make(model_dir: Path, cluster: EmbeddedCluster) -> Iterator[Callable[..., Any]]:
    """Makes backends on host pools; every one is a new engine's."""
    from tests.sglang.pools import load_backend

    made: list[Any] = []

    def build(
        pool: Any, extra: dict[str, Any] | None = None, *, at: EmbeddedCluster = cluster, **more: Any
    ) -> Any:
        settings = {"mooncache.state_dir": str(at.state_dir), "mooncache.model_path": str(model_dir)}
        made.append(load_backend(pool, {**settings, **(extra or {})}, **more))
        return made[-1]

    yield build
    for backend in made:
        backend.close()
