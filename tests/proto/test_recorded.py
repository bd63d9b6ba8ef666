"""Control messages that released versions wrote: each field has to mean to the present code what it meant then.

`recorded/<version>.json` has, for each message of the protos, bytes with a value in every field, and what they meant:
names and values. A new release gets a file of its own (`python -m tests.proto.test_recorded 0.2.0`); one that is there
is never changed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from mooncache.proto.v1 import common_pb2, conductor_pb2, master_pb2, store_node_pb2, worker_pb2

FOLDER = Path(__file__).parent / "recorded"
FILES = (common_pb2, conductor_pb2, master_pb2, store_node_pb2, worker_pb2)
RELEASES = sorted(FOLDER.glob("*.json"))
DEPTH_MAX = 4
UNKNOWN_NUMBER = 536_870_911  # the largest number that a field can have: nobody uses it


def messages() -> Iterator[Descriptor]:
    """Every message of the protos, maps' entries aside."""

    def below(descriptor: Descriptor) -> Iterator[Descriptor]:
        if not descriptor.GetOptions().map_entry:
            yield descriptor
        for nested in descriptor.nested_types:
            yield from below(nested)

    for file in FILES:
        for descriptor in file.DESCRIPTOR.message_types_by_name.values():
            yield from below(descriptor)


def filled(descriptor: Descriptor, depth: int = 0) -> Message:
    """A message with a value in every field that differs from its default and from its neighbours'."""
    message = GetMessageClass(descriptor)()
    taken = set()
    for field in descriptor.fields:
        choice = field.containing_oneof
        if choice is not None and choice.name in taken:
            continue
        if choice is not None:
            taken.add(choice.name)
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            key, value = kind.fields
            if value.message_type is None:
                getattr(message, field.name)[scalar(key)] = scalar(value)
            elif depth < DEPTH_MAX:
                getattr(message, field.name)[scalar(key)].CopyFrom(filled(value.message_type, depth + 1))
        elif kind is not None:
            if depth >= DEPTH_MAX:
                continue
            inner = filled(kind, depth + 1)
            if field.is_repeated:
                getattr(message, field.name).append(inner)
            else:
                getattr(message, field.name).CopyFrom(inner)
        elif field.is_repeated:
            getattr(message, field.name).append(scalar(field))
        else:
            setattr(message, field.name, scalar(field))
    return message


def scalar(field: FieldDescriptor) -> Any:
    if field.type == FieldDescriptor.TYPE_ENUM:
        return field.enum_type.values[-1].number
    if field.type == FieldDescriptor.TYPE_BOOL:
        return True
    if field.type == FieldDescriptor.TYPE_STRING:
        return f"s{field.number}"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"b%d" % field.number
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return field.number + 0.5
    return 100 + field.number


def meaning(message: Message) -> dict[str, Any]:
    """Names and values, enums by their numbers: a name may change, a number may not."""
    return dict(
        json_format.MessageToDict(message, preserving_proto_field_name=True, use_integers_for_enums=True)
    )


def record(version: str) -> None:
    """Write the file of a new release."""
    path = FOLDER / f"{version}.json"
    content = {}
    for descriptor in messages():
        message = filled(descriptor)
        content[descriptor.full_name] = {
            "bytes": message.SerializeToString(deterministic=True).hex(),
            "means": meaning(message),
        }
    with path.open("x", encoding="utf-8") as file:  # one that is there stays as it is
        json.dump(content, file, indent=0, sort_keys=True)
        file.write("\n")


@pytest.mark.parametrize("path", RELEASES, ids=[path.stem for path in RELEASES])
def test_what_a_release_wrote_means_the_same(path: Path) -> None:
    here = {descriptor.full_name: descriptor for descriptor in messages()}
    recorded = json.loads(path.read_text(encoding="utf-8"))
    assert len(recorded) > 80
    for name, sample in recorded.items():
        assert name in here, f"{name} is gone; a peer of {path.stem} still sends it"
        message = GetMessageClass(here[name]).FromString(bytes.fromhex(sample["bytes"]))
        assert meaning(message) == sample["means"], name


def test_every_message_is_recorded() -> None:
    """A message or a field that no release has is new: record it with the release that brings it."""
    assert RELEASES
    known = {name for path in RELEASES for name in json.loads(path.read_text(encoding="utf-8"))}
    assert {descriptor.full_name for descriptor in messages()} >= known
    missing = {descriptor.full_name for descriptor in messages()} - known
    assert len(missing) < len(known) / 4, sorted(missing)


@pytest.mark.parametrize("descriptor", list(messages()), ids=lambda descriptor: descriptor.name)
def test_a_newer_peer_is_survived(descriptor: Descriptor) -> None:
    """Fields with numbers that nobody here knows are passed over, and enums keep values without a name."""
    kind = GetMessageClass(descriptor)
    message = filled(descriptor)
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_ENUM and not field.is_repeated and not field.containing_oneof:
            setattr(message, field.name, 99)
    wire = message.SerializeToString(deterministic=True)
    tag = UNKNOWN_NUMBER << 3
    newer = wire + varint(tag) + varint(7) + varint(tag | 2) + varint(3) + b"new"
    found = kind.FromString(newer)
    assert meaning(found) == meaning(message)
    assert found.SerializeToString(deterministic=True).startswith(wire)


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


if __name__ == "__main__":
    record(sys.argv[1])
