"""What operators may do on the console: each act is one call to the conductor or to the master that leads."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Final, NamedTuple

import msgspec

from mooncache.errors import InvalidArgument
from mooncache.kvcache.instance_role import InstanceRole

BODY_BYTES_MAX: Final = 4096
COPIES_MAX: Final = 64
_NAME_CHARS_MAX: Final = 256


class ActKind(StrEnum):
    """The acts of a page, in the words of the commands that do the same, where there is one."""

    DRAIN_INSTANCE = "instance drain"
    UNDRAIN_INSTANCE = "instance undrain"
    SET_ROLE = "instance role"
    DRAIN_NODE = "drain"
    UNDRAIN_NODE = "drain --cancel"
    COPY_PREFIX = "prefix copy"
    PIN_PREFIX = "prefix pin"
    EVICT_PREFIX = "prefix evict"


class ConsoleAct(NamedTuple):
    """One act on an instance, a node, or a hot prefix, whose name is a number in hexadecimal.

    role: what an instance becomes; None for other acts. copies: how many nodes a prefix should be on; 0 for others.
    """

    kind: ActKind
    name: str
    role: InstanceRole | None = None
    copies: int = 0

    @property
    def prefix_name(self) -> int:
        """The number of the hot prefix; 0: it is an act on something else."""
        return int(self.name, 16) if self.kind in _OF_PREFIXES else 0

    @property
    def command(self) -> list[str]:
        """The command that does the same, and its arguments, as the audit log has them."""
        words, _, option = self.kind.partition(" --")
        more = (f"--{option}" if option else "", self.role or "", str(self.copies or ""))
        return [words, self.name, *filter(None, more)]


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    act: ActKind
    name: str
    role: InstanceRole | None = None
    copies: Annotated[int, msgspec.Meta(ge=1, le=COPIES_MAX)] | None = None


_OF_PREFIXES: Final = frozenset({ActKind.COPY_PREFIX, ActKind.PIN_PREFIX, ActKind.EVICT_PREFIX})
_PREFIX: Final = re.compile(r"(?!0+$)[0-9a-f]{1,16}")
_DECODER: Final = msgspec.json.Decoder(_Asked)


def parse(body: bytes) -> ConsoleAct:
    """The act that a page asks for: `{"act": "instance role", "name": "decode-1", "role": "both"}`.

    Raises InvalidArgument for anything else.
    """
    try:
        asked = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"This is no act of the console: {str(error)[:200]}.") from None
    if not 0 < len(asked.name) <= _NAME_CHARS_MAX:
        raise InvalidArgument(f"An act needs a name of 1 to {_NAME_CHARS_MAX} characters.")
    if (asked.role is not None) != (asked.act is ActKind.SET_ROLE):
        raise InvalidArgument(f"`role` belongs to {ActKind.SET_ROLE}, and to no other act.")
    if (asked.copies is not None) != (asked.act is ActKind.COPY_PREFIX):
        raise InvalidArgument(f"`copies` belongs to {ActKind.COPY_PREFIX}, and to no other act.")
    if asked.act in _OF_PREFIXES and not _PREFIX.fullmatch(asked.name):
        raise InvalidArgument("The name of a prefix is a number of up to 16 hexadecimal digits.")
    return ConsoleAct(asked.act, asked.name, asked.role, asked.copies or 0)
