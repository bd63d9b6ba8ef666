"""What a worker reads of an SGLang server, from SGLang's own objects: arguments, metrics, events, HTTP application."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from mooncache.config import load
from mooncache.worker.adapters.sglang import SglangAdapter
from mooncache.worker.core import kv_events
from mooncache.worker.core.endpoints import subscriber
from mooncache.worker.core.load import LoadMeter, read_page
from mooncache.worker.engine_http import EngineHttp
from tests.conditions import wait_until
from tests.sglang.handover import free_port
from tests.sglang.package import need_sglang
from tests.worker.test_engine_guard import launch

need_sglang()

KEY = "the-engine-key"


def test_sglangs_own_reader_takes_the_arguments(model_dir: Path, tmp_path: Path) -> None:
    import argparse

    from sglang.srt.server_args import ServerArgs

    overrides = {"sglang.max_model_len": 512, "sglang.max_num_seqs": 4, "sglang.hicache": True}
    arguments = SglangAdapter(load(env={}, overrides=overrides)).command(launch(tmp_path)).arguments
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parser.add_argument("--passport-path")
    found = parser.parse_args(list(arguments[3:]))
    assert (found.page_size, found.context_length, found.max_running_requests) == (64, 512, 4)
    assert found.enable_metrics
    assert found.enable_cache_report
    assert json.loads(found.hicache_storage_backend_extra_config)["interface_v1"] == 1


def test_load_from_sglangs_own_metrics() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.sglang.metrics_page"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    meter = LoadMeter(SglangAdapter.metrics)
    load_now = meter.take(read_page(done.stdout, meter.names.wanted()), 0.0)
    assert (load_now.running, load_now.waiting, load_now.kv_usage) == (3, 2, 0.25)
    assert (load_now.prompt_tokens_total, load_now.local_hit_tokens_total) == (40, 60)
    assert load_now.output_tokens_total == 9
    assert {"sglang:time_to_first_token_seconds", "sglang:inter_token_latency_seconds"} <= {
        line.split()[2] for line in done.stdout.splitlines() if line.startswith("# HELP")
    }


def test_events_of_sglangs_own_publisher(tmp_path: Path) -> None:
    from sglang.srt.disaggregation.kv_events import BlockStored, EventPublisherFactory, KVEventBatch

    endpoint = f"ipc://{tmp_path}/e.ipc"
    config = json.dumps(
        {"publisher": "zmq", "endpoint": endpoint, "replay_endpoint": f"ipc://{tmp_path}/r.ipc"}
    )
    publisher = EventPublisherFactory.create(config, 0)
    bind, address = subscriber(endpoint, "127.0.0.1")
    assert (bind, address) == (False, endpoint)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe("")
        socket.connect(address)
        event = BlockStored(
            block_hashes=[-5],
            parent_block_hash=None,
            token_ids=[1, 2, 3, 4],
            block_size=4,
            lora_id=None,
            medium="GPU",
            cache_salt="salt",
        )

        def published() -> list[bytes] | None:
            publisher.publish(KVEventBatch(ts=1.0, events=[event]))
            return socket.recv_multipart() if socket.poll(100) else None

        frames = wait_until(published, "an event")
    assert frames is not None
    publisher.shutdown()
    events, invalid = kv_events.decode(frames[-1])
    assert invalid == 0
    assert events == [
        kv_events.Stored((-5,), None, [1, 2, 3, 4], 4, (("salt",),), lora=False, own=True),
    ]


@pytest.fixture
def server() -> Iterator[str]:
    """SGLang's own HTTP application with its key, over a manager of tokens that has only what these routes read."""
    import uvicorn

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.entrypoints import http_server
        from sglang.srt.managers.tokenizer_manager import ServerStatus
        from sglang.srt.runtime_context import get_context
        from sglang.srt.utils.auth import add_api_key_middleware

    port = free_port()
    manager = SimpleNamespace(
        gracefully_exit=False,
        server_status=ServerStatus.Up,
        served_model_name="tiny",
        model_config=SimpleNamespace(context_len=512),
    )
    before = http_server._global_state
    http_server._global_state = SimpleNamespace(tokenizer_manager=manager)
    app: Any = http_server.app
    add_api_key_middleware(app, api_key=KEY, admin_api_key=None)
    with get_context().override_server_args():
        running = uvicorn.Server(uvicorn.Config(app, port=port, lifespan="off", log_level="error"))
        thread = threading.Thread(target=running.run)
        thread.start()
        wait_until(lambda: running.started, "the server listens")
        yield f"http://127.0.0.1:{port}"
        running.should_exit = True
        thread.join()
    http_server._global_state = before


@pytest.mark.filterwarnings("ignore")  # FastAPI's, of what SGLang uses of it
def test_health_and_models_of_sglangs_own_server(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "false")

    async def ask() -> tuple[str, Any, Any]:
        http, stranger = EngineHttp(KEY, None, ""), EngineHttp("wrong", None, "")
        try:
            return (
                await http.healthy(server, 20),
                await http.json(server, "/v1/models", 20),
                await stranger.json(server, "/v1/models", 20),
            )
        finally:
            await http.close()
            await stranger.close()

    health, models, refused = asyncio.run(ask())
    assert health == ""
    assert refused is None
    facts = SglangAdapter(load(env={}, overrides={})).facts(models, None, "")
    assert facts.max_model_tokens == 512
