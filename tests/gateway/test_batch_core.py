"""Decisions about batches: the order of requests, whose batch is next, streamed answers as whole ones."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from typing import Any

from mooncache.gateway.core.batch import BatchStatus, OfflineBatch, next_batch
from mooncache.gateway.core.batch_lines import BatchLine, prompt_order, read_line
from mooncache.gateway.core.whole_answer import events_of, whole_answer

CHAT = "/v1/chat/completions"
BLOCK_CHARS = 64


def keys_of(messages: list[list[dict[str, str]]]) -> list[bytes]:
    found = []
    for number, each in enumerate(messages, 1):
        body = {"model": "m", "messages": each}
        data = json.dumps({"custom_id": f"{number}", "method": "POST", "url": CHAT, "body": body}).encode()
        line = read_line(data, number, CHAT)
        assert isinstance(line, BatchLine)
        found.append(line.prompt_key)
    return found


def cached_share(prompts: list[bytes], blocks_max: int) -> float:
    """The share of leading blocks that a cache of so many blocks, of which the oldest goes first, has when asked."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    hits = asked = 0
    for prompt in prompts:
        missed = False
        for end in range(BLOCK_CHARS, len(prompt) + 1, BLOCK_CHARS):
            key, asked = prompt[:end], asked + 1
            missed = missed or key not in cache
            hits += not missed
            cache[key] = None
            cache.move_to_end(key)
            while len(cache) > blocks_max:
                cache.popitem(last=False)
    return hits / asked


def test_neighbours_share_blocks_that_a_small_cache_would_have_lost_otherwise() -> None:
    dice = random.Random(7)
    systems = [f"system {number} " + "".join(dice.choices("abcdef ", k=2000)) for number in range(20)]
    talks = [f"talk {number} " + "".join(dice.choices("abcdef ", k=1000)) for number in range(60)]
    messages = []
    for number in range(500):
        talk = number % 60
        text = f"{talks[talk]} question {number} " + "".join(dice.choices("xyz", k=300))
        messages.append(
            [{"role": "system", "content": systems[talk % 20]}, {"role": "user", "content": text}]
        )
    dice.shuffle(messages)
    keys = keys_of(messages)
    order = prompt_order(keys)
    assert sorted(order) == list(range(500))
    as_sent = cached_share([keys[place] for place in order], 200)
    as_in_the_file = cached_share(keys, 200)
    unlimited = cached_share(keys, 1_000_000)
    assert as_sent == unlimited, "each prefix is computed once"
    assert as_in_the_file < 0.5 * as_sent
    assert as_sent > 0.8


def test_equal_prompts_stay_in_their_order_and_tools_count_before_messages() -> None:
    assert prompt_order([b"b", b"a", b"b", b"a"]) == [1, 3, 0, 2]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    lines = [
        {"custom_id": "1", "method": "POST", "url": CHAT, "body": {**body, "tools": [{"name": "t"}]}},
        {"custom_id": "2", "method": "POST", "url": CHAT, "body": body},
    ]
    plain = [read_line(json.dumps(each).encode(), 1, CHAT) for each in lines]
    spaced = [read_line(json.dumps(each, indent=1).encode(), 1, CHAT) for each in lines]
    assert [each.prompt_key for each in plain if isinstance(each, BatchLine)] == [
        each.prompt_key for each in spaced if isinstance(each, BatchLine)
    ]


def batch(number: int, tenant: str, status: BatchStatus = BatchStatus.VALIDATING) -> OfflineBatch:
    return OfflineBatch(
        id=f"batch_{number}",
        tenant=tenant,
        admin=False,
        endpoint=CHAT,
        input_file_id="file-1",
        metadata=None,
        created_at=number,
        expires_at=number + 100,
        status=status,
    )


def test_who_has_the_fewest_batches_under_way_is_next_and_then_the_oldest() -> None:
    many = [batch(number, "a") for number in range(5)]
    late = batch(9, "b", BatchStatus.IN_PROGRESS)
    ended = batch(0, "c", BatchStatus.COMPLETED)
    assert next_batch([*many, late, ended], []) is many[0]
    assert next_batch([*many, late, ended], [many[0]]) is late
    assert next_batch([*many, late, ended], [many[0], late]) is many[1]
    assert next_batch([ended], []) is None


def stream(*events: dict[str, Any]) -> bytes:
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    return b": a comment\n\n" + b"".join(lines) + b"data: [DONE]\n\n"


def test_a_streamed_chat_is_the_whole_one_with_tools_choices_and_log_probabilities() -> None:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {**head, "choices": [{"index": index, "delta": delta, **more}]}

    call = {"index": 0, "id": "t", "type": "function", "function": {"name": "f", "arguments": ""}}
    found = whole_answer(
        events_of(
            stream(
                chunk(1, {"role": "assistant", "content": ""}),
                chunk(1, {"content": "b"}, logprobs={"content": [{"token": "b"}]}),
                chunk(0, {"role": "assistant", "content": None}),
                chunk(0, {"tool_calls": [call]}),
                chunk(0, {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]}),
                chunk(1, {"content": "c"}, logprobs={"content": [{"token": "c"}]}, finish_reason="stop"),
                chunk(0, {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}),
                chunk(0, {}, finish_reason="tool_calls"),
                {**head, "choices": [], "usage": {"prompt_tokens": 3}},
            )
        ),
        chat=True,
    )
    assert found["object"] == "chat.completion" and found["usage"] == {"prompt_tokens": 3}
    first, second = found["choices"]
    assert (first["finish_reason"], first["message"]["content"]) == ("tool_calls", None)
    function = {"name": "f", "arguments": '{"x":1}'}
    assert first["message"]["tool_calls"] == [{"id": "t", "type": "function", "function": function}]
    assert second["message"] == {"role": "assistant", "content": "bc"}
    assert second["logprobs"] == {"content": [{"token": "b"}, {"token": "c"}]}


def test_a_streamed_text_and_a_stream_that_ends_with_an_error() -> None:
    parts = [
        {"choices": [{"index": 0, "text": text, "logprobs": {"tokens": [text]}, "finish_reason": None}]}
        for text in ("a", "b")
    ]
    found = whole_answer(events_of(stream(*parts)), chat=False)
    assert found["choices"] == [
        {"index": 0, "logprobs": {"tokens": ["a", "b"]}, "finish_reason": None, "text": "ab"}
    ]
    error = {"error": {"message": "no", "code": 500}}
    assert whole_answer(events_of(stream(parts[0], error)), chat=False) == error
