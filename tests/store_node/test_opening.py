"""A node's memory is opened while its process imports the rest, and what is opened is either taken or given back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncache.auth import create_cluster_token
from mooncache.config import Config
from mooncache.errors import ConfigInvalid
from mooncache.store_node.keeping import ask, end_holder, holder_path
from mooncache.store_node.opening import early_opening
from mooncache.store_node.service import StoreNodeService

MIB = 1 << 20
# What takes long to import, and what adoption does not need.
LATER = (
    "grpc",
    "google.protobuf",
    "structlog",
    "asyncio",
    "prometheus_client",
    "mooncache.store_node.service",
)


def config(folder: Path, **node: Any) -> Config:
    settings = {"node_id": "a", "capacity_bytes": 8 * MIB, "keep_memory": True, "unix_enabled": False, **node}
    return Config.model_validate({"cluster": {"state_dir": folder}, "store_node": settings})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    create_cluster_token(config(tmp_path).cluster.token_path)
    yield tmp_path
    end_holder(holder_path(config(tmp_path)))


def held(folder: Path) -> int:
    """Files that the holder has of the node."""
    answer, _ = ask(holder_path(config(folder)), {"op": "list"})
    return int(answer["nodes"]["a"]["files"])


def test_adoption_begins_before_what_it_does_not_need_is_imported() -> None:
    code = (
        f"import sys, mooncache.store_node.opening; print([name for name in {LATER} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_node_imports_nothing_that_it_does_not_use() -> None:
    unused = ("rich", "pygments", "numpy")
    code = (
        f"import sys, mooncache.store_node.service; print([name for name in {unused} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


async def test_the_service_serves_what_was_opened_before_it_was_imported(folder: Path) -> None:
    opening = early_opening(config(folder))
    assert opening is not None
    node = StoreNodeService(config(folder), opening)
    try:
        await node.build()
        assert node.state.identity == opening.identity
        assert node.state.core.stats()["store_capacity_bytes"] == 8 * MIB
        assert held(folder) == 3  # catalogue, generations, one arena
        assert list(opening.phases_s) == ["configured", "lent", "adopted", "kept"]
        assert sorted(opening.phases_s.values()) == list(opening.phases_s.values())
    finally:
        await node.shutdown()


def test_what_was_not_taken_stays_with_the_holder(folder: Path) -> None:
    for adopted in (False, True):
        opening = early_opening(config(folder))
        assert opening is not None
        server = opening.take()
        assert server.kept()["adopted"] is adopted
        del server
        opening.close()
        given_up = early_opening(config(folder))
        assert given_up is not None
        given_up.close()
        given_up.close()
        assert held(folder) == 3


async def test_what_cannot_be_opened_is_said_by_the_service(folder: Path) -> None:
    wrong = config(folder, numa_node=1000, huge_pages=False)
    opening = early_opening(wrong)
    assert opening is not None
    node = StoreNodeService(wrong, opening)
    with pytest.raises(ConfigInvalid, match="NUMA node 1000"):
        await node.build()
    await node.shutdown()


async def test_settings_that_contradict_each_other_are_said_by_the_service(folder: Path) -> None:
    wrong = config(folder, capacity_bytes=0)
    assert early_opening(wrong) is None
    node = StoreNodeService(wrong)
    with pytest.raises(ConfigInvalid, match="needs store_node"):
        await node.build()
    await node.shutdown()


def test_a_node_that_cannot_have_memory_to_adopt_opens_none_early(tmp_path: Path) -> None:
    assert early_opening(config(tmp_path, keep_memory=False)) is None
    assert early_opening(config(tmp_path)) is None  # the first start: there is no token
    assert not config(tmp_path).cluster.token_path.exists()
