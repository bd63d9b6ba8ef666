"""Control calls of which a test has the name only."""

from __future__ import annotations

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from mooncache.runtime.rpc import methods_of


def answer_of(service: ServiceDescriptor, method: str) -> type[Message]:
    """The message that a call answers with."""
    return methods_of(service)[method].response_class
