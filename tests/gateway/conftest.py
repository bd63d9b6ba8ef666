"""What the tests of the gateway share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.gateway.shell import conductor
from tests.client.conftest import make_cluster
from tests.gateway.model_folder import make_tokenizer


@pytest.fixture(autouse=True)
def _wait_for_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take more than the gateway's second for a plan, and then a test has another request."""
    monkeypatch.setattr(conductor, "_SCHEDULE_TIMEOUT_S", 60.0)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """A pool of real processes, for the tests of one file."""
    cluster = make_cluster(tmp_path_factory.mktemp("pool"))
    cluster.start()
    yield cluster
    cluster.stop()
