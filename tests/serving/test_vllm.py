"""Real vLLM behind the gateway: prefill and decode apart, blocks through the pool, the same tokens as one engine.

Equal tokens alone prove nothing (a connector that caches nothing passes too), so every test also asserts hits.
"""

import asyncio
import json
import random
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

import openai
import pytest

from mooncache.auth import load_cluster_token, tenant_token
from mooncache.client.conductor_link import ConductorLink
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.config import load
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import until
from tests.serving.conftest import MAX_TOKENS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
BLOCK = 32


def api_key(cluster: EmbeddedCluster, tenant: str) -> str:
    return tenant_token(load_cluster_token(cluster.token_path), tenant).text


def client_of(cluster: EmbeddedCluster, tenant: str = "demo", *, key: str = "") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{cluster.layout.gateway_url}/v1",
        api_key=key or api_key(cluster, tenant),
        max_retries=0,
        timeout=300,
    )


def planned(headers: object) -> dict[str, str]:
    """The conductor's plan as an operator is told."""
    text = headers.get("x-mooncache-plan", "")  # type: ignore[attr-defined]
    return dict(part.split("=", 1) for part in text.split(";") if "=" in part)


def gateway_metrics(cluster: EmbeddedCluster) -> str:
    with urllib.request.urlopen(f"{cluster.layout.gateway_url}/metrics", timeout=10) as response:
        return str(response.read().decode())


def some_prompts(count: int) -> list[list[int]]:
    """Prompts of 100 to 4,096 tokens that share nothing, and others for each count."""
    rng = random.Random(count)
    lengths = [100, 128, 1024, 4096, *(rng.randrange(100, 4097) for _ in range(count - 4))]
    return [[rng.randrange(10, 8000) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("count", [12, pytest.param(50, marks=pytest.mark.deep)])
async def test_prefill_and_decode_apart_give_the_tokens_of_one_engine(
    vllm_cluster: EmbeddedCluster,
    plain_tokens: Callable[[list[list[int]]], list[list[int]]],
    count: int,
) -> None:
    prompts = some_prompts(count)
    expected = await asyncio.to_thread(plain_tokens, prompts)
    gate = asyncio.Semaphore(2)

    async def ask(client: openai.AsyncOpenAI, ids: list[int]) -> tuple[list[int], dict[str, str]]:
        async with gate:
            raw = await client.completions.with_raw_response.create(
                model="tiny",
                prompt=ids,
                max_tokens=MAX_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
        answer = raw.parse()
        return answer.choices[0].token_ids, planned(raw.headers)  # type: ignore[attr-defined]

    before = await asyncio.to_thread(external_hits, vllm_cluster, "decode-1")
    operator = load_cluster_token(vllm_cluster.token_path).text  # who is told the plan
    async with client_of(vllm_cluster, key=operator) as client:
        answers = await asyncio.gather(*(ask(client, ids) for ids in prompts))
    assert [tokens for tokens, _ in answers] == expected
    assert {chosen.get("prefill") for _, chosen in answers} == {"prefill-1"}
    hits = await asyncio.to_thread(external_hits, vllm_cluster, "decode-1") - before
    # A stream leaves the last token of a prompt to be computed: where that ends a block, the block with it.
    least = sum((len(ids) - 1) // BLOCK * BLOCK for ids in prompts)
    assert least <= hits <= sum(len(ids) // BLOCK * BLOCK for ids in prompts), (
        "decode computed what prefill had"
    )
    assert "waits_cut_total{" not in await asyncio.to_thread(gateway_metrics, vllm_cluster), "all was stored"


def external_hits(cluster: EmbeddedCluster, instance: str) -> int:
    """Tokens that an engine took from the pool, by its own count."""
    return int(metric(cluster, instance, "vllm:external_prefix_cache_hits_total"))


def metric(cluster: EmbeddedCluster, instance: str, name: str) -> float:
    from mooncache.auth import engine_key

    url = engine_url(cluster, instance)
    request = urllib.request.Request(
        f"{url}/metrics",
        headers={"Authorization": f"Bearer {engine_key(load_cluster_token(cluster.token_path))}"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        text = answer.read().decode()
    values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.MULTILINE)
    assert values, f"{instance} has no metric {name}"
    return sum(float(value) for value in values)


def engine_url(cluster: EmbeddedCluster, instance: str) -> str:
    return next(found["url"] for found in cluster.describe_instances() if found["instance_id"] == instance)


async def test_conversation_of_eight_turns_reuses_all_earlier_blocks(vllm_cluster: EmbeddedCluster) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": "You are terse. " * 40}]
    earlier_tokens = 0
    async with client_of(vllm_cluster, "talker") as client:
        for turn in range(8):
            messages.append({"role": "user", "content": f"turn {turn}: " + f"what about item {turn}? " * 20})
            answer = await client.chat.completions.create(
                model="tiny",
                messages=messages,  # type: ignore[arg-type]
                max_tokens=40,
                temperature=0,
            )
            assert answer.usage is not None
            if turn:
                reported = f"turn {turn}: {cached_tokens(answer.usage)} of {earlier_tokens}"
                assert cached_tokens(answer.usage) >= earlier_tokens // BLOCK * BLOCK, reported
            # The answer's text is tokenised anew in the next turn; what is certain to come back is its prompt,
            # without the last words of the template, which open the answer.
            earlier_tokens = answer.usage.prompt_tokens - 4
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})


def cached_tokens(usage: Any) -> int:
    details = usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details is not None else 0


async def test_tenants_never_share(vllm_cluster: EmbeddedCluster) -> None:
    prompt = "a text that two tenants happen to send " * 40

    async def cached(tenant: str) -> int:
        async with client_of(vllm_cluster, tenant) as client:
            answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=2, temperature=0)
        return cached_tokens(answer.usage)

    assert await cached("alpha") == 0
    assert await cached("alpha") > 0
    assert await cached("beta") == 0


async def test_streaming_equals_not_streaming(vllm_cluster: EmbeddedCluster) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "count " * 100}],
        "max_tokens": 24,
        "temperature": 0,
    }
    parts, usage = [], None
    async with client_of(vllm_cluster) as client:
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            parts += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(parts) == whole.choices[0].message.content
    assert cached_tokens(usage) > 0, "the second request finds the first one's blocks"


