"""What travels at the join port: three frames of JSON inside TLS 1.3, each behind its length (4 bytes, big endian).

    inviting -> joining    JoinGreeting     version, nonce
    joining -> inviting    SealedMessage    name of the invitation, nonce, JoinRequest, proof
    inviting -> joining    SealedMessage    JoinAnswer, proof; or JoinRefusal
    joining -> inviting    JoinDone         everything is in place

Bytes from either side are hostile until a proof was right, and checked against limits afterwards, too.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from mooncache.cluster.joining.core.code import NONCE_BYTES
from mooncache.cluster.joining.core.invitation import RefusalReason
from mooncache.errors import ProtocolError
from mooncache.runtime.certificates import NAMES_MAX, REQUEST_CHARS_MAX

JOIN_PORT: Final = 7900
VERSION: Final = 1
FRAME_BYTES_MAX: Final = 1 << 16
LENGTH_BYTES: Final = 4
_SETTINGS_MAX: Final = 64
_TEXT_CHARS_MAX: Final = 1024
Frame = TypeVar("Frame", bound=msgspec.Struct)


class JoinGreeting(msgspec.Struct, tag="greeting"):
    """The inviting machine's first word."""

    version: int
    nonce: bytes


class JoinRequest(msgspec.Struct):
    """What the joining machine wants: a certificate for `names` (the first is how others reach it)."""

    names: list[str]
    request: str
    """Request for a certificate (PEM)."""


class JoinAnswer(msgspec.Struct):
    """What a machine needs to be one of the cluster."""

    authority: str
    """Certificate of the authority (PEM)."""
    certificate: str
    token: str
    master_targets: list[str]
    conductor_target: str = ""
    settings: dict[str, str] = {}
    """Settings that engines of the cluster share, "section.field" to value."""


class SealedMessage(msgspec.Struct, tag="sealed"):
    """A message with its sender's proof. `invitation` and `nonce` are empty in an answer."""

    body: bytes
    proof: bytes
    invitation: str = ""
    nonce: bytes = b""


class JoinRefusal(msgspec.Struct, tag="refusal"):
    """Why the machine may not join."""

    reason: RefusalReason


class JoinDone(msgspec.Struct, tag="done"):
    """The joining machine has written everything."""


def packed(frame: msgspec.Struct) -> bytes:
    """A frame with its length."""
    data = msgspec.json.encode(frame)
    if len(data) > FRAME_BYTES_MAX:
        raise ProtocolError(f"A message of {len(data)} bytes is too long for the join port.")
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def frame_bytes(length: bytes) -> int:
    """Length of the frame that follows. Raises ProtocolError when it is too long."""
    size = int.from_bytes(length, "big")
    if not 0 < size <= FRAME_BYTES_MAX:
        raise ProtocolError("The other side does not speak the protocol of the join port.")
    return size


def parsed(data: bytes, kind: type[Frame]) -> Frame:
    """A frame or a body. Raises ProtocolError for anything else."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise ProtocolError("The other side does not speak the protocol of the join port.") from None


def checked_nonce(nonce: bytes) -> bytes:
    """A nonce of the right length. Raises ProtocolError."""
    if len(nonce) != NONCE_BYTES:
        raise ProtocolError("The other side does not speak the protocol of the join port.")
    return nonce


def checked_answer(answer: JoinAnswer) -> JoinAnswer:
    """The answer within its limits. Raises ProtocolError."""
    texts = [*answer.master_targets, answer.conductor_target, *answer.settings, *answer.settings.values()]
    if (
        not 0 < len(answer.master_targets) <= NAMES_MAX
        or len(answer.settings) > _SETTINGS_MAX
        or max(map(len, texts)) > _TEXT_CHARS_MAX
    ):
        raise ProtocolError("What the first machine handed over is not what this version expects.")
    return answer


def checked_request(request: JoinRequest) -> JoinRequest:
    """The request within its limits. Raises ProtocolError."""
    if not 0 < len(request.names) <= NAMES_MAX or len(request.request) > REQUEST_CHARS_MAX:
        raise ProtocolError("The other side does not speak the protocol of the join port.")
    return request
