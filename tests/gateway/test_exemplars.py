"""A client's request is the exemplar of its latencies, on the gateway's own page and on its probe port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.openmetrics import parser as openmetrics

from mooncache.config import load
from mooncache.runtime import tracing
from tests.conditions import until
from tests.gateway.stand_in import MODEL, Bench, FakeEngine, running
from tests.runtime.tracing.collector import Collector

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
ACCEPT = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
LATENCIES = {
    "ttft_seconds",
    "tbt_seconds",
    "request_duration_seconds",
    "overhead_seconds",
    "schedule_seconds",
}


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[None]:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    collector = Collector()
    collector.start()
    overrides = {"cluster.state_dir": tmp_path, "tracing.endpoint": collector.endpoint}
    tracing.setup("gateway", load(env={}, overrides=overrides))
    yield
    tracing.shutdown()
    collector.stop()


async def traced_latencies(url: str, http: aiohttp.ClientSession, headers: dict[str, str]) -> set[str]:
    """Histograms of a page that have TRACE as exemplar."""
    async with http.get(url, headers=headers | ACCEPT) as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("application/openmetrics-text")
        text = await response.text()
    return {
        family.name.removeprefix("mooncache_gateway_")
        for family in openmetrics.text_string_to_metric_families(text)
        for sample in family.samples
        if sample.exemplar and sample.exemplar.labels == {"trace_id": TRACE}
    }


async def ask(bench: Bench, http: aiohttp.ClientSession, flags: str) -> None:
    headers = bench.auth() | {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-{flags}"}
    async with http.post(bench.url + "/v1/chat/completions", json=BODY, headers=headers) as response:
        assert response.status == 200
        await response.read()


@pytest.mark.usefixtures("recording")
async def test_a_sampled_request_is_found_from_its_latencies(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        own, probe = f"{bench.url}/metrics", f"http://{bench.gateway.metrics_address}/metrics"
        await ask(bench, http, "00")
        assert await traced_latencies(own, http, bench.auth()) == set(), "it is not sampled"
        await ask(bench, http, "01")

        async def counted() -> bool:
            return await traced_latencies(own, http, bench.auth()) >= LATENCIES

        await until(counted)
        assert await traced_latencies(probe, http, {}) >= LATENCIES
        async with http.get(probe) as response:
            assert response.headers["content-type"].startswith("text/plain")
            assert TRACE not in await response.text()
