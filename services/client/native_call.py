"""Calls into the native core, with what it refuses as typed errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mooncache.errors import InvalidArgument, error_for

P = ParamSpec("P")
T = TypeVar("T")


def call_native(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the native core and type what it refuses: ValueError(sentence), RuntimeError(code, name, message)."""
    try:
        return call(*args, **kwargs)
    except ValueError as error:
        raise InvalidArgument(_sentence(str(error))) from None
    except RuntimeError as error:
        if len(error.args) != 3 or not isinstance(error.args[0], int):
            raise
        code, _, message = error.args
        raise error_for(code, _sentence(message)) from None


def _sentence(text: str) -> str:
    """Native messages begin small and end open; people read sentences."""
    text = text.strip()
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
