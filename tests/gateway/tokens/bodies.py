"""Bodies of requests: what clients send, in all the ways that the API allows."""

from __future__ import annotations

from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "wo? <é>"}},
        },
        "name": "weather",
        "strict": True,
        "unknown": 1,
    },
    "unknown": 2,
}
CALL = {
    "type": "function",
    "id": "call_1",
    "function": {"name": "weather", "arguments": '{"place": "the kato", "n": 1}'},
}
_HELLO = [{"role": "user", "content": "hello the kato"}]
_TALK = [
    {"role": "system", "content": "be the ring <|im_end|> and </s>"},
    {"role": "user", "name": "ann", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two "}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": [{"type": "text", "text": "12"}, {"type": "text", "text": "C"}],
    },
    {"role": "assistant", "content": "it is 12", "reasoning": "because", "tool_calls": []},
    {"role": "user", "content": "thanks 'S"},
]  # fmt: skip
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": _HELLO},
    "talk": {"messages": _TALK},
    "tools": {"messages": _HELLO, "tools": [TOOL, {**TOOL, "defer_loading": True}]},
    "tools unused": {"messages": _TALK, "tools": [TOOL], "tool_choice": "none"},
    "no generation prompt": {"messages": _TALK, "add_generation_prompt": False},
    "special tokens": {"messages": _TALK, "add_special_tokens": True},
    "continued": {
        "messages": [*_HELLO, {"role": "assistant", "content": "I say "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continued, trimmed": {
        "messages": [*_HELLO, {"role": "assistant", "content": [{"type": "text", "text": "I say"}]}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "documents": {"messages": _HELLO, "documents": [{"title": "a", "text": "b"}] * 4},
    "kwargs": {"messages": _HELLO, "chat_template_kwargs": {"enable_thinking": True, "other": [1]}},
    "kwargs lose": {"messages": _HELLO, "chat_template_kwargs": {"add_generation_prompt": False}},
    "effort": {"messages": _HELLO, "reasoning_effort": "low"},
    "no effort": {"messages": _HELLO, "reasoning_effort": "none"},
    "developer": {"messages": [{"role": "developer", "content": "be kind"}, *_HELLO]},
    "developer later": {"messages": [*_TALK, {"role": "developer", "content": "be brief"}]},
    "old reasoning": {"messages": [*_HELLO, {"role": "assistant", "content": "x", "reasoning_content": "y"}]},
    "bad arguments": {
        "messages": [
            *_HELLO,
            *(
                {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": text}}]}
                for text in ("", "[]", "no json", "{}", '{"b": 1, "a": {"é": null}}')
            ),
        ]
    },
    "billing header": {"messages": [{"role": "system", "content": "x-anthropic-billing-header: 1\nrest"}, *_HELLO]},
    "billing header only": {"messages": [{"role": "system", "content": "x-anthropic-billing-header: 1"}, *_HELLO]},
    "refusal": {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, *_HELLO]},
    "extra fields": {
        "messages": [{"role": "user", "content": "a", "mood": 1, "name": "b"}],
        "made_up": {"x": 1},
        "user": "u",
    },
    "part with extra": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}]
    },
    "empty content": {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": []}]},
    "tool with name": {"messages": [*_HELLO, {"role": "tool", "tool_call_id": "c", "name": "n", "content": "r"}]},
    "other role": {"messages": [{"role": "critic", "content": "hm", "name": "c"}]},
    "refused by the template": {"messages": [{"role": "bad", "content": "x"}]},
    "own template": {"messages": _HELLO, "chat_template": "x"},
    "truncated": {"messages": _HELLO, "truncate_prompt_tokens": 3},
    "picture": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
}  # fmt: skip
UNREADABLE = {"refused by the template", "own template", "truncated", "picture"}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "hello the kato</s> x"},
    "texts": {"prompt": ["one", "  two", "three\n\n"]},
    "ids": {"prompt": [5, 6, 7]},
    "lists of ids": {"prompt": [[5, 6], [7]]},
    "no specials": {"prompt": "hello", "add_special_tokens": False},
    "long": {"prompt": "the kato and the ring " * 400},
}
