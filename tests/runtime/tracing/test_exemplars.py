"""Latencies name the trace of one request, in OpenMetrics, and only where that trace is recorded."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from mooncache.config import Config, load
from mooncache.proto.v1 import master_pb2 as pb
from mooncache.runtime import tracing
from mooncache.runtime.metrics import OPENMETRICS, TEXT, content_type
from tests.conditions import wait_until
from tests.ports import own_port
from tests.runtime.service.support import TestService, channel
from tests.runtime.tracing.collector import Collector

# What Prometheus 2.42 and 3.0 send.
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
BUCKET = "mooncache_test_rpc_duration_seconds_bucket"


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (PROMETHEUS_2, OPENMETRICS),
        (PROMETHEUS_3, OPENMETRICS),
        ("application/openmetrics-text", OPENMETRICS),
        ("Application/OpenMetrics-Text; Version=1.0.0; q=0.2", OPENMETRICS),
        ("application/openmetrics-text;q=0.1, text/plain;q=0.9", TEXT),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;version=2.0.0", TEXT),
        ("application/openmetrics-text;version=x.y", TEXT),
        ("application/openmetrics-text;q=much", TEXT),
        ("application/openmetrics-text;q=nan", TEXT),
        ("text/plain;version=0.0.4", TEXT),
        ("*/*", TEXT),
        ("", TEXT),
        (";=;,,;q", TEXT),
        (f"{'x' * 5000},application/openmetrics-text", TEXT),
    ],
)
def test_the_format_is_what_the_reader_accepts(accept: str, chosen: str) -> None:
    assert content_type(accept) == chosen


async def page(service: TestService, accept: str) -> tuple[str, str]:
    """Content type and body of /metrics over a real connection."""
    host, port = service.metrics_address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n\r\n".encode())
    head, _, body = (await asyncio.wait_for(reader.read(), 60)).decode().partition("\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    lines = head.split("\r\n")
    assert lines[0] == "HTTP/1.1 200 OK"
    (kind,) = (line.partition(": ")[2] for line in lines if line.startswith("Content-Type: "))
    return kind, body


def exemplars(text: str) -> list[dict[str, str]]:
    """Exemplars of the buckets of control calls, by a strict parser."""
    return [
        dict(sample.exemplar.labels)
        for family in openmetrics.text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == BUCKET and sample.exemplar
    ]


async def call(service: TestService, headers: dict[str, str] | None) -> str:
    """One control call, within a trace unless `headers` are None; its trace id."""
    link = channel(service)
    try:
        if headers is None:
            await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 5.0)
            return ""
        with tracing.span("gateway.request", headers, kind="server") as span:
            await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 5.0)
        return span.context.trace_id
    finally:
        await link.close()


async def test_a_recorded_call_is_an_exemplar_in_openmetrics_alone(traced: Config) -> None:
    service = TestService(traced)
    await service.start()
    tracing.setup("test", traced)
    try:
        trace_id = await call(service, {})
        kind, text = await page(service, PROMETHEUS_2)
        assert kind == OPENMETRICS
        assert text.endswith("# EOF\n")
        assert exemplars(text) == [{"trace_id": trace_id}]
        kind, text = await page(service, "text/plain")
        assert kind == TEXT
        assert trace_id not in text
        assert {family.name for family in text_string_to_metric_families(text)} >= {
            "mooncache_test_rpc_duration_seconds"
        }
    finally:
        await service.stop()


async def test_what_nobody_can_open_is_no_exemplar(
    tmp_path: Path, config: Config, collector: Collector
) -> None:
    """A call outside of a trace, one whose trace is not recorded here, and one that was not sampled."""
    service = TestService(config)
    await service.start()
    try:
        await call(service, {})  # no endpoint is configured
        traced = load(
            env={}, overrides={"cluster.state_dir": tmp_path, "tracing.endpoint": collector.endpoint}
        )
        tracing.setup("test", traced)
        await call(service, None)
        unsampled = f"00-{'ab' * 16}-{'cd' * 8}-00"
        assert await call(service, {"traceparent": unsampled}) == "ab" * 16
        _, text = await page(service, PROMETHEUS_2)
        assert exemplars(text) == []
        sampled = f"00-{'ab' * 16}-{'cd' * 8}-01"
        await call(service, {"traceparent": sampled})
        _, text = await page(service, PROMETHEUS_2)
        assert exemplars(text) == [{"trace_id": "ab" * 16}]
    finally:
        await service.stop()


@dataclass
class Prometheus:
    """A real one with the features of the Compose file; `start` lets it scrape one place every second."""

    program: str
    folder: Path
    features: list[str]
    address: str

    @property
    def log(self) -> Path:
        return self.folder / "prometheus.log"

    def start(self, target: str) -> subprocess.Popen[bytes]:
        jobs = [{"job_name": "test", "static_configs": [{"targets": [target]}]}]
        config = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
        path = self.folder / "prometheus.yml"
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        words = (
            f"--config.file={path}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address={self.address}",
        )
        with self.log.open("wb") as log:
            return subprocess.Popen([self.program, *words, *self.features], stdout=log, stderr=log)


@pytest.fixture
def prometheus(tmp_path: Path) -> Prometheus:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the Compose file")
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("Prometheus is not installed (Debian package prometheus)")
    compose = Path(__file__).resolve().parents[3] / "deploy" / "docker-compose.yml"
    options = yaml.safe_load(compose.read_text(encoding="utf-8"))["services"]["prometheus"]["command"]
    features = [option for option in options if option.startswith("--enable-feature=")]
    return Prometheus(program, tmp_path, features, f"127.0.0.1:{own_port()}")


async def test_a_real_prometheus_keeps_them(traced: Config, prometheus: Prometheus) -> None:
    service = TestService(traced)
    await service.start()
    tracing.setup("test", traced)
    process = prometheus.start(service.metrics_address)
    try:
        trace_id = await call(service, {})
        query = urllib.parse.urlencode({"query": BUCKET, "start": "0", "end": "4102444800"})

        def kept() -> Any:
            assert process.poll() is None, prometheus.log.read_text()
            try:
                url = f"http://{prometheus.address}/api/v1/query_exemplars?{query}"
                with urllib.request.urlopen(url, timeout=10) as response:
                    found = json.load(response)["data"]
            except OSError:
                return None
            return [one["labels"]["trace_id"] for series in found for one in series["exemplars"]]

        found = await asyncio.to_thread(wait_until, kept, prometheus.log.read_text, every_s=0.5)
        assert set(found) == {trace_id}
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 60)
        await service.stop()
