"""What has to be done to a Debian kernel package before it boots fast and without a disk.

The compressed boot image is unpacked here, once, instead of in the guest at each start; the modules are put
into the order that their own `depends=` lines ask for, so the guest needs neither depmod nor modprobe.
"""

from __future__ import annotations

import lzma
import re
from pathlib import Path

XZ_MAGIC = b"\xfd7zXZ\0"
# Offsets of the x86 boot protocol: sectors of the set-up code, then where the payload lies behind it.
SETUP_SECTORS_AT, PAYLOAD_OFFSET_AT, PAYLOAD_LENGTH_AT = 0x1F1, 0x248, 0x24C


def unpack_image(image: bytes) -> bytes:
    """The ELF kernel inside a bzImage. ValueError when it is compressed by something else than xz."""

    def word(at: int) -> int:
        return int.from_bytes(image[at : at + 4], "little")

    begin = ((image[SETUP_SECTORS_AT] or 4) + 1) * 512 + word(PAYLOAD_OFFSET_AT)
    payload = image[begin : begin + word(PAYLOAD_LENGTH_AT)]
    if not payload.startswith(XZ_MAGIC):
        raise ValueError(f"the kernel's payload begins with {payload[:6].hex()}, not with xz")
    return lzma.LZMADecompressor().decompress(payload)


def read_module(path: Path) -> bytes:
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def module_name(path: Path) -> str:
    return re.sub(r"\.ko(\.xz)?$", "", path.name).replace("-", "_")


def load_order(folder: Path, wanted: list[str]) -> list[Path]:
    """Files of the wanted modules and of all they need, needed ones first. Built-in ones have no file."""
    known = {module_name(path): path for path in folder.rglob("*.ko*")}
    order: list[Path] = []

    def add(name: str) -> None:
        path = known.get(name.replace("-", "_"))
        if path is None or path in order:
            return
        depends = re.search(rb"\0depends=([^\0]*)\0", read_module(path))
        for needed in depends[1].decode().split(",") if depends and depends[1] else []:
            add(needed)
        order.append(path)

    for name in wanted:
        add(name)
    return order
