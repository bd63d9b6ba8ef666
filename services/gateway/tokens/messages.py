"""Messages of a chat request as vLLM hands them to the chat template.

vLLM validates a request against typed messages and passes on only the fields that it knows. This is the same rule
written down; `Unreadable` says that the request holds something else, such as an image.
"""

from __future__ import annotations

import json
from typing import Any

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_BILLING_HEADER = "x-anthropic-billing-header"
_FUNCTION_FIELDS = ("name", "description", "parameters")
_FUNCTION_FIELDS_WHEN_GIVEN = ("strict", "defer_loading")


class Unreadable(Exception):  # noqa: N818 - a reason, not a failure
    """The tokens of this request cannot be known here."""


def conversation(messages: Any, *, structured: bool) -> list[dict[str, Any]]:
    """The template's `messages`.

    Args:
        messages: as sent by the client; not changed.
        structured: the template reads content as a list of parts; otherwise it is one string.

    Raises:
        Unreadable: content that is not text, or nothing that a server would accept.
    """
    if not isinstance(messages, list) or not messages:
        raise Unreadable("messages")
    return [_message(message, structured) for message in messages]


def tool_schemas(tools: Any) -> list[dict[str, Any]] | None:
    """The template's `tools`: the declared fields in their order; what else the client sent is left out."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise Unreadable("tools")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unreadable("tools")
    deferred = tool.get("defer_loading")
    given = {**function, "defer_loading": function.get("defer_loading", deferred)}
    schema = {name: given.get(name) for name in _FUNCTION_FIELDS}
    schema |= {name: given[name] for name in _FUNCTION_FIELDS_WHEN_GIVEN if given.get(name) is not None}
    return {
        "type": tool.get("type", "function"),
        "function": schema,
        **({} if deferred is None else {"defer_loading": deferred}),
    }


def _message(message: Any, structured: bool) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Unreadable("role")
    role = message["role"]
    found: dict[str, Any] = {"role": role, "content": _content(message.get("content"), role, structured)}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            found["tool_calls"] = [_tool_call(call) for call in _list(calls)]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            found["reasoning"] = found["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            found["tool_call_id"] = message["tool_call_id"]
        if isinstance(found["content"], list):
            found["content"] = "\n".join(part["text"] for part in found["content"])
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    if role == "developer":
        found["tools"] = message.get("tools")
    return found


def _content(content: Any, role: str, structured: bool) -> str | list[dict[str, Any]]:
    if content is None:
        parts: list[str] = []
    elif isinstance(content, str):
        parts = [content]
    else:
        parts = [text for part in _list(content) if (text := _part(part)) is not None]
    if role == "system":
        parts = [text for part in parts if (text := _without_billing_header(part)) is not None]
    if structured:
        return [{"type": "text", "text": text} for text in parts]
    return "\n".join(text for text in parts if text)


def _part(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS or part.get("uuid") is not None:
        raise Unreadable("content")
    text = part.get(_TEXT_PARTS[kind])
    if text is None and kind in ("text", "refusal"):
        return None
    if not isinstance(text, str):
        raise Unreadable("content")
    return text


def _without_billing_header(text: str) -> str | None:
    """A client's attribution line changes with every request; vLLM drops it, and what is then empty."""
    if not text.startswith(_BILLING_HEADER):
        return text
    return text.partition("\n")[2] or None


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise Unreadable("tool_calls")
    return {
        "id": call.get("id"),
        "function": {"arguments": _arguments(function.get("arguments")), "name": function.get("name")},
        "type": "function",
    }


def _arguments(given: Any) -> dict[str, Any]:
    """Templates want an object; whatever is none counts as empty."""
    if isinstance(given, str) and given:
        try:
            given = json.loads(given)
        except ValueError:
            return {}
        except RecursionError:
            raise Unreadable("tool_calls") from None
    return given if isinstance(given, dict) else {}


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Unreadable("list")
    return value