async def test_why_sees_a_streamed_decode_leg(vllm_cluster: EmbeddedCluster) -> None:
    """vLLM leaves the cache report out of a stream; the engine's worker brings it to the conductor."""
    name, operator = "why-stream-1", load_cluster_token(vllm_cluster.token_path).text
    async with client_of(vllm_cluster, key=operator) as client:
        stream = await client.completions.create(
            model="tiny",
            prompt="tell me slowly " * 60,
            max_tokens=8,
            stream=True,
            extra_headers={"X-Request-Id": name},
        )
        async for _ in stream:
            pass
    link = ConductorLink(vllm_cluster.layout.conductor_target, operator, load(env={}))
    decode: list[dict[str, Any]] = []

    async def reported() -> bool:
        answer = await link.call("GetDecision", pb.GetDecisionRequest(id=name), pb.GetDecisionResponse, 10)
        record = json.loads(answer.record_json)
        decode[:] = [leg for event in record["events"] for leg in event["legs"] if leg["leg"] == "decode"]
        parts = {span["part"] for span in record["spans"] if span["leg"] == "decode"}
        return "load" in parts and "unknown" not in parts

    try:
        await until(reported, lambda: f"the decode leg's cache: {decode}", every_s=0.1)
    finally:
        await link.close()
    assert decode[-1]["cache"]["loaded_tokens"] > 0


def test_why_tells_what_happened(vllm_cluster: EmbeddedCluster) -> None:
    body = json.dumps({"model": "tiny", "prompt": "tell me why " * 60, "max_tokens": 4}).encode()
    request = urllib.request.Request(
        f"{vllm_cluster.layout.gateway_url}/v1/completions",
        data=body,
        headers={
            "Authorization": f"Bearer {api_key(vllm_cluster, 'demo')}",
            "Content-Type": "application/json",
            "X-Request-Id": "why-test-1",
        },
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.headers["X-Request-Id"] == "why-test-1"
    command = [sys.executable, "-m", "mooncache.cli", "why", "why-test-1"]
    env = {
        "PATH": "/usr/bin:/bin",
        "MOONCACHE_CLUSTER_STATE_DIR": str(vllm_cluster.state_dir),
        "MOONCACHE_CLUSTER_CONDUCTOR_TARGET": vllm_cluster.layout.conductor_target,
    }
    shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "prefill-1" in shown and "decode-1" in shown
