"""Writes the one archive format that Linux unpacks at boot: "newc" cpio, uncompressed.

Parents are made as they are needed, so a file never comes before its folder.
"""

from __future__ import annotations

import stat

MAGIC = b"070701"
TRAILER = "TRAILER!!!"


class Archive:
    """Entries in the order they were added; `finish` gives the bytes."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._names: set[str] = set()

    def _entry(self, name: str, mode: int, data: bytes, time_s: int = 0) -> None:
        encoded = name.encode() + b"\0"
        inode = len(self._names) + 1
        fields = (inode, mode, 0, 0, 1, time_s, len(data), 0, 0, 0, 0, len(encoded), 0)
        self._bytes += MAGIC + b"".join(b"%08X" % field for field in fields) + encoded
        self._pad()
        self._bytes += data
        self._pad()

    def _pad(self) -> None:
        self._bytes += b"\0" * (-len(self._bytes) % 4)

    def folder(self, path: str) -> None:
        walked = ""
        for part in path.strip("/").split("/"):
            walked = f"{walked}/{part}".lstrip("/")
            if walked and walked not in self._names:
                self._names.add(walked)
                self._entry(walked, stat.S_IFDIR | 0o755, b"")

    def file(self, path: str, data: bytes, mode: int = 0o644, time_s: int = 0) -> None:
        if "/" in path:
            self.folder(path.rsplit("/", 1)[0])
        self._names.add(path)
        self._entry(path, stat.S_IFREG | mode, data, time_s)

    def link(self, path: str, target: str) -> None:
        self._names.add(path)
        self._entry(path, stat.S_IFLNK | 0o777, target.encode())

    def finish(self) -> bytes:
        self._entry(TRAILER, 0, b"")
        return bytes(self._bytes)
