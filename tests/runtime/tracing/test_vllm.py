"""vLLM joins a request's trace: its own spans, and the connector's saves and loads beside them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.settings import missing_modules
from tests.runtime.tracing.collector import Collector, Seen
from tests.runtime.tracing.test_request import PARENT_ID, ask

pytestmark = [pytest.mark.vllm, pytest.mark.deep, pytest.mark.timeout(600)]

TRACE_ID = "5bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def cluster(collector: Collector, tmp_path: Path) -> Iterator[EmbeddedCluster]:
    if missing := missing_modules("vllm"):
        pytest.skip(f"vLLM is not installed ({', '.join(missing)}): scripts/install_vllm.sh")
    from mooncache import tiny_model

    model = tiny_model.build(Path(tempfile.gettempdir()) / "mooncache-test-models" / "serving")
    settings = ClusterSettings(
        state_dir=tmp_path,
        engine="vllm",
        model=str(model),
        prefill=0,
        decode=1,
        capacity_bytes=256 << 20,
        port=0,
        conductor_port=0,
        gateway_port=0,
        extra_env=(
            ("OMP_NUM_THREADS", "1"),
            ("VLLM_CPU_KVCACHE_SPACE", "1"),
            ("MOONCACHE_VLLM_ENFORCE_EAGER", "true"),
            ("MOONCACHE_TRACING_ENDPOINT", collector.endpoint),
            ("MOONCACHE_CONDUCTOR_ADMISSION_ENABLED", "false"),
        ),
    )
    made = EmbeddedCluster(settings)
    made.start(400)
    yield made
    made.stop()


def test_vllm_and_its_connector_are_in_the_trace(cluster: EmbeddedCluster, collector: Collector) -> None:
    text = "A request that a real engine answers, and that the pool keeps. " * 30
    ask(cluster, text, "tracing-test-vllm", {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"})

    def whole(spans: list[Seen]) -> bool:
        names = {span.name for span in spans if span.trace_id == TRACE_ID}
        return {"gateway.request", "gateway.decode", "kvcache.save", "llm_request"} <= names

    spans = {span.name: span for span in collector.wait_for(whole, 60) if span.trace_id == TRACE_ID}
    decode = spans["gateway.decode"]
    assert spans["llm_request"].parent_id == decode.span_id
    assert spans["kvcache.save"].parent_id == decode.span_id
    assert spans["kvcache.save"].service == "mooncache-engine"
    assert spans["kvcache.save"].attributes["kvcache.bytes"] > 0
