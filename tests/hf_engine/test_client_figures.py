"""The engine's own page has what its pool client moved, by the way it took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.hf_engine.conftest import BLOCK, Lab, prompt


def test_the_page_shows_what_the_client_moved(
    make_lab: Callable[..., Lab], connect: Callable[[], Any]
) -> None:
    lab = make_lab(connect)
    lab.run(prompt(3 * BLOCK, 4711))
    lab.settled()
    page = lab.parts.engine.metrics.registry.render().decode()
    moved = {
        line.split('"')[1]: float(line.split()[-1])
        for line in page.splitlines()
        if line.startswith("mooncache_hf_client_bytes_total{")
    }
    assert set(moved) == {"tcp", "unix", "shm", "rdma"}
    assert sum(moved.values()) > 0
    assert "mooncache_hf_client_misses_total" in page


def test_without_a_pool_the_page_is_without_a_client(make_lab: Callable[..., Lab]) -> None:
    assert "mooncache_hf_client" not in make_lab().parts.engine.metrics.registry.render().decode()
