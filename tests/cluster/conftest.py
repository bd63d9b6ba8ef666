"""A whole cluster on this machine with two small engines, one for each module: gateway, conductor, workers, pool."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.processes import processes_of_run
from mooncache.cluster.settings import missing_modules

INLINE_TOKENS_MAX = 512


def serving_settings(folder: Path, **changes: Any) -> ClusterSettings:
    """Settings of a cluster with hf engines on ports of its own."""
    if missing := missing_modules("hf"):
        pytest.skip(f"the small engine needs {', '.join(missing)}: pip install 'mooncache[hf]'")
    base: dict[str, Any] = {
        "engine": "hf",
        "capacity_bytes": 256 << 20,
        "port": 0,
        "conductor_port": 0,
        "gateway_port": 0,
        # A busy machine may load slower than so small a model computes; hits are what is tested here.
        # Two idle engines: by price the decode engine would compute most prompts itself, and nothing be handed over.
        "extra_env": (
            ("OMP_NUM_THREADS", "1"),
            ("MOONCACHE_CONNECTOR_BREAK_EVEN", "false"),
            ("MOONCACHE_CONDUCTOR_INLINE_TOKENS_MAX", str(INLINE_TOKENS_MAX)),
        ),
    }
    return ClusterSettings(state_dir=folder, **{**base, **changes})


def ask(cluster: EmbeddedCluster, text: str, **fields: Any) -> dict[str, Any]:
    """One chat completion through the gateway, as the demo tenant."""
    instances = cluster.describe_instances()
    body = {
        "model": instances[0]["model"],
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "temperature": 0,
        **fields,
    }
    request = urllib.request.Request(
        f"{cluster.layout.gateway_url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {cluster.demo_key_path.read_text().strip()}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.load(response))


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """One prefill and one decode engine that no test of the module may break for good."""
    cluster = EmbeddedCluster(serving_settings(tmp_path_factory.mktemp("serving")))
    cluster.start(180)
    yield cluster
    killed = cluster.stop()
    assert not killed, f"did not end by themselves: {killed}"
    assert not processes_of_run(cluster.run_id)
