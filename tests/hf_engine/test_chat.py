"""Chats become the same tokens here and in a gateway: otherwise neither could name the other's blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mooncache.errors import InvalidArgument, ModelUnknown, PromptTooLong
from mooncache.gateway.tokens.loading import load_templates, special_tokens
from mooncache.hf_engine.core.chat import conversation
from mooncache.hf_engine.requests import CHOICES_MAX, RequestLimits, parse
from mooncache.hf_engine.tokens import ChatTokenizer, takes_parts
from tests.hostile.any_json import DEEP, JSON, objects

TOOL = {"function": {"parameters": {"type": "object"}, "name": "f", "extra": 1}, "type": "function"}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": "ü"}'}, "id": "c1", "x": 2}
USER = {"role": "user", "content": "Hello"}
BODIES: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": [{"role": "system", "content": ""}, USER]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
        ]
    },
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [USER], "tools": [TOOL]},
    {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    {"messages": [USER, {"role": "tool", "content": [{"type": "text", "text": "42"}], "tool_call_id": "c1"}]},
    {"messages": [{"role": "developer", "content": "Be kind."}, USER]},
    {"messages": [{"role": "system", "content": "A"}, USER, {"role": "developer", "content": "B"}]},
    {"messages": [USER], "add_generation_prompt": False},
    {
        "messages": [USER, {"role": "assistant", "content": "I think"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    {"messages": [{"role": "user", "content": "x", "name": "ann", "unknown": 3}], "reasoning_effort": "low"},
]


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> ChatTokenizer:
    return ChatTokenizer(model_folder)


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_same_tokens_as_the_gateway(
    model_folder: Path, tokenizer: ChatTokenizer, body: dict[str, Any]
) -> None:
    config = json.loads((model_folder / "tokenizer_config.json").read_text())
    template = load_templates(model_folder, special_tokens(config, {})).choose(body)
    given = {
        name: body[name]
        for name in ("tools", "add_generation_prompt", "continue_final_message")
        if name in body
    }
    here = tokenizer.encode_chat(body["messages"], **given)
    assert here == tokenizer.encode(template.render(body), special=False)


@pytest.mark.parametrize(
    ("template", "walks"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m['content'] | list %}{{ p }}{% endfor %}{% endfor %}", True),
        (
            """{% macro show(c) %}{% for p in c %}{{ p }}{% endfor %}{% endmacro %}
            {% for m in messages %}{{ show(m.content) }}{% endfor %}""",
            True,
        ),
        (
            "{% for m in messages %}{% set content = m.content %}{% for p in content %}{% endfor %}{% endfor %}",
            True,
        ),
        ("{% broken", False),
    ],
)
def test_which_templates_walk_parts(template: str, walks: bool) -> None:
    assert takes_parts(template) is walks


def test_parts_are_one_text_for_templates_that_do_not_walk_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    (plain,) = conversation(messages, structured=False, developer=True)
    assert plain == {"role": "user", "content": "a\nb"}


@pytest.mark.parametrize(
    "messages",
    [
        [{"content": "x"}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "assistant", "tool_calls": ["f"]}],
        ["hi"],
    ],
)
def test_what_is_no_chat_is_refused(messages: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match="messages: "):
        conversation(messages, structured=True, developer=True)


def test_a_request_cannot_bring_a_template(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(InvalidArgument, match="chat_template_kwargs"):
        tokenizer.encode_chat([USER], variables={"chat_template": "{{ 1 }}"})


LIMITS = RequestLimits(model="m", tokens_max=64, vocab=200, eos_ids=frozenset({1}))
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 64, 1 << 64, 10**400])
FIELDS = {
    "model": st.just("m") | JSON,
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed",
         "logprobs", "top_logprobs"),
        NUMBERS | JSON,
    ),
    **dict.fromkeys(("stop", "stop_token_ids", "stream", "stream_options", "tools", "reasoning_effort"), JSON),
    **dict.fromkeys(("chat_template_kwargs", "cache_salt", "kv_transfer_params", "best_of"), JSON),
}  # fmt: skip
TEXTS = st.text(max_size=20) | st.just(chr(0xD800))
PROMPTS = TEXTS | st.lists(TEXTS | NUMBERS | st.lists(NUMBERS, max_size=3), max_size=3) | JSON
MESSAGES = st.lists(objects("role", "content", "tool_calls") | st.just(USER), max_size=3) | JSON


def bodies(name: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({name: values}, optional=FIELDS) | JSON


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(
    bodies("prompt", PROMPTS).map(lambda b: (False, b))
    | bodies("messages", MESSAGES).map(lambda b: (True, b))
)
@example((False, {"prompt": [1, "a"]}))
@example((False, {"prompt": "a" * 10_000}))
@example(
    (
        True,
        {
            "messages": [USER],
            "tools": [{"function": {"name": "f", "parameters": json.loads(DEEP[:900] + "]" * 900)}}],
        },
    )
)
def test_any_body_is_a_request_or_refused(tokenizer: ChatTokenizer, given: tuple[bool, Any]) -> None:
    chat, body = given
    try:
        asked = parse(body, tokenizer, LIMITS, chat=chat)
    except (InvalidArgument, PromptTooLong, ModelUnknown):
        return
    assert len(asked.prompts) * asked.n <= CHOICES_MAX
    for prompt, sampling in zip(asked.prompts, asked.sampling, strict=True):
        assert 0 < len(prompt) < len(prompt) + sampling.max_tokens <= LIMITS.tokens_max
        assert all(0 <= token < LIMITS.vocab for token in [*prompt, *sampling.stop_ids])
        assert 0 <= sampling.min_tokens <= sampling.max_tokens
