"""A streamed answer as the whole answer that the same request without `stream` would have had.

Requests of a batch are streamed from the engine, since only so it is seen when a prompt is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

_PREFIX = b"data:"
_SET_ONCE = frozenset({"role", "id", "type", "name"})


def events_of(stream: bytes) -> Iterable[dict[str, Any]]:
    """The events of a stream that are objects. Raises msgspec.DecodeError."""
    for line in stream.split(b"\n"):
        data = line[len(_PREFIX) :].strip() if line.startswith(_PREFIX) else b""
        if data and data != b"[DONE]":
            yield msgspec.json.decode(data, type=dict[str, Any])


def whole_answer(events: Iterable[dict[str, Any]], *, chat: bool) -> dict[str, Any]:
    """All chunks as one answer; an event with an error is returned as it is."""
    found: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        if "error" in event:
            return {"error": event["error"]}
        found |= {name: value for name, value in event.items() if name != "choices" and value is not None}
        for part in event.get("choices") or ():
            _join_choice(choices.setdefault(int(part.get("index") or 0), {}), part)
    found["object"] = "chat.completion" if chat else "text_completion"
    found["choices"] = [_closed(index, choices[index], chat=chat) for index in sorted(choices)]
    return found


def _join_choice(choice: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if name == "delta":
            _join(choice.setdefault("message", {}), value or {})
        elif name == "logprobs":
            _join_logprobs(choice, value)
        elif name == "text":
            choice["text"] = choice.get("text", "") + (value or "")
        elif value is not None:
            choice[name] = value


def _join(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    """Texts grow, tool calls by their index; what says what something is stays."""
    for name, value in delta.items():
        if name == "tool_calls":
            calls = whole.setdefault("tool_calls", {})
            for call in value or ():
                _join(calls.setdefault(int(call.get("index") or 0), {}), call)
        elif isinstance(value, dict):
            _join(whole.setdefault(name, {}), value)
        elif isinstance(value, str) and name not in _SET_ONCE:
            whole[name] = (whole.get(name) or "") + value
        elif value is not None:
            whole[name] = value


def _join_logprobs(choice: dict[str, Any], value: dict[str, Any] | None) -> None:
    if not value:
        return
    known = choice.setdefault("logprobs", {})
    for name, items in value.items():
        known[name] = [*(known.get(name) or ()), *items] if isinstance(items, list) else items


def _closed(index: int, choice: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    found = {"index": index, "logprobs": None, "finish_reason": None, **choice}
    if chat:
        message = {"role": "assistant", "content": None, **found.get("message", {})}
        calls = message.get("tool_calls")
        if calls:
            ordered = (calls[at] for at in sorted(calls))
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in ordered
            ]
        found["message"] = message
    return found
