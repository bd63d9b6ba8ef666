"""Writes a trace of the requests that come: off unless `gateway.capture_file` is set, and never in a request's way.

The event loop only puts a ticket into a queue. One thread hashes prompts in the order of their arrival, waits for the
end of each request (its row has the length of the answer), and writes rows in that order. So a request that runs on
and on holds all later rows back; when they have become as many as may wait, its own row is given up, not theirs.
Whatever goes wrong - a full queue, a full disk - costs rows, which are counted and logged, never a request. A file that
is full is renamed (FILE.1 is the one before, FILE.2 before that) and a new one is begun; each is a trace of its own
from time 0. The one that is written is locked: a second gateway with the same file is refused instead of renaming it
away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from mooncache.auth import read_private_file
from mooncache.config.serving import GatewaySection
from mooncache.errors import ConfigInvalid
from mooncache.gateway.core.capture import CapturedPrompt, Numbering, block_digests, line
from mooncache.gateway.metrics import GatewayMetrics
from mooncache.runtime.logs import Event, get_logger

# Requests that may wait to be hashed, and as many to be written; more are counted, not captured.
QUEUE_MAX: Final = 50_000
_WAITING_BYTES_MAX: Final = 64 << 20
_NUMBERS_MAX: Final = 1_000_000
_BUFFER_BYTES: Final = 64 << 10
_IDLE_S: Final = 0.5
_RETRY_S: Final = 10.0
_REPORT_S: Final = 60.0
_CLOSE_S: Final = 5.0
_SALT_BYTES: Final = 32

log = get_logger(__name__)


class CaptureLoss(StrEnum):
    """Why a request is not in the captured trace."""

    NO_TOKENS = "no_tokens"
    QUEUE_FULL = "queue_full"
    OUTLASTED = "outlasted"
    """It ran for so long that it held too many others back."""
    WRITE_FAILED = "write_failed"
    DEFECT = "defect"


@dataclass(slots=True, eq=False)
class Ticket:
    """One request on its way into the file."""

    at_s: float
    prompts: list[CapturedPrompt]
    tenant: str
    session: str
    size_bytes: int  # memory that its tokens take, later that its hashes take
    digests: list[bytes] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    output_tokens: int | None = None  # known once it has ended


class Capture:
    """Writes the gateway's trace. `begin` and `end` belong to the event loop, everything else to the thread."""

    def __init__(self, settings: GatewaySection, stats: GatewayMetrics, queue_max: int = QUEUE_MAX) -> None:
        assert settings.capture_file is not None, "capture is off"
        self._path: Path = settings.capture_file
        self._block_tokens = settings.capture_block_tokens
        self._bytes_max, self._files = settings.capture_file_bytes_max, settings.capture_file_count
        self._has_names = settings.capture_names
        self._queue_max = queue_max
        self._stats = stats
        self._lasting = settings.capture_salt_file is not None
        self._salt = _salt_of(settings.capture_salt_file)
        self._inbox: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        # Written by one side each, so that neither needs a lock.
        self._begun = self._begun_bytes = 0
        self._taken = self._released_bytes = 0
        self._last_s = 0.0
        self._order: deque[Ticket] = deque()
        self._held_bytes = 0  # of the hashes of those in `_order`
        self._file: _File | None = None
        self._retry_at_s = 0.0
        self._refused: dict[CaptureLoss, int] = {}
        self._lost: dict[CaptureLoss, int] = {}
        self._reported: dict[CaptureLoss, int] = {}
        self._report_at_s = 0.0
        self._last_error = ""
        self._open()  # a file that cannot be written is a mistake of the configuration, noticed at the start
        self._thread = threading.Thread(target=self._work, name="capture", daemon=True)
        self._thread.start()

    # the event loop's side

    def begin(
        self, prompts: Sequence[CapturedPrompt], *, tenant: str, session: str, now_s: float
    ) -> Ticket | None:
        """Take a request in; None when it will not be in the file. Never waits, never raises.

        Args:
            prompts: what is known of its prompts; none when there are no tokens.
            now_s: when it came, on the clock of `GatewayState`.
        """
        prompts = [prompt for prompt in prompts if len(prompt.tokens)]
        if not prompts:
            self._refuse(CaptureLoss.NO_TOKENS)
            return None
        size_bytes = sum(prompt.size_bytes for prompt in prompts)
        if (
            self._begun - self._taken >= self._queue_max
            or self._begun_bytes - self._released_bytes + size_bytes > _WAITING_BYTES_MAX
        ):
            self._refuse(CaptureLoss.QUEUE_FULL)
            return None
        self._last_s = max(self._last_s, now_s)
        ticket = Ticket(self._last_s, prompts, tenant, session, size_bytes)
        self._begun += 1
        self._begun_bytes += size_bytes
        self._inbox.put(ticket)
        return ticket

    def _refuse(self, reason: CaptureLoss) -> None:
        self._stats.capture_dropped.labels(reason).inc()
        self._refused[reason] = self._refused.get(reason, 0) + 1

    def end(self, ticket: Ticket, output_tokens: int) -> None:
        """The request is over after so many tokens."""
        ticket.output_tokens = max(0, output_tokens)

    def close(self) -> None:
        """Write what has ended and stop."""
        self._inbox.put(None)
        self._thread.join(_CLOSE_S)

    # the thread's side

    def _work(self) -> None:
        is_open = True
        while is_open:
            try:
                is_open = self._round()
            except Exception as error:  # noqa: BLE001  (rows are lost, requests are not)
                self._lose(CaptureLoss.DEFECT, 1, error)
        self._finish()

    def _round(self) -> bool:
        """Take what has come, write what has ended. False at the end."""
        is_idle, is_open = False, True
        try:
            ticket = self._inbox.get(timeout=_IDLE_S)
            if ticket is None:
                is_open = False
            else:
                self._taken += 1
                self._order.append(ticket)
                self._hash(ticket)
                self._held_bytes += ticket.size_bytes
        except queue.Empty:
            is_idle = True
        while self._order and (self._order[0].output_tokens is not None or self._holds_too_much()):
            self._write(self._order.popleft())
        if is_idle and self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error, 0)
        self._report()
        return is_open

    def _holds_too_much(self) -> bool:
        """Whether the oldest request has held back as much as may wait."""
        return len(self._order) > self._queue_max or self._held_bytes > _WAITING_BYTES_MAX // 2

    def _hash(self, ticket: Ticket) -> None:
        prompts, ticket.prompts = ticket.prompts, []
        token_bytes, ticket.size_bytes = ticket.size_bytes, 0
        try:
            ticket.lengths = [len(prompt.tokens) for prompt in prompts]
            ticket.digests = [block_digests(prompt, self._block_tokens, self._salt) for prompt in prompts]
            ticket.size_bytes = sum(map(len, ticket.digests))
        finally:
            self._released_bytes += token_bytes - ticket.size_bytes

    def _write(self, ticket: Ticket) -> None:
        self._held_bytes -= ticket.size_bytes
        self._released_bytes += ticket.size_bytes
        rows, added = len(ticket.lengths), 0
        if ticket.output_tokens is None:
            self._lose(CaptureLoss.OUTLASTED, rows)
            return
        if self._file is None and time.monotonic() < self._retry_at_s:
            self._lose(CaptureLoss.WRITE_FAILED, rows)
            return
        try:
            if self._file is None:
                self._open()
            assert self._file is not None
            output_tokens = (ticket.output_tokens or 0) // max(1, rows)
            for length, digests in zip(ticket.lengths, ticket.digests, strict=True):
                added += 1  # from here on the file counts it
                self._file.add(ticket, length, digests, output_tokens)
            if self._file.size_bytes >= self._bytes_max or self._file.numbering.count >= _NUMBERS_MAX:
                self._file.close()
                self._open()
        except (OSError, ConfigInvalid) as error:
            self._give_up(error, rows - added)

    def _open(self) -> None:
        """Begin a file; the one that is there moves on. Raises ConfigInvalid."""
        self._file = None
        try:
            _rotate(self._path, self._files)
            numbering = Numbering(self._salt, is_lasting=self._lasting)
            self._file = _File(self._path, numbering, self._flushed, has_names=self._has_names)
        except OSError as error:
            raise ConfigInvalid(
                f"gateway.capture_file {self._path} cannot be written: {error.strerror}. Choose a file in an "
                "existing, writable folder, a different one for each gateway."
            ) from None
        log.info(Event.CAPTURE_STARTED, path=str(self._path), block_tokens=self._block_tokens)

    def _flushed(self, rows: int, *, is_written: bool) -> None:
        if is_written:
            self._stats.capture_rows.inc(rows)
        else:
            self._lose(CaptureLoss.WRITE_FAILED, rows)

    def _give_up(self, error: Exception, rows: int) -> None:
        """Close the file and try again later with a new one."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file, self._retry_at_s = None, time.monotonic() + _RETRY_S
        self._lose(CaptureLoss.WRITE_FAILED, rows, error)

    def _lose(self, reason: CaptureLoss, rows: int, error: Exception | None = None) -> None:
        self._stats.capture_dropped.labels(reason).inc(rows)
        self._lost[reason] = self._lost.get(reason, 0) + rows
        self._last_error = repr(error)[:300] if error is not None else self._last_error

    def _report(self) -> None:
        """Log what is missing in the file: at once when something is, then at most once a minute."""
        dropped = {**self._refused, **self._lost}
        if dropped == self._reported or time.monotonic() < self._report_at_s:
            return
        self._reported, self._report_at_s = dropped, time.monotonic() + _REPORT_S
        log.warning(Event.CAPTURE_FAILED, dropped=dropped, reason=self._last_error or "see `dropped`")

    def _finish(self) -> None:
        with contextlib.suppress(OSError):
            for ticket in self._order:
                if ticket.output_tokens is not None:
                    self._write(ticket)
            if self._file is not None:
                self._file.close()


class _File:
    """One file that is being written, readable by its owner only. `flushed` is called with what became of rows."""

    def __init__(
        self, path: Path, numbering: Numbering, flushed: Callable[..., None], *, has_names: bool
    ) -> None:
        self._flushed = flushed
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _lock(self._descriptor, path)
        except OSError:
            os.close(self._descriptor)
            raise
        self._rows: list[bytes] = []
        self._rows_bytes = 0
        self._written_bytes = 0
        self.numbering, self._has_names = numbering, has_names
        self._began_s: float | None = None
        # With lasting ids files are made to be joined: then stamps are the calendar's.
        self._wall_s = time.time() - time.monotonic() if numbering.is_lasting else 0.0

    def add(self, ticket: Ticket, input_tokens: int, digests: bytes, output_tokens: int) -> None:
        """One row. Raises OSError."""
        if self._began_s is None:
            self._began_s = ticket.at_s
        at_s = ticket.at_s + self._wall_s if self.numbering.is_lasting else ticket.at_s - self._began_s
        names = None
        if self._has_names:
            session = f"{ticket.tenant}/{ticket.session}" if ticket.session else ""
            names = self.numbering.name("tenant", ticket.tenant), self.numbering.name("session", session)
        row = line(round(at_s * 1e3), input_tokens, output_tokens, self.numbering.blocks(digests), names)
        self._rows.append(row)
        self._rows_bytes += len(row)
        if self._rows_bytes >= _BUFFER_BYTES:
            self.flush()

    @property
    def size_bytes(self) -> int:
        """Size of the file once all rows are in it."""
        return self._written_bytes + self._rows_bytes

    def flush(self) -> None:
        """Write whole lines; what a full disk took of them is taken back. Raises OSError."""
        count, data = len(self._rows), b"".join(self._rows)
        self._rows, self._rows_bytes = [], 0
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._written_bytes)
            self._flushed(count, is_written=False)
            raise
        self._written_bytes += len(data)
        self._flushed(count, is_written=True)

    def close(self) -> None:
        """Write what is left. Raises OSError; the file is closed in any case, and only once."""
        if self._descriptor < 0:
            return
        try:
            self.flush()
        finally:
            # The number may belong to another process as soon as it is free.
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def _rotate(path: Path, count: int) -> None:
    """FILE becomes FILE.1, that FILE.2, and so on; no more than `count` files are left with the new one."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it exists and is not a regular file")
    if not path.exists():
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(descriptor, path)
        _move_on(path, count)
    finally:
        os.close(descriptor)


