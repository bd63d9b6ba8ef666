"""A strategy that makes any request of an RPC: every field absent, usual, at an edge, or nonsense."""

from __future__ import annotations

import string
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

_BITS = {
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_SINT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_SINT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_FIXED32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.TYPE_FIXED64: (0, (1 << 64) - 1),
}
_LISTED_MAX, _DEPTH_MAX = 3, 3


def any_message(kind: type[Message], known: dict[str, list[Any]]) -> st.SearchStrategy[Message]:
    """known: by name of a field (or Message.field), values that mean something there: ids, keys of blocks."""
    return _fields(kind.DESCRIPTOR, known, 0).map(lambda fields: kind(**fields))


@st.composite
def _fields(draw: Any, descriptor: Any, known: dict[str, list[Any]], depth: int) -> dict[str, Any]:
    found = {}
    for field in descriptor.fields:
        if not draw(st.booleans()):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            found[field.name] = draw(
                st.dictionaries(_value(key, known, depth), _value(value, known, depth), max_size=2)
            )
        elif field.is_repeated:
            found[field.name] = draw(st.lists(_value(field, known, depth), max_size=_LISTED_MAX))
        else:
            found[field.name] = draw(_value(field, known, depth))
    return found


def _value(field: Any, known: dict[str, list[Any]], depth: int) -> st.SearchStrategy[Any]:
    usual = known.get(f"{field.containing_type.name}.{field.name}") or known.get(field.name)
    anything = _anything(field, known, depth)
    return st.sampled_from(usual) | anything if usual else anything


def _anything(field: Any, known: dict[str, list[Any]], depth: int) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return _fields(field.message_type, known, depth + 1) if depth < _DEPTH_MAX else st.just({})
    if field.type == FieldDescriptor.TYPE_ENUM:
        return st.integers(-1, len(field.enum_type.values) + 1)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=100) | st.integers(0, 3).flatmap(
            lambda n: st.binary(min_size=32 * n, max_size=32 * n)
        )
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.text(string.printable, max_size=20) | st.text(max_size=8)
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return st.floats(width=32)
    low, high = _BITS[field.type]
    return st.sampled_from([low, high, 0, 1]) | st.integers(low, high) | st.integers(0, 100)
