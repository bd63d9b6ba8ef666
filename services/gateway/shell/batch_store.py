"""Files and batches on disk: a folder of one gateway, which goes on after a restart where it was.

`files/ID.json` and `batches/ID.json` say what there is, and are replaced as a whole; `files/ID.data` are the bytes;
`batches/ID.done` grows by one line for each request that has ended. A line that a crash cut off is dropped, and its
request is done again. Names on disk are ids that were made here. The methods that read or write many bytes block: call
them in a thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Final, TypeVar

import msgspec

from mooncache.errors import ConfigInvalid, NotFound
from mooncache.gateway.core.batch import BatchUsage, OfflineBatch, Purpose, StoredFile
from mooncache.runtime.logs import Event, get_logger
from mooncache.whole_file import PARTIAL, write_whole

_MODE: Final = 0o600
_LOCK_S: Final = 3.0
_LOCK_LOOK_S: Final = 0.05

log = get_logger(__name__)
T = TypeVar("T")


class DoneLine(msgspec.Struct):
    """One request that has ended: its line of the input, whether it was answered, and its line of a result file."""

    number: int
    answered: bool
    usage: BatchUsage
    entry: msgspec.Raw


_DONE: Final = msgspec.json.Decoder(DoneLine)


class BatchStore:
    """What is in the folder. Raises ConfigInvalid when it cannot be used, or another gateway uses it.

    Attributes: `files` and `batches` by id; `changed` is set when there is something for the duty that runs batches.
    """

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, StoredFile] = {}
        self.batches: dict[str, OfflineBatch] = {}
        self.changed = asyncio.Event()
        self._files, self._batches = folder / "files", folder / "batches"
        try:
            for each in (folder, self._files, self._batches):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
        except OSError as error:
            raise ConfigInvalid(f"gateway.batch_dir {folder} cannot be used: {error.strerror}.") from None
        if not _locked(self._lock):
            os.close(self._lock)
            text = f"gateway.batch_dir {folder} is in use by another gateway: each needs a folder of its own."
            raise ConfigInvalid(text) from None
        self._load()

    def close(self) -> None:
        """Let another process have the folder. Harmless to repeat."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _load(self) -> None:
        for folder in (self._files, self._batches):
            for left in folder.glob(f"*{PARTIAL}"):
                left.unlink(missing_ok=True)
        self.files = {each.id: each for each in _all(self._files, StoredFile)}
        self.batches = {each.id: each for each in _all(self._batches, OfflineBatch)}
        for name in [name for name in self.files if not self._data(name).exists()]:
            del self.files[name]
        for left in self._files.glob("*.data"):
            if left.stem not in self.files:
                left.unlink(missing_ok=True)  # of a file that was never complete

    # --- files

    def file(self, tenant: str, file_id: str) -> StoredFile:
        """A tenant's file. Raises NotFound, also where it is another tenant's."""
        found = self.files.get(file_id)
        if found is None or found.tenant != tenant:
            raise NotFound(f"No such File object: {file_id[:64]}.")
        return found

    def tenant_bytes(self, tenant: str) -> int:
        """The bytes of all files of a tenant."""
        return sum(each.size_bytes for each in self.files.values() if each.tenant == tenant)

    def begin(self) -> IO[bytes]:
        """A file in the folder that has no name yet."""
        return tempfile.NamedTemporaryFile(dir=self._files, suffix=PARTIAL, delete=False)

    def keep(self, written: IO[bytes], found: StoredFile) -> None:
        """Make what was written a file that lasts. Blocks; raises OSError."""
        written.flush()
        os.fsync(written.fileno())
        found.size_bytes = written.tell()
        written.close()
        os.replace(written.name, self._data(found.id))
        write_whole(self._files / f"{found.id}.json", msgspec.json.encode(found), to_disk=True)
        self.files[found.id] = found

    def drop(self, written: IO[bytes]) -> None:
        """Forget what was written."""
        written.close()
        Path(written.name).unlink(missing_ok=True)

    def delete_file(self, file_id: str) -> None:
        """Harmless to repeat."""
        self.files.pop(file_id, None)
        (self._files / f"{file_id}.json").unlink(missing_ok=True)
        self._data(file_id).unlink(missing_ok=True)

    def lines(self, file_id: str) -> Iterator[bytes]:
        """The lines of a file; each is in memory alone. Raises OSError."""
        with self._data(file_id).open("rb") as opened:
            yield from opened

    def pieces(self, file_id: str) -> IO[bytes]:
        """The file, open for reading. Raises OSError."""
        return self._data(file_id).open("rb")

    def _data(self, file_id: str) -> Path:
        return self._files / f"{file_id}.data"

    def in_use(self) -> set[str]:
        """Files that batches under way read."""
        return {each.input_file_id for each in self.batches.values() if not each.has_ended}

    # --- batches

    def batch(self, tenant: str, batch_id: str) -> OfflineBatch:
        """A tenant's batch. Raises NotFound, also where it is another tenant's."""
        found = self.batches.get(batch_id)
        if found is None or found.tenant != tenant:
            raise NotFound(f"No batch found with id {batch_id[:64]!r}.")
        return found

    def save(self, batch: OfflineBatch) -> None:
        """Keep a batch as it is now. Raises OSError."""
        write_whole(self._batches / f"{batch.id}.json", msgspec.json.encode(batch), to_disk=True)
        self.batches[batch.id] = batch

    def delete_batch(self, batch_id: str) -> None:
        """Harmless to repeat."""
        self.batches.pop(batch_id, None)
        for kind in ("json", "done"):
            (self._batches / f"{batch_id}.{kind}").unlink(missing_ok=True)

    def add_done(self, batch_id: str, done: DoneLine) -> None:
        """Keep a request's end. Raises OSError; nothing of it counts then."""
        path = self._batches / f"{batch_id}.done"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE)
        try:
            size = os.fstat(handle).st_size
            data = msgspec.json.encode(done) + b"\n"
            if os.write(handle, data) != len(data):
                os.ftruncate(handle, size)
                raise OSError("the disk is full")
        finally:
            os.close(handle)

    def done(self, batch_id: str) -> Iterator[DoneLine]:
        """The requests that have ended; a line that was cut off ends the file. Raises OSError."""
        path = self._batches / f"{batch_id}.done"
        if not path.exists():
            return
        end = 0
        with path.open("r+b") as opened:
            for line in opened:
                try:
                    found = _DONE.decode(line) if line.endswith(b"\n") else None
                except msgspec.DecodeError:
                    found = None
                if found is None:
                    opened.truncate(end)
                    log.warning(Event.BATCH_LINE_LOST, batch_id=batch_id, from_byte=end)
                    return
                end += len(line)
                yield found

    def write_results(self, batch: OfflineBatch, created_at: int, expires_at: int) -> None:
        """Make the output and the error file of what has ended, each where it has lines. Blocks; raises OSError."""
        for name, answered in (("output", True), ("error", False)):
            entries = (each.entry for each in self.done(batch.id) if each.answered is answered)
            found = self._result(batch, f"{batch.id}_{name}.jsonl", entries, created_at, expires_at)
            setattr(batch, f"{name}_file_id", found)

    def _result(
        self,
        batch: OfflineBatch,
        filename: str,
        entries: Iterable[msgspec.Raw],
        created_at: int,
        expires_at: int,
    ) -> str | None:
        written = self.begin()
        for entry in entries:
            written.write(bytes(entry) + b"\n")
        if not written.tell():
            self.drop(written)
            return None
        found = StoredFile(
            id=new_id("file-"),
            tenant=batch.tenant,
            size_bytes=0,
            created_at=created_at,
            expires_at=expires_at,
            filename=filename,
            purpose=Purpose.BATCH_OUTPUT,
        )
        self.keep(written, found)
        return found.id


def new_id(prefix: str) -> str:
    """An id that cannot be guessed; later ones are greater."""
    return f"{prefix}{time.time_ns() // 1000:014x}{secrets.token_hex(8)}"


def _locked(handle: int) -> bool:
    """Whether the lock was to be had; the former process may take a moment to end."""
    until_s = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > until_s:
                return False
            time.sleep(_LOCK_LOOK_S)


def _all(folder: Path, kind: type[T]) -> Iterator[T]:
    """What the folder's documents say; those that cannot be read are left alone, and said."""
    for path in sorted(folder.glob("*.json")):
        try:
            yield msgspec.json.decode(path.read_bytes(), type=kind)
        except (OSError, msgspec.DecodeError) as error:
            log.error(Event.BATCH_UNREADABLE, path=str(path), reason=str(error))
