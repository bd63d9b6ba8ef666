"""The quarantine at a node: entries in a file, refusals in the native server, and blocks that have to go.

A quarantined writer's blocks become visible no more as soon as an entry comes, and those that are here are removed by
passes over memory and disks, as in a recall, until one finds nothing. Both begin anew with each start of the node, from
its file. A file that cannot be read or written changes nothing, and the log says so.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

from mooncache.errors import InvalidArgument, MooncacheError
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.quarantine import FILE_BYTES_MAX, QuarantineEntry, QuarantineTable
from mooncache.store_node.writers import RecallCore
from mooncache.whole_file import write_whole

UNTIL_LIFTED: Final = (1 << 32) - 1
"""As the time of a refusal, to the native server."""
PASSES_MAX: Final = 8
"""Of one turn; blocks that are still found are left to the next."""

log = get_logger(__name__)


class QuarantineCore(RecallCore, Protocol):
    """The part of the native StoreServer that this needs."""

    def lift(self, writer: int, /) -> None: ...


class NodeQuarantine:
    """The table of one node. `table` and `take` belong to its event loop; `enforce` blocks for seconds, in a thread."""

    def __init__(self, core: QuarantineCore, path: Path) -> None:
        self.core = core
        self.table = QuarantineTable()
        self.wanted = False
        """The master wants the table."""
        self.changed = asyncio.Event()
        """There may be something to enforce."""
        self._path = path
        self._lock = threading.Lock()
        self._refused: set[int] = set()
        self._clean: set[int] = set()

    def read_file(self) -> None:
        """Refuse at once what was refused before this process started."""
        try:
            with self._path.open("rb") as opened:
                found = opened.read(FILE_BYTES_MAX + 1)
            if len(found) > FILE_BYTES_MAX:
                raise InvalidArgument(f"it has more than {FILE_BYTES_MAX} bytes")
            self.table = QuarantineTable.from_text(found.decode())
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError, MooncacheError) as error:
            log.warning(Event.NODE_QUARANTINE_NOT_KEPT, reason=str(error))
            return
        for number in self.table.quarantined:
            self.core.recall(number, 0, refuse_s=UNTIL_LIFTED)
            self._refused.add(number)
        self.changed.set()

    def take(self, entries: Iterable[QuarantineEntry]) -> bool:
        """Join entries to the table and keep it; whether it changed."""
        table = self.table.joined(entries)
        if table is self.table:
            return False
        self.table = table
        self.changed.set()
        log.warning(
            Event.NODE_QUARANTINE_CHANGED, writers=[f"{number:016x}" for number in sorted(table.quarantined)]
        )
        try:
            write_whole(self._path, table.to_text())
        except (OSError, MooncacheError) as error:
            log.warning(Event.NODE_QUARANTINE_NOT_KEPT, reason=str(error))
        return True

    def enforce(self) -> bool:
        """Lift what was released, refuse the others, and remove what they wrote. False: blocks may be left."""
        with self._lock:
            wanted = self.table.quarantined
            for number in self._refused - wanted:
                self.core.lift(number)
                self._refused.discard(number)
                self._clean.discard(number)
            for number in wanted - self._clean:
                self._refused.add(number)
                if self._remove(number):
                    self._clean.add(number)
            return wanted == self._clean

    def _remove(self, number: int) -> bool:
        """Passes over all blocks until one finds nothing; whether that was so."""
        for _ in range(PASSES_MAX):
            cursor = left = 0
            while True:
                page = self.core.recall(number, cursor, refuse_s=UNTIL_LIFTED)
                left += page["blocks"] + page["disk_blocks"] + page["failed_blocks"]
                cursor = page["next_cursor"]
                if not cursor:
                    break
            if not left:
                return True
        return False
