"""A store of files that keeps every promise, and stores that lie on purpose: each breaks one promise in one way.

A value is a file: its length and a checksum, then its bytes. Its name is the hash of its key, so any process that
knows the folder is a client. A node that is stopped or dead is a marker file in the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import secrets
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_HEAD = struct.Struct("<QI")
_DOWN = "node-down"
KEY_BYTES_MAX = 65_536


class PartialFile:
    """A value that becomes visible by a rename."""

    def __init__(self, store: FileStore, key: bytes, size_bytes: int) -> None:
        self._store, self._key, self._bytes = store, key, bytearray(size_bytes)
        self._missing, self._open = size_bytes, True

    def write(self, offset: int, data: bytes) -> None:
        assert self._open, "it was abandoned"
        self._bytes[offset : offset + len(data)] = data
        self._missing -= len(data)

    def commit(self) -> None:
        assert self._open and not self._missing, "it is not whole"
        self._store.put(self._key, self._bytes)

    def abandon(self) -> None:
        self._open = False


class FileStore:
    """Keeps every promise."""

    call_limit_s = 2.0

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._folder = Path(str(config["folder"]))
        self._folder.mkdir(exist_ok=True)
        self._capacity = int(config.get("capacity", 8 << 20))
        self._config = dict(config)
        self._lock = threading.Lock()

    def path(self, key: bytes) -> Path:
        return self._folder / hashlib.sha256(key).hexdigest()

    def check(self, key: bytes) -> None:
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise ValueError("no such key")
        if (self._folder / _DOWN).exists():
            raise TimeoutError("the node does not answer")

    def values(self) -> Iterator[Path]:
        return (path for path in self._folder.iterdir() if len(path.name) == 64)

    # --- the calls -------------------------------------------------------------------------------------------

    def put(self, key: bytes, value: bytes | bytearray | memoryview) -> None:
        self.check(key)
        data = bytes(value)
        self.make_room(len(data))
        partial = self._folder / f"partial-{secrets.token_hex(8)}"
        partial.write_bytes(_HEAD.pack(len(data), zlib.crc32(data)) + data)
        partial.replace(self.path(key))

    def make_room(self, size: int) -> None:
        if size > self._capacity:
            raise MemoryError("it does not fit")
        with self._lock:
            sizes: list[tuple[int, int, Path]] = []
            for path in self.values():
                with contextlib.suppress(FileNotFoundError):
                    found = path.stat()
                    sizes.append((found.st_mtime_ns, found.st_size - _HEAD.size, path))
            used = sum(each[1] for each in sizes)
            for _, bytes_of, path in sorted(sizes, key=lambda each: each[0]):
                if used + size <= self._capacity:
                    break
                path.unlink(missing_ok=True)
                used -= bytes_of

    def get(self, key: bytes) -> bytes | None:
        self.check(key)
        try:
            raw = self.path(key).read_bytes()
        except FileNotFoundError:
            return None
        return self.opened(raw)

    def opened(self, raw: bytes) -> bytes | None:
        if len(raw) < _HEAD.size:
            return None
        size, checksum = _HEAD.unpack_from(raw)
        data = raw[_HEAD.size :]
        return data if len(data) == size and zlib.crc32(data) == checksum else None

    def get_into(self, key: bytes, destination: memoryview) -> int | None:
        found = self.get(key)
        if found is None:
            return None
        if len(found) > len(destination):
            raise BufferError("it does not fit")
        destination[: len(found)] = found
        return len(found)

    def exist(self, key: bytes) -> bool:
        self.check(key)
        return self.path(key).exists()

    def remove(self, key: bytes) -> bool:
        self.check(key)
        try:
            self.path(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def close(self) -> None:
        pass

    # --- the hooks -------------------------------------------------------------------------------------------

    def attach_config(self) -> dict[str, Any]:
        return self._config

    def capacity_bytes(self) -> int:
        return self._capacity

    def begin(self, key: bytes, size_bytes: int) -> PartialFile:
        self.check(key)
        return PartialFile(self, key, size_bytes)

    def damage(self, rng: random.Random) -> int:
        flipped = 0
        for path in self.values():
            raw = bytearray(path.read_bytes())
            if len(raw) > _HEAD.size:
                raw[rng.randrange(_HEAD.size, len(raw))] ^= 1 << rng.randrange(8)
                path.write_bytes(raw)
                flipped += 1
        return flipped

    def truncate(self, rng: random.Random) -> int:
        cut = 0
        for path in self.values():
            size = path.stat().st_size
            keep = rng.randrange(size)
            os.truncate(path, keep)
            cut += size - keep
        return cut

    def stop_node(self) -> None:
        (self._folder / _DOWN).touch()

    def resume_node(self) -> None:
        (self._folder / _DOWN).unlink()

    def kill_node(self) -> None:
        for path in list(self.values()):
            path.unlink()
        self.stop_node()

    def restart_node(self) -> None:
        self.resume_node()


class BareStore:
    """The calls alone, in a dictionary: promises that need a hook are not applicable."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._values: dict[bytes, bytes] = {}

    def put(self, key: bytes, value: bytes | bytearray | memoryview) -> None:
        self._values[key] = bytes(value)

    def get(self, key: bytes) -> bytes | None:
        return self._values.get(key)

    def get_into(self, key: bytes, destination: memoryview) -> int | None:
        found = self.get(key)
        if found is None:
            return None
        if len(found) > len(destination):
            raise BufferError("it does not fit")
        destination[: len(found)] = found
        return len(found)

    def exist(self, key: bytes) -> bool:
        return key in self._values

    def remove(self, key: bytes) -> bool:
        return self._values.pop(key, None) is not None

    def close(self) -> None:
        pass


