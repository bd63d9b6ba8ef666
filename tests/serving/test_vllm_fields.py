"""Fields of the OpenAI API that only a full engine understands, through the gateway and both engines, with the
unmodified client."""

import asyncio
import json
from typing import Any

import openai
import pytest

from mooncache.cluster.embedded import EmbeddedCluster
from tests.conditions import until
from tests.serving.test_vllm import cached_tokens, client_of, metric

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
LONG = "one two three four five six seven eight nine ten " * 30
SCHEMA = {
    "type": "object",
    "properties": {"moon": {"type": "boolean"}, "tides": {"type": "integer"}},
    "required": ["moon", "tides"],
    "additionalProperties": False,
}


def chat(**more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": LONG}],
        "temperature": 0,
        "max_tokens": 12,
        **more,
    }


async def test_several_choices_with_logprobs(vllm_cluster: EmbeddedCluster) -> None:
    async with client_of(vllm_cluster, "fields") as client:
        answer = await client.chat.completions.create(
            **chat(n=3, temperature=1.0, seed=5, logprobs=True, top_logprobs=2)
        )
        again = await client.chat.completions.create(**chat(n=2, temperature=0.7, seed=1))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    assert len(again.choices) == 2
    assert cached_tokens(again.usage) > 0


async def test_structured_output(vllm_cluster: EmbeddedCluster) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "sky", "schema": SCHEMA, "strict": True}}
    async with client_of(vllm_cluster, "fields") as client:
        answer = await client.chat.completions.create(**chat(response_format=wanted, max_tokens=200))
    choice = answer.choices[0]
    if choice.finish_reason == "stop":  # random weights may write digits to the end
        assert set(json.loads(choice.message.content or "")) == {"moon", "tides"}
    else:
        assert (choice.message.content or "").lstrip().startswith("{")


async def test_a_tool_is_called(vllm_cluster: EmbeddedCluster) -> None:
    """Random weights may write digits to the end, and what they write depends on the processor: the first of several
    seeds whose call ends is taken."""
    tool = {"type": "function", "function": {"name": "look_up", "description": "looks", "parameters": SCHEMA}}
    forced = {"type": "function", "function": {"name": "look_up"}}
    async with client_of(vllm_cluster, "fields") as client:
        for seed in range(24):
            asked = chat(tools=[tool], tool_choice=forced, max_tokens=120, temperature=1.0, seed=seed)
            answer = await client.chat.completions.create(**asked)
            if answer.choices[0].message.tool_calls:
                break
        deltas = []
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            deltas += [call for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    calls = answer.choices[0].message.tool_calls
    assert calls and calls[0].function.name == "look_up"
    assert deltas and deltas[0].function.name == "look_up"
    assert "".join(delta.function.arguments or "" for delta in deltas) == calls[0].function.arguments


async def test_a_list_of_prompts(vllm_cluster: EmbeddedCluster) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    async with client_of(vllm_cluster, "fields") as client:
        both = await client.completions.create(prompt=[LONG, "short one"], **asked)
        alone = [await client.completions.create(prompt=text, **asked) for text in (LONG, "short one")]
    assert [choice.text for choice in both.choices] == [answer.choices[0].text for answer in alone]


async def test_who_leaves_in_mid_stream_leaves_nothing_behind(vllm_cluster: EmbeddedCluster) -> None:
    async with client_of(vllm_cluster, "fields") as client:
        stream = await client.chat.completions.create(**chat(max_tokens=4000, stream=True))
        async for _ in stream:
            break
        await stream.close()
    for instance in ("prefill-1", "decode-1"):

        async def idle(instance: str = instance) -> bool:
            return await asyncio.to_thread(metric, vllm_cluster, instance, "vllm:num_requests_running") == 0

        await until(idle, f"{instance} computes for nobody", every_s=0.1)


async def test_the_engines_own_refusals_come_through(vllm_cluster: EmbeddedCluster) -> None:
    async with client_of(vllm_cluster, "fields") as client:
        for wrong in ({"temperature": -1}, {"max_tokens": -5}, {"top_logprobs": 2, "logprobs": False}):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**chat(**wrong))
            assert refused.value.body is not None and "message" in refused.value.body  # type: ignore[operator]
