"""A whole cluster with two small engines, and the unmodified `openai` client in front of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from mooncache.auth import load_cluster_token, tenant_token
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.settings import missing_modules
from tests.groups import stop_after


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """One prefill and one decode engine."""
    if missing := missing_modules("hf"):
        pytest.skip(f"the small engine needs {', '.join(missing)}: pip install 'mooncache[hf]'")
    started = EmbeddedCluster(
        ClusterSettings(
            state_dir=tmp_path_factory.mktemp("openai"),
            engine="hf",
            capacity_bytes=256 << 20,
            port=0,
            conductor_port=0,
            gateway_port=0,
            extra_env=(
                ("OMP_NUM_THREADS", "1"),
                # Longer prompts are handed over, and what was handed over is loaded, however slow that is.
                ("MOONCACHE_CONDUCTOR_INLINE_TOKENS_MAX", "512"),
                ("MOONCACHE_CONNECTOR_BREAK_EVEN", "false"),
            ),
        )
    )
    stop_after("openai_client", started.stop)
    started.start(240)
    yield started
    started.stop()


@pytest.fixture(scope="session")
def model(cluster: EmbeddedCluster) -> str:
    return str(cluster.describe_instances()[0]["model"])


@pytest.fixture(scope="session")
def base_url(cluster: EmbeddedCluster) -> str:
    return f"{cluster.layout.gateway_url}/v1"


@pytest.fixture(scope="session")
def key(cluster: EmbeddedCluster) -> str:
    token = load_cluster_token(cluster.state_dir / "cluster.token")
    return tenant_token(token, "tests").text


@pytest.fixture
def client(base_url: str, key: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=100) as made:
        yield made
