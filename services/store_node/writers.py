"""Who wrote the node's blocks: what the native server knows of writers, their names in a file, and the recall.

The native server and its disks know a writer by its number. What the number is called lies in a file beside the
tenants' limits, because a name is only heard from a client that connects. A file that cannot be read or written
changes nothing but names, and the log says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from mooncache.auth import tenant_id
from mooncache.client.native_call import call_native
from mooncache.errors import MooncacheError
from mooncache.runtime.logs import Event, get_logger
from mooncache.whole_file import write_whole

WRITERS_MAX: Final = 480
"""Writers that a node knows at once, as the native server says it."""
TEXT_BYTES_MAX: Final = 64
_FILE_BYTES_MAX: Final = 256 << 10
_ID_MAX: Final = (1 << 64) - 1

log = get_logger(__name__)
WriterFacts = dict[str, Any]


class RecallCore(Protocol):
    """What removes the blocks of a writer, and refuses further ones, in the native StoreServer."""

    def recall(
        self,
        writer: int,
        cursor: int,
        *,
        since_unix_s: int = 0,
        until_unix_s: int = 0,
        dry_run: bool = False,
        refuse_s: int = 0,
    ) -> dict[str, int]: ...


class WriterCore(RecallCore, Protocol):
    """The part of the native StoreServer that this needs."""

    def writers(self) -> list[WriterFacts]: ...
    def writers_refused(self) -> int: ...
    def know_writer(self, writer_id: int, instance: str, build: str, started_unix_s: int, /) -> bool: ...
    def origins(self, tenant_id: int, keys: bytes, /) -> list[tuple[int, int]]: ...
    def set_origins(self, tenant_id: int, keys: bytes, origins: list[tuple[int, int]], /) -> list[int]: ...


class NodeWriters:
    """The writers of one node. Its calls block for a moment, those of a recall for seconds."""

    def __init__(self, core: WriterCore, path: Path) -> None:
        self.core = core
        self._path = path
        self._kept: list[WriterFacts] = []
        self._fails = False

    def rows(self) -> list[WriterFacts]:
        """One for each writer with blocks here or with a name."""
        return self.core.writers()

    def origins(self, tenant: str, keys: bytes) -> list[tuple[int, int]]:
        """Writer and second of the write of each packed key, 0 where they are unknown."""
        return self.core.origins(tenant_id(tenant), keys)

    def set_origins(self, tenant: str, keys: bytes, origins: Sequence[tuple[int, int]]) -> list[int]:
        """Say of copies who wrote them first. A code for each."""
        return call_native(self.core.set_origins, tenant_id(tenant), keys, list(origins))

    def read_names(self) -> None:
        """What writers were called before this process started."""
        try:
            with self._path.open("rb") as opened:
                found = opened.read(_FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning(Event.NODE_WRITERS_NOT_KEPT, reason=str(error.strerror))
            return
        rows = parse_names(found)
        if rows is None:
            log.warning(Event.NODE_WRITERS_NOT_KEPT, reason=f"{self._path} is no list of writers")
            return
        for row in rows:
            self.core.know_writer(row["id"], row["instance"], row["build"], row["started_unix_s"])
        self._kept = rows

    def keep_names(self) -> bool:
        """Write the names when they have changed; whether they were written."""
        rows = [_named(row) for row in self.rows() if row["id"] and (row["instance"] or row["build"])]
        if rows == self._kept:
            return False
        listed = [{**row, "id": f"{row['id']:016x}"} for row in rows]
        try:
            write_whole(self._path, json.dumps({"writers": listed}, indent=1))
        except (OSError, MooncacheError) as error:
            if not self._fails:  # it is tried again all the time
                log.warning(Event.NODE_WRITERS_NOT_KEPT, reason=str(error))
            self._fails = True
            return False
        self._kept, self._fails = rows, False
        return True


def _named(row: WriterFacts) -> WriterFacts:
    return {name: row[name] for name in ("id", "instance", "build", "started_unix_s")}


def parse_names(content: bytes) -> list[WriterFacts] | None:
    """The rows of a file of names; None when it is something else. What does not fit in a row is left out."""
    if len(content) > _FILE_BYTES_MAX:
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    listed = found.get("writers") if isinstance(found, dict) else None
    if not isinstance(listed, list):
        return None
    rows = (_row(item) for item in listed[:WRITERS_MAX])
    return [row for row in rows if row is not None]


def _row(item: object) -> WriterFacts | None:
    if not isinstance(item, dict):
        return None
    number = parse_writer_id(item.get("id"))
    started_s = item.get("started_unix_s")
    texts = item.get("instance"), item.get("build")
    if number is None or not all(isinstance(text, str) and len(text) <= TEXT_BYTES_MAX for text in texts):
        return None
    if not isinstance(started_s, int) or isinstance(started_s, bool) or not 0 <= started_s <= _ID_MAX:
        return None
    instance, build = (str(text).encode("ascii", "replace").decode() for text in texts)
    return {"id": number, "instance": instance, "build": build, "started_unix_s": started_s}


def parse_writer_id(text: object) -> int | None:
    """A writer's number from its 16 hex digits; None for anything else."""
    if not isinstance(text, str) or len(text) != 16 or not text.isascii():
        return None
    try:
        number = int(text, 16)
    except ValueError:
        return None
    return number or None
