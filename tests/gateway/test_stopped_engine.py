"""A real engine that is stopped with requests on it: they are served by the other one while it stays stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from mooncache.bench.serving.talk import ask
from mooncache.bench.serving.turns import demo_key
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.settings import ClusterSettings, missing_modules
from tests.processes import freeze


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    """Two engines that do everything; nobody kills one that hangs."""
    if missing := missing_modules("hf"):
        pytest.skip(f"the small engine needs {', '.join(missing)}: pip install 'mooncache[hf]'")
    settings = ClusterSettings(
        state_dir=tmp_path,
        engine="hf",
        model_name="m",
        prefill=0,
        decode=2,
        capacity_bytes=256 << 20,
        port=0,
        conductor_port=0,
        gateway_port=0,
        extra_env=(
            ("OMP_NUM_THREADS", "1"),
            ("MOONCACHE_WORKER_HANG_TIMEOUT_S", "3600"),
            ("MOONCACHE_CONDUCTOR_ADMISSION_ENABLED", "false"),
        ),
    )
    started = EmbeddedCluster(settings)
    started.start(240)
    yield started
    started.stop()


@pytest.mark.timeout(400)
def test_requests_on_a_stopped_engine_are_served_by_another(cluster: EmbeddedCluster) -> None:
    key, pids = demo_key(cluster), [row["engine_pid"] for row in cluster.describe_instances()]

    async def at_once(text: str) -> list[str]:
        async with aiohttp.ClientSession() as session:
            bodies = [
                {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": f"{text} {n}"}]}
                for n in range(6)
            ]
            calls = [ask(session, cluster.layout.gateway_url, key, body, 100) for body in bodies]
            return [answer.error for answer in await asyncio.gather(*calls)]

    assert asyncio.run(at_once("all well")) == [""] * 6
    freeze(pids[0])
    try:
        assert asyncio.run(at_once("one stopped")) == [""] * 6
    finally:
        os.kill(pids[0], signal.SIGCONT)
