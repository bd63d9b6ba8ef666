"""Round trips between real nodes: measured, kept by the master, shown by the command and by the console's matrix."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mooncache.auth import load_cluster_token, tenant_token
from mooncache.bench.operate.browser import BrowserPage
from mooncache.cli.app import run
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.gateway.console.messages import network_view
from mooncache.proto.v1 import common_pb2, master_pb2
from tests.client.conftest import make_cluster
from tests.conditions import wait_until
from tests.gateway.test_console_acts import scene
from tests.gateway.test_console_browser import enter, page

__all__ = ["page"]

NODES = {"node-1", "node-2", "node-3"}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    cluster = make_cluster(tmp_path_factory.mktemp("pool"), nodes=3)
    cluster.start()
    yield cluster
    cluster.stop()


def test_ways_name_places_and_leave_out_nodes_that_are_gone() -> None:
    status = master_pb2.GetStatusResponse(
        nodes=[
            master_pb2.NodeStatus(
                node=common_pb2.NodeInfo(node_id=name, host_id="h", state=common_pb2.NODE_STATE_ACTIVE),
                peers=[
                    master_pb2.PeerLatency(node_id=peer, median_us=250, least_us=200, tries=3, age_ms=1500)
                    for peer in ("b", "gone")
                ],
            )
            for name in ("a", "b")
        ]
    )
    found = network_view(status)
    assert [node["id"] for node in found["nodes"]] == ["a", "b"]
    assert found["ways"] == [[0, 1, 250, 200, 3, 0, 1.5], [1, 1, 250, 200, 3, 0, 1.5]]


def status_of(
    pool: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str
) -> dict[str, Any]:
    monkeypatch.setenv("MOONCACHE_STATE_DIR", str(pool.state_dir))
    capsys.readouterr()
    assert run(["status", "--json", *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_nodes_measure_each_other(
    pool: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def ways() -> dict[tuple[str, str], dict[str, Any]]:
        nodes = status_of(pool, monkeypatch, capsys)["nodes"]
        return {(node["node_id"], way["node_id"]): way for node in nodes for way in node["peers"]}

    pairs = {(one, other) for one in NODES for other in NODES - {one}}
    wait_until(
        lambda: {pair for pair, way in ways().items() if way["tries"]} == pairs, "all pairs are measured"
    )
    for pair, way in ways().items():
        assert 0 < way["least_ms"] <= way["median_ms"] < 2000, pair
        assert way["failures"] == 0
    token = tmp_path / "tenant.token"
    token.write_text(tenant_token(load_cluster_token(pool.state_dir / "cluster.token"), "alice").text)
    token.chmod(0o600)
    seen = status_of(pool, monkeypatch, capsys, "--token-file", str(token))
    assert {node["node_id"]: node["peers"] for node in seen["nodes"]} == {name: [] for name in NODES}


async def test_the_matrix(
    page: BrowserPage, pool: EmbeddedCluster, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with scene(pool, tmp_path / "state", http) as it:
        await enter(page, it.gateway.url, it.gateway.token.text)
        await page.until("!document.querySelector('#nav').hidden")
        await page.press("9")
        cells = "[...document.querySelectorAll('.matrix tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
        await page.until(f"{cells}.flat().filter((t) => /\\d (µs|ms)$/.test(t)).length === 6")
        rows = await page.value(cells)
        assert {row[0] for row in rows} == NODES
        assert [row[at + 1] for at, row in enumerate(rows)] == ["·"] * 3
        assert await page.value("document.querySelectorAll('.matrix th[scope=row]').length") == 3
        await page.press("/")
        await page.type("node-2")
        await page.until(f"{cells}.length === 1")
        assert await page.value("document.querySelectorAll('.listing tbody tr:not(.gap)').length") == 4
        await page.value(
            "(() => { const f = document.activeElement; f.value = ''; f.dispatchEvent(new Event('input')); })()"
        )
        await page.until(f"{cells}.length === 3")
        await page.press("Escape")
        for theme in ("light", "dark"):
            await page.press("t")
            assert await page.value("document.documentElement.dataset.theme") == theme
            await page.picture(tmp_path / f"console-network-{theme}.png")
        assert not page.complaints
