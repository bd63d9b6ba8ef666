"""Coordination for one master: it always leads, and its term grows with every start.

The term is kept in a small file and is at least the wall clock in milliseconds, so that a lost state folder
cannot bring an old term back. Two embedded masters on one state folder are a mistake: a lock on the file refuses
the second.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from pathlib import Path

from mooncache.coordination.base import Leadership, MasterRecord
from mooncache.errors import Closed, ConfigInvalid
from mooncache.runtime.clock import Clock

_TERM_TEXT_MAX = 32
# Terms travel as signed 64-bit integers. A larger number in the file is damage: no clock and no count gets near it.
_TERM_MAX = 1 << 62


class EmbeddedCoordinator:
    """A coordinator for a single master. Without a `term_file` (tests, simulation) the term is the wall clock's."""

    def __init__(self, term_file: Path | None, clock: Clock) -> None:
        self._term_file = term_file
        self._clock = clock
        self._me: MasterRecord | None = None
        self._leadership: Leadership | None = None
        self._descriptor = -1
        self._last_term = 0

    @property
    def reachable(self) -> bool:
        return True

    async def start(self, me: MasterRecord) -> None:
        """Lock the state folder and begin a term. Raises ConfigInvalid when another master holds the folder."""
        self._me = me
        if self._term_file is not None and self._descriptor < 0:
            self._descriptor = _lock(self._term_file)

    async def campaign(self, floor: int = 0) -> Leadership:
        """Win at once; while leading already, wait until that is over.

        Raises ConfigInvalid when the term cannot be written: another start would use it again.
        """
        if self._me is None:
            raise Closed("The coordinator is not started.")
        if self._leadership is not None:
            await self._leadership.lost.wait()
        await asyncio.sleep(0)
        self._leadership = Leadership(self._next_term(floor))
        return self._leadership

    async def leader(self) -> MasterRecord | None:
        return self._me if self._leadership is not None else None

    async def masters(self) -> list[MasterRecord]:
        return [self._me] if self._me is not None else []

    async def resign(self) -> None:
        if self._leadership is not None:
            self._leadership.end("resigned")
            self._leadership = None

    async def close(self) -> None:
        await self.resign()
        self._me = None
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    def _next_term(self, above: int) -> int:
        floor = max(above + 1, int(self._clock.wall_s() * 1000))
        if self._descriptor < 0:
            return max(1, floor)
        text = (
            os.pread(self._descriptor, _TERM_TEXT_MAX, 0)
            .decode("ascii", "replace")
            .partition("\n")[0]
            .strip()
        )
        before = int(text) if text.isascii() and text.isdigit() else 0
        term = max(self._last_term + 1, before + 1 if before <= _TERM_MAX else 0, floor)
        self._last_term = term
        # One small write: a crash leaves the old text or the new one; the wall clock covers a torn one.
        try:
            os.pwrite(self._descriptor, f"{term:019d}\n".encode(), 0)
            os.fsync(self._descriptor)
        except OSError as error:
            raise ConfigInvalid(
                f"The state file {self._term_file} cannot be written: {error.strerror}. "
                "This master does not lead before it can."
            ) from None
        return term


def _lock(path: Path) -> int:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigInvalid(f"The state file {path} cannot be opened: {error.strerror}.") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigInvalid(
            f"Another master uses {path.parent}; give this one its own cluster.state_dir, or coordinate through etcd."
        ) from None
    return descriptor
