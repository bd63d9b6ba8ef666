"""The package `mooncake` of compat/mooncake over a pool on loopback."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mooncache.cluster.embedded import EmbeddedCluster
from tests.client.conftest import make_cluster

COMPAT = Path(__file__).resolve().parents[2] / "compat" / "mooncake"


def use(monkeypatch: pytest.MonkeyPatch, cluster: EmbeddedCluster) -> None:
    """What a user sets: where the token is. The rest are arguments of setup()."""
    monkeypatch.setenv("MOONCACHE_CLUSTER_STATE_DIR", str(cluster.state_dir))


@pytest.fixture(scope="session")
def mooncake_store() -> ModuleType:
    """`mooncake.store` of this repository, by the name that callers of the original import."""
    sys.path.insert(0, str(COMPAT))
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        if "Uninstall both" not in str(error):
            raise
        pytest.skip(f"the original is installed here: {error}")  # by the extra [bench]
    finally:
        sys.path.remove(str(COMPAT))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """Two nodes of 64 MiB."""
    with make_cluster(tmp_path_factory.mktemp("pool")) as running:
        yield running


@pytest.fixture
def make_store(
    mooncake_store: ModuleType, cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Makes stores that are set up; `segment` bytes of memory each."""
    use(monkeypatch, cluster)
    made: list[Any] = []

    def make(segment: int = 0, host: str = "localhost", **more: Any) -> Any:
        store = mooncake_store.MooncakeDistributedStore()
        made.append(store)
        code = store.setup(host, "P2PHANDSHAKE", segment, 16 << 20, "tcp", "", cluster.master_target, **more)
        assert code == 0
        return store

    yield make
    for store in made:
        assert store.close() == 0


@pytest.fixture
def store(make_store: Callable[..., Any]) -> Any:
    """A store that contributes no memory."""
    return make_store()
