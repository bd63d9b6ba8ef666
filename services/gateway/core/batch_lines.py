"""The lines of a batch's file: which of them are requests, and in which order they are sent.

A line that is no request fails by itself. Requests are sent in the order of their prompts, so that neighbours share
leading blocks and find them in a cache: whoever begins alike is asked one after another, whatever the file's order is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from mooncache.gateway.core.batch import BatchFault

CUSTOM_ID_CHARS_MAX: Final = 512
MODEL_CHARS_MAX: Final = 256
BLANK: Final = b"\r\n \t"  # around a line, and what an empty one is made of


class BatchLine(msgspec.Struct):
    """A line that is a request. `body` is its own JSON; `prompt_key` begins alike where prompts begin alike."""

    number: int
    custom_id: str
    body: bytes
    prompt_key: bytes


class BadLine(msgspec.Struct):
    """A line that is none. `custom_id` as far as it can be read."""

    fault: BatchFault
    custom_id: str | None = None


class _FileLine(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_DECODER: Final = msgspec.json.Decoder(_FileLine)
_BODY: Final = msgspec.json.Decoder(dict[str, Any])


def read_line(data: bytes, number: int, endpoint: str) -> BatchLine | BadLine:
    """One line of the file, counted from 1. Broken ones are values, not errors."""
    try:
        data.decode("utf-8")
        line = _DECODER.decode(data)
        body = _BODY.decode(line.body)
    except UnicodeDecodeError as error:
        return _bad(number, "invalid_json_line", f"It is not UTF-8 (byte {error.start}).", None)
    except msgspec.ValidationError as error:
        return _bad(number, "invalid_request", f"It is no request: {error}.", _custom_id(data))
    except (msgspec.DecodeError, RecursionError) as error:
        return _bad(number, "invalid_json_line", f"It is no JSON: {error}.", None)
    name = line.custom_id
    if not name or len(name) > CUSTOM_ID_CHARS_MAX:
        return _bad(
            number, "invalid_custom_id", f"custom_id has 1 to {CUSTOM_ID_CHARS_MAX} characters.", None
        )
    if line.method != "POST":
        return _bad(number, "invalid_method", "The method of a request is POST.", name)
    if line.url != endpoint:
        text = f"Its url is {line.url[:100]!r}; all requests of this batch go to {endpoint}."
        return _bad(number, "mismatched_url", text, name)
    if body.get("stream"):
        return _bad(number, "stream_not_supported", "A request of a batch has no `stream`.", name)
    model = body.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MODEL_CHARS_MAX:
        return _bad(number, "model_missing", "`model` is missing.", name)
    return BatchLine(number, name, bytes(line.body), _prompt_key(model, body))


def named_twice(line: BatchLine) -> BadLine:
    """A line whose custom_id an earlier one has."""
    text = "An earlier line has the same custom_id."
    return _bad(line.number, "duplicate_custom_id", text, line.custom_id)


def prompt_order(prompt_keys: Sequence[bytes]) -> list[int]:
    """The places of the prompts in the order in which they are sent: those that begin alike are neighbours.

    Sorted texts are a walk through the tree of their prefixes, branch after branch, so that a prefix is needed in one
    stretch and never again after it.
    """
    return sorted(range(len(prompt_keys)), key=lambda place: (prompt_keys[place], place))


def _bad(number: int, code: str, text: str, custom_id: str | None) -> BadLine:
    return BadLine(BatchFault(code, f"Line {number}: {text}", number), custom_id)


def _custom_id(data: bytes) -> str | None:
    try:
        found = _BODY.decode(data).get("custom_id")
    except (msgspec.DecodeError, RecursionError):
        return None
    return found[:CUSTOM_ID_CHARS_MAX] if isinstance(found, str) else None


def _prompt_key(model: str, body: dict[str, Any]) -> bytes:
    """Chat templates put tools before messages, so they are compared first."""
    prompt = body.get("prompt")
    text = prompt.encode() if isinstance(prompt, str) else msgspec.json.encode(prompt)
    if "messages" in body:
        text = msgspec.json.encode([body.get("tools"), body["messages"]])
    return b"\0".join((model.encode(), text))
