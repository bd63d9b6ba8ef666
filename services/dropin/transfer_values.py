"""What callers of the original's `TransferEngine` pass and get, by its names."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from mooncache.errors import InvalidArgument

SUPPORT_CUDA: Final = False
SUPPORT_EFA: Final = False
SUPPORT_HIP: Final = False
SUPPORT_INTRA_NVLINK: Final = False
SUPPORT_MNNVL: Final = False
SUPPORT_MULTI_PROTOCOL: Final = False
SUPPORT_MUSA: Final = False
"""What the original can be built with. Callers ask before they name such a protocol, or pass memory of a GPU."""
_NAME_BYTES: Final = 2


class TransferOpcode(enum.Enum):
    """Which way a transfer goes, by the original's names."""

    Read = 0
    Write = 1


@dataclass(slots=True)
class TransferNotify:
    """What a peer hears when its bytes are in place."""

    name: str = ""
    msg: str = ""

    def packed(self) -> bytes:
        """As it is sent. Raises InvalidArgument: the name is too long."""
        name = self.name.encode()
        if len(name) >> 16:
            raise InvalidArgument("The name of a notification has 65,535 bytes at most.")
        return len(name).to_bytes(_NAME_BYTES, "little") + name + self.msg.encode()

    @classmethod
    def unpacked(cls, data: bytes) -> TransferNotify:
        """From bytes of a peer, whatever they are."""
        end = _NAME_BYTES + int.from_bytes(data[:_NAME_BYTES], "little")
        return cls(data[_NAME_BYTES:end].decode(errors="replace"), data[end:].decode(errors="replace"))
