"""Chats become the same tokens here and in a gateway: otherwise neither could name the other's blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mooncache.errors import InvalidArgument
from mooncache.gateway.tokens.template import ChatTemplates, special_tokens
from mooncache.hf_engine.core.chat import conversation
from mooncache.hf_engine.tokens import ChatTokenizer, takes_parts

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
    template = ChatTemplates.load(model_folder, special_tokens(config, {})).choose(body)
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
