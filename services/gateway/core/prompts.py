"""The field `prompt` of text completions: a text, a list of texts, of tokens, or of lists of tokens."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from mooncache.gateway.core.faults import bad_request

_Tokens = list[Annotated[int, Meta(ge=0, lt=1 << 32)]]
_SHAPES: Final = "a string, a list of strings, of tokens, or of lists of tokens"


def count(prompt: Any, *, embedded: bool) -> int:
    """Number of prompts. `embedded`: the body has prompt embeddings, so there need not be one. Raises Refusal."""
    if isinstance(prompt, str) or (prompt is None and embedded):
        return 1
    if prompt is None:
        raise bad_request(f"`prompt` is missing; it is {_SHAPES}.", "prompt")
    if not isinstance(prompt, list) or not prompt:
        raise bad_request(f"`prompt` has to be {_SHAPES}.", "prompt")
    first = prompt[0]
    kind: Any = list[str] if isinstance(first, str) else list[_Tokens] if isinstance(first, list) else _Tokens
    try:
        _check(prompt, kind)
    except msgspec.ValidationError as error:
        raise bad_request(f"`prompt` has to be one kind of list all through: {error}.", "prompt") from None
    if isinstance(first, list) and not all(prompt):
        raise bad_request("`prompt` has an empty list of tokens.", "prompt")
    return 1 if kind is _Tokens else len(prompt)


def longest_ids(prompt: Any) -> int:
    """Tokens of the longest prompt that comes as token ids, known without reading it; 0 when none does."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], str):
        return 0
    return max(map(len, prompt)) if isinstance(prompt[0], list) else len(prompt)


def _check(prompt: list[Any], kind: Any) -> None:
    try:
        msgspec.convert(prompt, kind)
    except msgspec.ValidationError:
        msgspec.convert(_whole(prompt), kind)


def _whole(prompt: list[Any]) -> list[Any]:
    """With 5.0 as 5: to JSON they are the same."""
    return [_whole(item) if isinstance(item, list) else whole(item) for item in prompt]


def whole(value: Any) -> Any:
    """A whole number for a float that is one; everything else as it is."""
    return int(value) if type(value) is float and value.is_integer() else value
