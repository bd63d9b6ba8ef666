"""The unmodified `openai` client over every endpoint and field, against real engines."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from mooncache.cluster.embedded import EmbeddedCluster
from tests.conditions import wait_until

pytestmark = pytest.mark.timeout(300)
TEXT = "The moon is a harsh mistress, said somebody once upon a time. " * 12
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def say(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


def chat(client: OpenAI, model: str, text: str, **fields: Any) -> Any:
    fields = {"max_tokens": 8, "temperature": 0, **fields}
    return client.chat.completions.create(model=model, messages=say(text), **fields)


# --- answers ---------------------------------------------------------------------------------------------------------


def test_models(client: OpenAI, model: str) -> None:
    assert [found.id for found in client.models.list()] == [model]
    assert client.models.retrieve(model).owned_by == "mooncache"


def test_chat(client: OpenAI, model: str) -> None:
    answer = chat(client, model, "Hello")
    assert answer.object == "chat.completion" and answer.model == model
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id


def test_second_time_is_cached_and_equal(client: OpenAI, model: str) -> None:
    first = chat(client, model, "cached? " + TEXT)
    second = chat(client, model, "cached? " + TEXT)
    assert second.choices[0].message.content == first.choices[0].message.content
    assert first.usage.prompt_tokens_details.cached_tokens < 64
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens * 0.7
    assert second.usage.prompt_tokens_details.cached_tokens <= second.usage.prompt_tokens


def test_stream_has_the_same_tokens(client: OpenAI, model: str) -> None:
    whole = chat(client, model, "stream " + TEXT, max_tokens=12)
    chunks = list(chat(client, model, "stream " + TEXT, max_tokens=12, stream=True))
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_stream_with_usage(client: OpenAI, model: str) -> None:
    options = {"include_usage": True}
    chunks = list(chat(client, model, "usage " + TEXT, stream=True, stream_options=options))
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens is not None


def test_several_answers(client: OpenAI, model: str) -> None:
    answer = chat(client, model, "several", n=3, temperature=0.9, seed=1)
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2]
    stream = chat(client, model, "several", n=2, temperature=0.9, stream=True)
    assert {choice.index for chunk in stream for choice in chunk.choices} == {0, 1}


def test_log_probabilities(client: OpenAI, model: str) -> None:
    answer = chat(client, model, "likely", logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert len(content[0].top_logprobs) == 2
    assert content[0].logprob <= 0


def test_max_completion_tokens_counts_as_max_tokens(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=say("count"), max_completion_tokens=3, temperature=0
    )
    assert answer.usage is not None and answer.usage.completion_tokens <= 3


def test_tools_are_part_of_the_prompt(client: OpenAI, model: str) -> None:
    plain = chat(client, model, "weather in Oslo?")
    tooled = chat(client, model, "weather in Oslo?", tools=TOOLS, tool_choice="none")
    assert tooled.choices[0].message is not None
    assert tooled.usage.prompt_tokens >= plain.usage.prompt_tokens


def test_conversation_with_a_tool_result(client: OpenAI, model: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "user", "content": "weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=4)
    assert answer.choices[0].message.role == "assistant"


def test_typed_parts(client: OpenAI, model: str) -> None:
    parts: list[Any] = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": parts}], max_tokens=2
    )
    assert answer.choices


def test_completions(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="Once upon a time", max_tokens=5, temperature=0)
    assert answer.object == "text_completion"
    chunks = list(
        client.completions.create(
            model=model, prompt="Once upon a time", max_tokens=5, temperature=0, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == answer.choices[0].text


def test_lists_of_prompts(client: OpenAI, model: str) -> None:
    prompts = ["Once upon a time " * 20, "In the beginning " * 10]
    together = client.completions.create(model=model, prompt=prompts, max_tokens=4, temperature=0)
    assert [choice.index for choice in sorted(together.choices, key=lambda c: c.index)] == [0, 1]
    alone = [client.completions.create(model=model, prompt=p, max_tokens=4, temperature=0) for p in prompts]
    texts = [choice.text for choice in sorted(together.choices, key=lambda c: c.index)]
    assert texts == [answer.choices[0].text for answer in alone]


def test_prompts_as_tokens(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=[5, 6, 7, 8], max_tokens=3)
    assert answer.usage is not None and answer.usage.prompt_tokens == 4
    answer = client.completions.create(model=model, prompt=[[5, 6, 7], [8, 9]], max_tokens=3, n=2)
    assert len(answer.choices) == 4


def test_engines_own_fields(client: OpenAI, model: str) -> None:
    body = {"top_k": 1, "ignore_eos": True, "cache_salt": "mine", "never_heard_of_it": {"a": 1}}
    answer = chat(client, model, "extra " + TEXT, extra_body=body)
    assert answer.choices
    # another salt is another cache, inside the tenant too
    chat(client, model, "salted " + TEXT, extra_body={"cache_salt": "one"})
    other = chat(client, model, "salted " + TEXT, extra_body={"cache_salt": "two"})
    assert other.usage.prompt_tokens_details.cached_tokens == 0


def test_many_at_once(base_url: str, key: str, model: str) -> None:
    async def all_of_them() -> list[Any]:
        async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=200) as many:
            return await asyncio.gather(
                *[
                    many.chat.completions.create(model=model, messages=say(f"{n} {TEXT}"), max_tokens=4)
                    for n in range(16)
                ]
            )

    answers = asyncio.run(all_of_them())
    assert len({answer.id for answer in answers}) == 16


def test_raw_headers(client: OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=say("x"), max_tokens=2, extra_headers={"X-Request-Id": "my-id.1"}
    )
    assert raw.headers["x-request-id"] == "my-id.1"
    assert raw.headers["x-mooncache-decision"]
    assert "kv_transfer_params" not in raw.text


# --- errors ----------------------------------------------------------------------------------------------------------


def test_wrong_key(base_url: str, model: str) -> None:
    with (
        OpenAI(base_url=base_url, api_key="sk-wrong", max_retries=0) as wrong,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        chat(wrong, model, "x")
    assert caught.value.code == "invalid_api_key"


def test_unknown_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        chat(client, "no-such-model", "x")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": -1},
        {"n": 1_000_000},
        {"n": 0},
        {"temperature": "hot"},
        {"temperature": -5},
        {"top_p": 7},
        {"stream_options": {"include_usage": "x"}, "stream": True},
    ],
)
def test_bad_requests(client: OpenAI, model: str, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, model, "x", **fields)
    assert isinstance(caught.value.body, dict) and caught.value.body["message"]


def test_prompt_that_is_too_long(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, model, "word " * 100_000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt=[7] * 100_000, max_tokens=1)


def test_embeddings_are_not_served(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError, match="embeddings"):
        client.embeddings.create(model=model, input="x")


def test_rate_limit(cluster: EmbeddedCluster, model: str) -> None:
    """A second gateway of the same cluster, with a limit."""
    from tests.openai_client.second_gateway import second_gateway

    with (
        second_gateway(cluster, requests_per_minute=2) as url,
        OpenAI(base_url=f"{url}/v1", api_key=_tenant_key(cluster, "slowly"), max_retries=0) as limited,
    ):
        for _ in range(2):
            chat(limited, model, "x", max_tokens=1)
        with pytest.raises(openai.RateLimitError) as caught:
            chat(limited, model, "x")
        assert int(caught.value.response.headers["retry-after"]) >= 1


def _tenant_key(cluster: EmbeddedCluster, tenant: str) -> str:
    from mooncache.auth import load_cluster_token, tenant_token

    return tenant_token(load_cluster_token(cluster.state_dir / "cluster.token"), tenant).text


# --- leaving ---------------------------------------------------------------------------------------------------------


def test_leaving_a_stream_stops_the_engine(client: OpenAI, cluster: EmbeddedCluster, model: str) -> None:
    with chat(
        client, model, "go on", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    _wait_for_metric(cluster, "mooncache_gateway_aborted_total", at_least=1)
    _wait_for_metric(cluster, "mooncache_gateway_streams_open", at_most=0)


def _wait_for_metric(cluster: EmbeddedCluster, name: str, at_least: float = 0, at_most: float = 1e18) -> None:
    """Wait until a metric of the gateway is in the range."""

    def in_range() -> bool:
        with urllib.request.urlopen(f"{cluster.layout.gateway_url}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        values = [float(line.split()[-1]) for line in lines if line.startswith(name + " ")]
        return bool(values) and at_least <= values[0] <= at_most

    wait_until(in_range, f"{name} is in its range", every_s=0.1)


def test_tenants_do_not_see_each_others_cache(cluster: EmbeddedCluster, base_url: str, model: str) -> None:
    counts = []
    for tenant in ("one", "two", "one"):
        with OpenAI(base_url=base_url, api_key=_tenant_key(cluster, tenant), max_retries=0) as client:
            usage = chat(client, model, "secret " + TEXT).usage
            counts.append(usage.prompt_tokens_details.cached_tokens)
    assert counts[0] == counts[1] == 0
    assert counts[2] > 64


def test_no_internal_field_is_ever_seen(client: OpenAI, base_url: str, key: str, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
    for extra in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        request = urllib.request.Request(
            f"{base_url}/chat/completions",
            data=json.dumps({**body, **extra}).encode(),
            headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read().decode()
        assert "kv_transfer_params" not in text and "mooncache" not in text
