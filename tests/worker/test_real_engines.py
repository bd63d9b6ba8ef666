"""A worker with real engines: what it registers, what it reads, and that cache events give the gateway's keys."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mooncache import tiny_model
from mooncache.auth import engine_key
from mooncache.client.keys import split_keys
from mooncache.config import Config, load
from mooncache.gateway.core.queue_place import queue_place
from mooncache.kvcache.keys import passport_from_json, request_keys
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.worker.service import WorkerService
from tests.conditions import until
from tests.worker.support import Conductor, alive, conductor

START_S = 240.0
SLOTS = 4
NOT_HERE = {
    "vllm": importlib.util.find_spec("vllm") is None,
    "hf": importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None,
}


def settings(folder: Path, port: int, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "cluster.state_dir": folder,
        "cluster.conductor_target": f"127.0.0.1:{port}",
        "cluster.master_targets": "127.0.0.1:1",
        "worker.instance_id": "real-1",
        "worker.role": "prefill",
        "worker.drain_timeout_s": 20.0,
        "vllm.dtype": "float32",
        "vllm.enforce_eager": True,
        "vllm.max_model_len": 2048,
        "vllm.max_num_seqs": SLOTS,
        "vllm.block_tokens": 32,
        "hf.kv_cache_bytes": 64 << 20,
    }
    return load(
        env={}, overrides=values | {name.replace("__", "."): value for name, value in changes.items()}
    )


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@contextlib.asynccontextmanager
async def running(
    folder: Path, engine: str, **changes: Any
) -> AsyncIterator[tuple[WorkerService, Conductor]]:
    async with conductor(settings(folder, 1)) as found:
        service = WorkerService(settings(folder, found.port, worker__engine=engine, **changes))
        await service.start()
        try:
            await until(lambda: found.state() == pb.INSTANCE_STATE_READY, "ready", START_S)
            yield service, found
        finally:
            await service.stop()


async def complete(service: WorkerService, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {
        "model": service.state.model_name,
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {"Authorization": f"Bearer {engine_key(service.token)}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(service.state.url + "/v1/completions", json=body | more) as response,
    ):
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def check_load(service: WorkerService, found: Conductor, prompt_tokens: int) -> None:
    """The report tells what the engine did."""

    def reported() -> bool:
        load = found.reports[-1].load
        counted = load.prompt_tokens_total >= prompt_tokens and load.output_tokens_total >= 16
        return counted and (load.running, load.waiting) == (0, 0)

    await until(reported, "tokens were counted")
    load_now = found.reports[-1].load
    assert load_now.ttft_ms > 0
    assert load_now.tbt_ms > 0
    assert 0 <= load_now.kv_usage <= 1


async def check_order(service: WorkerService, found: Conductor) -> None:
    """Of requests that wait the one with the earlier place is computed first, though the other one came before it."""
    instance = found.instances["real-1"]
    assert instance.orders_by_priority
    ended: list[str] = []

    async def ask(name: str, place: int) -> None:
        await complete(service, list(range(30, 60)), priority=place)
        ended.append(name)

    async def seen(running: int, waiting: int) -> None:
        def shown() -> bool:
            return (found.reports[-1].load.running, found.reports[-1].load.waiting) == (running, waiting)

        await until(shown, f"{running} running and {waiting} waiting")

    most = min(1900, instance.kv_capacity_tokens // SLOTS - 64)
    holders = [
        asyncio.create_task(complete(service, [500 + number] * 16, max_tokens=most))
        for number in range(SLOTS)
    ]
    try:
        await seen(SLOTS, 0)
        late = asyncio.create_task(ask("offline", queue_place(1.8e9, offline=True)))
        await seen(SLOTS, 1)
        early = asyncio.create_task(ask("online", queue_place(1.8e9 + 1)))
        await seen(SLOTS, 2)
        holders[0].cancel()  # its client leaves: one place is free
        await asyncio.gather(late, early)
        assert ended == ["online", "offline"]
    finally:
        for holder in holders:
            holder.cancel()
        await asyncio.gather(*holders, return_exceptions=True)


def check_instance(service: WorkerService, found: Conductor, engine: str) -> pb.Instance:
    instance = found.instances["real-1"]
    assert instance.engine == engine
    assert instance.role == pb.INSTANCE_ROLE_PREFILL
    assert instance.engine_version
    assert instance.kv_bytes_per_token > 0
    assert instance.kv_capacity_tokens >= 2048
    assert instance.max_model_tokens >= 2048
    assert instance.max_sequences > 0
    assert instance.block_tokens == 32
    assert (Path(instance.tokenizer_path) / "tokenizer.json").exists()
    assert service.token.text not in str(instance)
    return instance


@pytest.mark.timeout(600)
@pytest.mark.skipif(NOT_HERE["hf"], reason="transformers and torch are not installed (extra hf)")
async def test_the_hf_engine_with_a_model_made_on_the_spot(tmp_path: Path) -> None:
    async with running(tmp_path, "hf", hf__batch_max=SLOTS) as (service, found):
        instance = check_instance(service, found, "hf")
        assert instance.model == tiny_model.FOLDER_NAME
        for seed in range(2):
            await complete(service, list(range(100 + seed, 300 + seed)))
        await check_load(service, found, 400)
        await check_order(service, found)
        process = service.state.process
        assert process is not None
        pid = process.pid
    assert not alive(pid)


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.skipif(NOT_HERE["vllm"], reason="vLLM is not installed (scripts/install_vllm.sh)")
async def test_vllm_tells_its_cache_in_the_keys_of_the_gateway(tmp_path: Path) -> None:
    tiny_model.build(tiny_model.default_folder(tmp_path))
    async with running(tmp_path, "vllm") as (service, found):
        instance = check_instance(service, found, "vllm")
        passport = passport_from_json(instance.passport_json)
        salted, plain = list(range(1000, 1330)), list(range(2000, 2200))
        await complete(service, salted, cache_salt="a-tenant", max_tokens=40)
        await complete(service, plain)
        wanted = {
            *split_keys(request_keys(passport, salted, salt="a-tenant")),
            *split_keys(request_keys(passport, plain)),
        }
        await until(lambda: wanted <= found.held["real-1"], "all complete blocks of both prompts")
        # Blocks that were filled while decoding are there too, and nothing else.
        assert len(found.held["real-1"]) == len(wanted) + 1
        again = await complete(service, salted, cache_salt="a-tenant")
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 320
        await check_load(service, found, 530)
        await until(lambda: found.reports[-1].load.local_hit_tokens_total == 320, "hits were counted")
        await check_order(service, found)
        process = service.state.process
        assert process is not None
        pid = process.pid
        command = command_line(pid)
        assert engine_key(service.token).encode() not in command
        assert service.token.text.encode() not in command
        keys = set(found.held["real-1"])
        os.kill(pid, signal.SIGKILL)
        await until(lambda: found.instances["real-1"].incarnation != instance.incarnation, "a new run")
        assert found.held["real-1"] == set()
        assert keys
    assert not alive(pid)
