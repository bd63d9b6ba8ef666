"""The engine behind HTTP: OpenAI's shapes, streams, errors by field, aborts, keys, the passport, a graceful end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncache.hf_engine.server import ServerState, deliver_to, make_app
from mooncache.hf_engine.service import Parts
from mooncache.hf_engine.tokens import ChatTokenizer
from mooncache.kvcache.keys import passport_from_json
from mooncache.kvcache.leg_hint import FIELD, CacheReport, LegHint, LegRole
from tests.conditions import wait_until
from tests.hf_engine.conftest import (
    API_KEY,
    BLOCK,
    MODEL,
    Lab,
    Server,
    end,
    prompt,
    start_cluster,
    start_server,
)

openai = pytest.importorskip("openai")
HEADERS = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}


def call(
    server: Server, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, Any]:
    """(status, decoded body, headers)."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, HEADERS if headers is None else headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text[:1] in b"{[" and text else text, answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), error.headers


def complete(server: Server, tokens: Any, **more: Any) -> Any:
    body = {"prompt": tokens, "temperature": 0, "max_tokens": 8, "return_token_ids": True, **more}
    status, answer, _ = call(server, "/v1/completions", body)
    assert status == 200, answer
    return answer


def metric(server: Server, name: str) -> float:
    _, text, _ = call(server, "/metrics")
    lines = [line for line in text.decode().splitlines() if line.startswith(f"mooncache_hf_{name}")]
    assert lines, f"no metric {name}"
    return float(lines[0].rsplit(" ", 1)[1])


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0, timeout=60) as made:
        yield made


def test_completion(server: Server) -> None:
    one = prompt(50, 1)
    answer = complete(server, one)
    (choice,) = answer["choices"]
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert len(choice["token_ids"]) == 8 and choice["prompt_token_ids"] == one
    assert choice["finish_reason"] == "length" and choice["text"]
    assert answer["usage"] == {
        "prompt_tokens": 50,
        "completion_tokens": 8,
        "total_tokens": 58,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    again = complete(server, one)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    assert again["choices"][0]["token_ids"] == choice["token_ids"]
    reported = CacheReport.from_params(again[FIELD])
    assert reported is not None and reported.local_tokens == 48


def test_many_prompts_and_choices(server: Server) -> None:
    prompts = [prompt(10, seed) for seed in range(3)]
    answer = complete(server, prompts, n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    ids = [choice["token_ids"] for choice in answer["choices"]]
    assert ids[0] == ids[1] and ids[2] == ids[3] and ids[0] != ids[2]
    assert [complete(server, one)["choices"][0]["token_ids"] for one in prompts] == ids[::2]
    assert answer["usage"]["prompt_tokens"] == 30 and answer["usage"]["completion_tokens"] == 48
    texts = complete(server, ["def main():", "import os"])
    assert len(texts["choices"]) == 2
    sampled = complete(server, prompts[0], n=3, temperature=1.0, seed=1)
    assert len({tuple(choice["token_ids"]) for choice in sampled["choices"]}) == 3


def test_stream_equals_whole(client: Any, server: Server) -> None:
    one = prompt(60, 2)
    whole = complete(server, one, max_tokens=40, logprobs=2)
    text, ids, finishes, usage = "", [], [], None
    for event in client.completions.create(
        model="tiny",
        prompt=one,
        max_tokens=40,
        temperature=0,
        logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    ):
        usage = event.usage or usage
        for choice in event.choices:
            text += choice.text
            ids += choice.token_ids
            finishes.append(choice.finish_reason)
            assert len(choice.logprobs.tokens) == len(choice.token_ids)
    assert text == whole["choices"][0]["text"] and ids == whole["choices"][0]["token_ids"]
    assert finishes == [None] * 39 + ["length"], "one event for each token, in order"
    assert usage is not None and usage.completion_tokens == 40


def test_chat(client: Any) -> None:
    messages: Any = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    made = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    (choice,) = made.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert len(choice.logprobs.content) == 6
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].logprob == entry.logprob <= 0
    plain = [messages[0], {"role": "user", "content": "Hello"}]
    same = client.chat.completions.create(model="tiny", messages=plain, max_tokens=6, temperature=0)
    assert same.choices[0].message.content == choice.message.content
    assert same.usage.prompt_tokens == made.usage.prompt_tokens
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with_tools = client.chat.completions.create(model="tiny", messages=plain, max_tokens=6, tools=tools)
    assert with_tools.usage.prompt_tokens > made.usage.prompt_tokens


def test_chat_stream(client: Any) -> None:
    body: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    whole = client.chat.completions.create(**body, temperature=0, n=2)
    texts = ["", ""]
    roles = []
    for event in client.chat.completions.create(**body, temperature=0, n=2, stream=True):
        assert event.object == "chat.completion.chunk" and event.usage is None
        for choice in event.choices:
            if choice.delta.role:
                roles.append(choice.index)
            texts[choice.index] += choice.delta.content
    assert sorted(roles) == [0, 1]
    assert texts == [choice.message.content for choice in whole.choices]


def test_stop_strings(server: Server) -> None:
    plain = complete(server, prompt(30, 3), max_tokens=30)
    text = plain["choices"][0]["text"]
    stop = text[10:14]
    cut = complete(server, prompt(30, 3), max_tokens=30, stop=[stop])["choices"][0]
    assert cut["text"] == text[: text.index(stop)]
    assert cut["finish_reason"] == "stop" and cut["stop_reason"] == stop
    wait_until(lambda: metric(server, "num_requests_running") == 0, "the rest is aborted")


def test_awaited_tokens_without_a_pool_do_not_wait(server: Server) -> None:
    ask = LegHint(role=LegRole.DECODE, wait_tokens=48, wait_ms=60_000)
    reported = CacheReport.from_params(complete(server, prompt(50, 4), **{FIELD: ask.to_params()})[FIELD])
    assert reported is not None and reported.outcome == "pool_absent"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        (b"\xff\xfe", 400, None),
        ({}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [[]]}, 400, "prompt"),
        ({"prompt": [1, "a"]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": [MODEL["vocab"]]}, 400, "prompt"),
        ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": "8"}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": 10**7}, 400, "max_tokens"),
        ({"prompt": [300] * MODEL["max_positions"]}, 400, "max_tokens"),
        ({"prompt": "x", "n": 0}, 400, "n"),
        ({"prompt": "x", "n": 10**9}, 400, "n"),
        ({"prompt": ["x"] * 20, "n": 20}, 400, "n"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
        ({"prompt": "x", "top_p": 0}, 400, "top_p"),
        ({"prompt": "x", "logprobs": 1000}, 400, "logprobs"),
        ({"prompt": "x", "stop": [""]}, 400, "stop"),
        ({"prompt": "x", "stop_token_ids": [10**9]}, 400, "stop_token_ids"),
        ({"prompt": "x", "echo": True}, 400, "echo"),
        ({"prompt": "x", "logit_bias": {"1": 5}}, 400, "logit_bias"),
        ({"prompt": "x", "presence_penalty": 1}, 400, "presence_penalty"),
        ({"prompt": "x", "response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"prompt": "x", "min_tokens": 9, "max_tokens": 8}, 400, "min_tokens"),
        ({"prompt": "x", "model": "nobody"}, 404, "model"),
    ],
)
def test_bad_completions(server: Server, body: Any, status: int, param: str | None) -> None:
    given, answer, _ = call(server, "/v1/completions", body)
    assert given == status, answer
    assert (
        answer["error"]["param"] == param and answer["error"]["code"] == status and answer["error"]["message"]
    )


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        [{"content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    ],
)
def test_bad_messages(server: Server, messages: Any) -> None:
    status, answer, _ = call(server, "/v1/chat/completions", {"messages": messages})
    assert status == 400 and answer["error"]["param"] == "messages"


def test_models_paths_and_keys(server: Server) -> None:
    _, listed, _ = call(server, "/v1/models")
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert listed["data"][0]["max_model_len"] == MODEL["max_positions"]
    assert call(server, "/v1/models/tiny")[1]["id"] == "tiny"
    assert call(server, "/v1/models/other")[0] == 404
    assert call(server, "/v1/nothing")[1]["error"]["code"] == 404
    for key in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": API_KEY}):
        status, answer, _ = call(server, "/v1/models", headers=key)
        assert status == 401 and answer["error"]["type"] == "AuthenticationError"
    for path in (
        "/health",
        "/metrics",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models/tiny",
        "/nothing",
    ):
        assert call(server, path, headers={})[0] == 401, path
    assert call(server, "/health")[0] == 200
    body = {"prompt": "x", "max_tokens": 1}
    _, answer, headers = call(server, "/v1/completions", body, {**HEADERS, "X-Request-Id": "req-1"})
    assert headers["X-Request-Id"] == "req-1" and answer["id"] == "cmpl-req-1"


def test_beyond_loopback_the_engine_does_not_start_without_a_key(model_folder: Path, tmp_path: Path) -> None:
    from mooncache.config import load
    from mooncache.hf_engine.service import EXIT_CONFIG, HfOptions, run

    config = load(env={}, overrides={"cluster.state_dir": tmp_path})
    assert run(config, HfOptions(model=str(model_folder), host="0.0.0.0")) == EXIT_CONFIG


def test_a_closed_stream_and_a_closed_wait_are_aborted(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for stream in (True, False):
        body = json.dumps({"prompt": prompt(20, 5), "max_tokens": 1900, "ignore_eos": True, "stream": stream})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n"
        with socket.create_connection((host, int(port)), timeout=30) as raw:
            raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            if stream:
                assert raw.recv(1000).startswith(b"HTTP/1.1 200")
            wait_until(lambda: metric(server, "num_requests_running") == 1, "it runs")
        wait_until(lambda: metric(server, "num_requests_running") == 0, "it is aborted")
    wait_until(lambda: metric(server, "kv_cache_usage_perc") == 0, "its blocks are free")
    _, text, _ = call(server, "/metrics")
    assert 'requests_finished_total{reason="abort"}' in text.decode()


async def test_a_stream_that_nobody_begins_to_read_is_aborted(lab: Lab) -> None:
    """The client has gone before the first event is asked for."""
    parts = lab.parts
    parts.engine.deliver = deliver_to(asyncio.get_running_loop())
    app = make_app(
        ServerState(parts.engine, ChatTokenizer(parts.folder), parts.limits, parts.passport, "", 0)
    )
    body = {"prompt": prompt(20, 5), "max_tokens": 1900, "ignore_eos": True, "stream": True}
    messages = [
        {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0) if len(messages) > 1 else messages[0]

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [],
    }
    await app(scope, receive, send)
    assert not any(message.get("body") for message in sent)
    await asyncio.to_thread(lab.settled)
    assert metric_of(parts, 'requests_finished_total{reason="abort"}') == 1


def metric_of(parts: Parts, name: str) -> float:
    text = parts.engine.metrics.registry.render().decode()
    return sum(
        float(line.split()[1]) for line in text.splitlines() if line.startswith(f"mooncache_hf_{name}")
    )


async def test_many_streams_at_once(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0) as client:

        async def one(seed: int) -> list[int]:
            made = await client.completions.create(
                model="tiny",
                prompt=prompt(40, 500 + seed),
                max_tokens=10,
                temperature=0,
                stream=True,
                extra_body={"return_token_ids": True},
            )
            return [token async for event in made for token in event.choices[0].token_ids]

        found = await asyncio.gather(*(one(seed) for seed in range(40)))
    for seed in (0, 17, 39):
        assert (
            found[seed] == complete(server, prompt(40, 500 + seed), max_tokens=10)["choices"][0]["token_ids"]
        )


def test_metrics_have_the_promised_names(server: Server) -> None:
    complete(server, prompt(40, 6))
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "prompt_tokens_total",
        "generation_tokens_total",
        "prefix_cache_hits_total",
        "kv_blocks_pinned",
    ):
        assert metric(server, name) >= 0
    assert metric(server, "generation_tokens_total") > 0


def test_passport_file(server: Server) -> None:
    content = json.loads(server.passport.read_text())
    passport = passport_from_json(json.dumps(content["passport"]))
    assert passport.block_tokens == BLOCK and passport.kv_dtype == "float32" and passport.tenant_salt == ""
    assert content["kv_bytes_per_token"] == 2 * 2 * 2 * 32 * 4
    assert content["kv_capacity_tokens"] == (16 << 20) // content["kv_bytes_per_token"]
    assert content["max_model_tokens"] == MODEL["max_positions"] and content["pool"] is True
    assert server.passport.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("tokens", "drain_s", "statuses"),
    [
        pytest.param(300, "60s", [200, 200], id="what is under way is finished"),
        pytest.param(2000, "100ms", [503, 503], id="what takes too long is told to go elsewhere"),
    ],
)
def test_a_full_queue_and_a_graceful_end(
    model_folder: Path, tmp_path: Path, tokens: int, drain_s: str, statuses: list[int]
) -> None:
    server = start_server(
        model_folder,
        tmp_path,
        MOONCACHE_HF_BATCH_MAX="1",
        MOONCACHE_HF_QUEUE_MAX="1",
        MOONCACHE_HF_DRAIN_TIMEOUT_S=drain_s,
        MOONCACHE_CONNECTOR_ENABLED="false",
    )
    try:
        body = {"prompt": prompt(10), "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        found: list[tuple[int, Any, Any]] = []
        threads = [
            threading.Thread(target=lambda: found.append(call(server, "/v1/completions", body)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: metric(server, "num_requests_waiting") == 1, "one runs and one waits")
        status, answer, headers = call(server, "/v1/completions", body)
        assert status == 429 and headers["Retry-After"] and answer["error"]["code"] == 429
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        assert [status for status, _, _ in found] == statuses
        assert server.process.wait(30) == 0, server.log.read_text()
    finally:
        if server.process.poll() is None:
            end(server.process)


def test_two_processes_share_a_pool(model_folder: Path, tmp_path: Path) -> None:
    """Engines as a worker starts them: the pool comes from the configuration, legs wait for each other."""
    cluster = start_cluster(tmp_path / "pool")
    servers: list[Server] = []
    try:
        for name in ("prefill", "decode"):
            folder = tmp_path / name
            folder.mkdir()
            env = {"MOONCACHE_CLUSTER_MASTER_TARGETS": cluster.master_target}
            env["MOONCACHE_STATE_DIR"] = str(cluster.state_dir)
            servers.append(start_server(model_folder, folder, **env))
        prefill, decode = servers
        assert prefill.passport.read_text() == decode.passport.read_text()
        for server in servers:
            wait_until(lambda server=server: "pool_connected" in server.log.read_text(), "the pool is found")
        one = prompt(300, 9)
        ask = LegHint(role=LegRole.DECODE, wait_tokens=288, wait_ms=60_000)
        found: list[Any] = []
        leg = threading.Thread(target=lambda: found.append(complete(decode, one, **{FIELD: ask.to_params()})))
        leg.start()
        wait_until(lambda: metric(decode, "num_requests_waiting") == 1, "the decode leg waits")
        first = complete(prefill, one, max_tokens=1)
        leg.join(60)
        (answer,) = found
        reported = CacheReport.from_params(answer[FIELD])
        assert (
            reported is not None
            and reported.loaded_tokens == 288
            and reported.outcome == "hit"
            and reported.waited_ms > 0
        )
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 288
        assert answer["choices"][0]["token_ids"][:1] == first["choices"][0]["token_ids"]
        assert metric(decode, "pool_hits_total") == 288
    finally:
        for server in servers:
            end(server.process)
        cluster.stop()


def test_no_model_is_told_and_ends(tmp_path: Path) -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "mooncache.hf_engine", "--model", str(tmp_path)],
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2 and b"config.json" in done.stderr
