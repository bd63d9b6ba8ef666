"""`lmcache server` over a real node, under real vLLM with LMCache's own connector: a fresh engine with a fresh server
loads from the pool what another pair computed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mooncache
from mooncache.cluster.embedded import EmbeddedCluster
from tests.conditions import wait_until
from tests.lmcache.package import need_lmcache
from tests.ports import own_port

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
need_lmcache()
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

CHUNK_TOKENS = 128
LENGTH_TOKENS = 700
START_S = 400.0
ENGINE_S = 900
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "LMCACHE_TRACK_USAGE": "false",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def lmcache_server(model: Path, cluster: EmbeddedCluster, folder: Path) -> Iterator[int]:
    """Its port."""
    port, http_port = own_port(), own_port()
    adapter = {
        "type": "plugin",
        "module_path": "mooncache.connectors.lmcache",
        "class_name": "MooncacheL2Adapter",
        "adapter_params": {
            "mooncache.state_dir": str(cluster.state_dir),
            "mooncache.models": {str(model): str(model)},
        },
    }
    arguments = {
        "host": "127.0.0.1",
        "port": port,
        "http-host": "127.0.0.1",
        "http-port": http_port,
        "supported-transfer-mode": "engine_driven",
        "l1-size-gb": 1,
        "l1-init-size-gb": 1,
        "eviction-policy": "LRU",
        "chunk-size": CHUNK_TOKENS,
        "l2-adapter": json.dumps(adapter),
    }
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--disable-observability"]
    command += [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    with (folder / f"server-{port}.log").open("w") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            wait_until(
                lambda: process.poll() is not None or answers(http_port), "the server answers", START_S
            )
            assert process.poll() is None, (folder / f"server-{port}.log").read_text()[-4000:]
            yield port
        finally:
            process.terminate()
            process.wait(START_S)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthcheck", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def ask(model: Path, port: int, folder: Path, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Answers of a new engine."""
    asked, answered = folder / f"asked-{port}.json", folder / f"answered-{port}.json"
    asked.write_text(json.dumps({"model": str(model), "port": port, "prompts": prompts}))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("one_engine.py")), str(asked), str(answered)],
        env={**os.environ, **ENVIRONMENT},
        check=False,
        capture_output=True,
        text=True,
        timeout=ENGINE_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(answered.read_text())
    return found


def test_a_fresh_engine_with_a_fresh_server_loads_from_the_pool(
    model_dir: Path, cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    chooser = random.Random(1)
    prompt = [chooser.randrange(10, 8000) for _ in range(LENGTH_TOKENS)]
    with lmcache_server(model_dir, cluster, tmp_path) as port:
        (computed,) = ask(model_dir, port, tmp_path, [prompt])
        with mooncache.connect(**cluster.client_settings()) as client:
            chunks = LENGTH_TOKENS // CHUNK_TOKENS
            wait_until(lambda: len(list(client.list())) >= chunks, "all chunks are in the pool")
    assert computed["cached"] == 0
    other = [chooser.randrange(10, 8000) for _ in range(LENGTH_TOKENS)]
    with lmcache_server(model_dir, cluster, tmp_path) as port:
        loaded, unknown = ask(model_dir, port, tmp_path, [prompt, other])
    assert loaded["cached"] == LENGTH_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
    assert loaded["tokens"] == computed["tokens"]
    assert unknown["cached"] == 0
