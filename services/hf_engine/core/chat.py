"""Chat bodies as templates get them: the same rule as vLLM's, so that a gateway in front makes the same tokens.

Known fields only and in a fixed order, because templates print whole objects; typed parts as a list where the template
walks them, else as one text; arguments of tool calls as objects; developer messages join the system message where the
template does not know the role. A test compares the result with the gateway's.
"""

from __future__ import annotations

import json
from typing import Any

from mooncache.errors import InvalidArgument

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_FUNCTION = ("name", "description", "parameters")
_FUNCTION_WHEN_GIVEN = ("strict", "defer_loading")


def conversation(messages: list[Any], *, structured: bool, developer: bool) -> list[dict[str, Any]]:
    """The template's messages.

    Args:
        structured: the template walks typed parts.
        developer: the template knows the role "developer".

    Raises:
        InvalidArgument: no role, or content that is not text.
    """
    found = [_message(message, structured) for message in messages]
    if developer or not any(message["role"] == "developer" for message in found):
        return found
    for message in found:
        if message["role"] == "developer":
            message["role"] = "system"
            message.pop("tools", None)
    systems = [message for message in found if message["role"] == "system"]
    if len(systems) == 1 and found[0] is systems[0]:
        return found
    texts = [text for message in systems if (text := _joined(message["content"], "\n"))]
    others = [message for message in found if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def tool_schemas(tools: list[Any]) -> list[dict[str, Any]]:
    """The template's tools. Raises InvalidArgument for a tool without a function's name."""
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidArgument("tools: every tool needs a function with a name.")
    deferred = tool.get("defer_loading")
    given = {**function, "defer_loading": function.get("defer_loading", deferred)}
    schema = {name: given.get(name) for name in _FUNCTION}
    schema |= {name: given[name] for name in _FUNCTION_WHEN_GIVEN if given.get(name) is not None}
    shaped = {"type": tool.get("type", "function"), "function": schema}
    return shaped if deferred is None else {**shaped, "defer_loading": deferred}


def _message(message: object, structured: bool) -> dict[str, object]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidArgument("messages: every message needs a role.")
    role = message["role"]
    texts = _texts(message.get("content"))
    found: dict[str, Any] = {"role": role}
    if structured and role != "tool":
        found["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        found["content"] = "\n".join(text for text in texts if text or structured)
    if role == "assistant":
        if message.get("tool_calls"):
            found["tool_calls"] = [_call(call) for call in message["tool_calls"]]
        reasoning = message.get("reasoning")
        reasoning = message.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            found["reasoning"] = found["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        found["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    if role == "developer":
        found["tools"] = message.get("tools")
    return found


def _texts(content: object) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidArgument("messages: content has to be a string or a list of parts.")
    return [text for part in content if (text := _text(part)) is not None]


def _text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else ()
    if text is not None and not isinstance(text, str):
        raise InvalidArgument("messages: this engine takes parts that hold text only.")
    return text


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidArgument("messages: every tool call needs a function.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {}
    arguments = arguments if isinstance(arguments, dict) else {}
    named = {"arguments": arguments, "name": function.get("name")}
    return {"id": call.get("id"), "function": named, "type": "function"}


def _joined(content: Any, between: str) -> str:
    return content if isinstance(content, str) else between.join(part["text"] for part in content)
