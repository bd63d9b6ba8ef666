"""The worker's half reports what its client moved: each byte once, and not at every step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mooncache.errors import Closed

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

PAUSE_S = 5.0


class Counting:
    """A client and its link in one."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.reads = 0
        self.closed = False

    def client(self) -> Counting:
        return self

    def stats(self) -> dict[str, int]:
        self.reads += 1
        if self.closed:
            raise Closed("closed")
        return dict(self.values)


@pytest.fixture
def client() -> Counting:
    return Counting()


@pytest.fixture
def side(client: Counting) -> Any:
    from mooncache.connectors.vllm.worker_side import WorkerSide

    settings: Any = None
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))
    made: Any = WorkerSide(settings, None, config, None)
    made._link = client
    return made


def test_what_was_moved_is_reported_once(side: Any, client: Counting) -> None:
    client.values = {"rdma_bytes": 100, "rdma_peer_node-1_bytes": 100, "rdma_rail_mlx5_0:1_failures": 1}
    side._count_client(100.0)
    client.values = {"rdma_bytes": 130, "rdma_peer_node-1_bytes": 130, "rdma_rail_mlx5_0:1_failures": 1}
    side._count_client(100.0 + PAUSE_S)
    side._count_client(100.0 + 2 * PAUSE_S)
    assert side.stats.data["count"] == {
        "client_bytes:rdma": 130,
        "client_peer_bytes:node-1": 130,
        "client_rail_failures:mlx5_0:1": 1,
    }


def test_it_is_not_read_at_every_step(side: Any, client: Counting) -> None:
    for step in range(50):
        side._count_client(100.0 + step / 100)
    assert client.reads == 1


def test_a_client_that_is_closed_or_absent_is_no_trouble(side: Any, client: Counting) -> None:
    client.closed = True
    side._count_client(100.0)
    side._link = None
    side._count_client(200.0)
    assert side.stats.is_empty()