# --- lies: the name of each class says what it does ----------------------------------------------------------------


class IgnoresTheLastByteOfKeys(FileStore):
    def path(self, key: bytes) -> Path:
        return super().path(key[:-1] if len(key) > 1 else key)


class EndsKeysAtAZero(FileStore):
    def path(self, key: bytes) -> Path:
        return super().path(key.partition(b"\0")[0])


class CutsLongKeys(FileStore):
    def path(self, key: bytes) -> Path:
        return super().path(key[:255])


class LosesTheLastByte(FileStore):
    def get(self, key: bytes) -> bytes | None:
        found = super().get(key)
        return found[:-1] + b"\0" if found and len(found) > 65_000 else found


class ReadsEmptyAsZero(FileStore):
    def put(self, key: bytes, value: bytes | bytearray | memoryview) -> None:
        super().put(key, value if len(value) else b"\0")


class ReportsHalfAsWhole(FileStore):
    def get_into(self, key: bytes, destination: memoryview) -> int | None:
        found = self.get(key)
        if found is None:
            return None
        count = min(len(found), len(destination))
        destination[:count] = found[:count]
        return count


class RemovesForItselfOnly(FileStore):
    """The other client remembers what it has read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._seen: dict[bytes, bytes] = {}

    def get(self, key: bytes) -> bytes | None:
        found = super().get(key)
        if found is not None:
            self._seen[key] = found
        return self._seen.get(key)

    def remove(self, key: bytes) -> bool:
        self._seen.pop(key, None)
        return super().remove(key)


class ShowsWhatIsNotCommitted(FileStore):
    def begin(self, key: bytes, size_bytes: int) -> PartialFile:
        super().put(key, bytes(size_bytes))
        return super().begin(key, size_bytes)


class WritesInPlace(FileStore):
    """No rename, no checksum, and slow: who dies in the middle leaves a piece."""

    def put(self, key: bytes, value: bytes | bytearray | memoryview) -> None:
        self.check(key)
        half = len(value) // 2
        with self.path(key).open("wb") as file:
            file.write(_HEAD.pack(0, 0) + value[:half])
            file.flush()
            threading.Event().wait(0.5 if half > 1000 else 0)
            file.write(value[half:])

    def opened(self, raw: bytes) -> bytes | None:
        return raw[_HEAD.size :]


class KeepsTheCallersBuffer(BareStore):
    def put(self, key: bytes, value: bytes | bytearray | memoryview) -> None:
        self._values[key] = value  # type: ignore[assignment]

    def get(self, key: bytes) -> bytes | None:
        found = self._values.get(key)
        return None if found is None else bytes(found)


class WritesLate(BareStore):
    """A destination is written once more by the next call."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._late: tuple[memoryview, bytes] | None = None

    def get_into(self, key: bytes, destination: memoryview) -> int | None:
        if self._late is not None:
            room, found = self._late
            room[: len(found)] = found
        count = super().get_into(key, destination)
        self._late = (destination, self._values[key]) if count else None
        return count


class EvictsUnderReaders(FileStore):
    """The room of what it evicts is used again while the old key still leads there."""

    def make_room(self, size: int) -> None:
        paths = sorted(self.values(), key=lambda path: path.stat().st_mtime_ns)
        if sum(path.stat().st_size for path in paths) + size > self._capacity:
            for path in paths[:4]:
                path.write_bytes(paths[-1].read_bytes())


class HoldsMoreThanItSays(FileStore):
    def make_room(self, size: int) -> None:
        pass


class TakesWhatCannotFit(FileStore):
    def make_room(self, size: int) -> None:
        super().make_room(min(size, self._capacity))


class AnswersWhileStopped(FileStore):
    """A node that does not answer is taken for zeros."""

    def get(self, key: bytes) -> bytes | None:
        try:
            return super().get(key)
        except TimeoutError:
            return bytes(50_000)


class HangsWhileStopped(FileStore):
    call_limit_s = 0.2

    def check(self, key: bytes) -> None:
        if (self._folder / _DOWN).exists():
            threading.Event().wait(60)
        super().check(key)


class NeverComesBack(FileStore):
    call_limit_s = 0.2

    def restart_node(self) -> None:
        pass  # it stays down


class ComparesNoChecksum(FileStore):
    def opened(self, raw: bytes) -> bytes | None:
        return raw[_HEAD.size :] or None


class MixesValues(BareStore):
    """A value that comes after another one is read as half of each."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._former: dict[bytes, bytes] = {}

    def put(self, key: bytes, value: bytes | bytearray | memoryview) -> None:
        self._former[key] = self._values.get(key) or self._former.get(key, b"")
        super().put(key, value)

    def get(self, key: bytes) -> bytes | None:
        found, former = super().get(key), self._former.get(key)
        if found is None or not former:
            return found
        half = len(found) // 2
        return found[:half] + former[half : len(found)]


class LosesAPutNowAndThen(BareStore):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._puts = 0

    def put(self, key: bytes, value: bytes | bytearray | memoryview) -> None:
        self._puts += 1
        if self._puts % 50:
            super().put(key, value)