def _move_on(path: Path, count: int) -> None:
    if path.stat().st_size == 0:
        path.unlink()
        return
    oldest = path.with_name(f"{path.name}.{count - 1}") if count > 1 else path
    oldest.unlink(missing_ok=True)
    for number in range(count - 2, 0, -1):
        older = path.with_name(f"{path.name}.{number}")
        if older.exists():
            older.rename(path.with_name(f"{path.name}.{number + 1}"))
    if count > 1:
        path.rename(path.with_name(f"{path.name}.1"))


def _lock(descriptor: int, path: Path) -> None:
    """Lock an open file that is still the one at `path`. Raises OSError when another gateway has or had it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(errno.EBUSY, "another gateway writes to it") from None
    except OSError:
        return  # a file system without locks is not a reason to capture nothing
    if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
        raise OSError(errno.EBUSY, "another gateway writes to it")


def _salt_of(path: Path | None) -> bytes:
    """The salt of a file of mode 0600, made when it is not there; without a file a random one. Raises ConfigInvalid."""
    if path is None:
        return secrets.token_bytes(_SALT_BYTES)
    try:
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(_SALT_BYTES) + "\n")
    except OSError as error:
        raise ConfigInvalid(f"gateway.capture_salt_file {path} cannot be made: {error.strerror}.") from None
    data, _ = read_private_file(path, "gateway.capture_salt_file", 1024)
    try:
        salt = bytes.fromhex(data.decode("ascii").strip())
    except ValueError:
        salt = b""
    if len(salt) != _SALT_BYTES:
        raise ConfigInvalid(
            f"gateway.capture_salt_file {path} does not hold one line of {2 * _SALT_BYTES} hex digits; remove it, and "
            "the gateway makes a new one."
        )
    return salt
