"""Values of messages' enums as people and documents read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper


def word_of(enum: EnumTypeWrapper, number: int) -> str:
    """A value of a message's enum as documents have it: NODE_STATE_ACTIVE is "active", an unknown one "unknown"."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return enum.Name(number).removeprefix(prefix).lower() if number and number in enum.values() else "unknown"
