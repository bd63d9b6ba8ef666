"""The holder: a small process that keeps the memory files of store nodes while no node runs.

It has descriptors and nothing else: it maps nothing and reads no byte. One request and one answer on each connection
of a UNIX socket (SEQPACKET, JSON, descriptors beside it), from processes of the same user only. A node's files are
lent to one process at a time, until that process is gone from the kernel: its threads, its mappings, and with them
every registration that a device could still write through. Files that no process has for `hold_s` are dropped.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

MESSAGE_BYTES_MAX: Final = 4096
FILES_MAX: Final = 250
DETACHED: Final = "--detached"
HOLD_S_MAX: Final = 86_400.0
_NODES_MAX: Final = 64
_CONNECTIONS_MAX: Final = 64
_REQUEST_S: Final = 5.0
_IDLE_S: Final = 60.0
_TICK_S: Final = 0.5
_NAME_MAX: Final = 128
HolderAnswer = tuple[dict[str, object], list[int]]
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class HolderError(Exception):
    """Why memory is not kept: the words of who should keep it, or why it cannot be reached."""


class RequestRefused(Exception):  # noqa: N818 - an answer, not an error of this process
    """Why a request is not carried out."""


@dataclass(slots=True)
class _Held:
    """The files of one node. `process` is a pidfd of who has them now; -1: none."""

    files: list[int] = field(default_factory=list)
    size_bytes: int = 0
    process: int = -1
    pid: int = 0
    hold_s: float = 600.0
    left_s: float = 0.0

    def drop_files(self) -> None:
        for file in self.files:
            os.close(file)
        self.files, self.size_bytes = [], 0

    def forget_process(self) -> None:
        if self.process >= 0:
            os.close(self.process)
        self.process, self.pid = -1, 0


class Holder:
    """What is held, and the requests that change it. Time is passed in."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self.ended = False

    @property
    def holds(self) -> bool:
        """Whether there is anything to stay for."""
        return bool(self._held)

    def answer(self, request: dict[str, object], files: list[int], pid: int, now_s: float) -> HolderAnswer:
        """The answer and the descriptors that go with it. What of `files` is kept is taken out of the list.

        Raises:
            RequestRefused: with a sentence for the asker.
        """
        operation = request.get("op")
        if operation == "list":
            return {"nodes": {name: _row(held) for name, held in self._held.items()}}, []
        if operation == "end":
            self.ended = True
            return {}, []
        name = request.get("node")
        if not isinstance(name, str) or not 0 < len(name) <= _NAME_MAX:
            raise RequestRefused("node: a name of 1 to 128 characters")
        if operation == "take":
            return self._take(name, pid)
        if operation == "keep":
            return self._keep(name, request, files, pid, now_s)
        raise RequestRefused("op: take, keep, list or end")

    def tick(self, now_s: float) -> None:
        """Notice processes that have ended, and drop what has been waiting too long."""
        for name, held in list(self._held.items()):
            if held.process >= 0 and _has_ended(held.process):
                held.forget_process()
                held.left_s = now_s
            if held.process < 0 and (not held.files or now_s - held.left_s >= held.hold_s):
                held.drop_files()
                del self._held[name]

    def close(self) -> None:
        """Let go of everything."""
        for held in self._held.values():
            held.drop_files()
            held.forget_process()
        self._held.clear()

    def _of(self, name: str, pid: int) -> _Held:
        """The node's files, now lent to the asker."""
        held = self._held.get(name)
        if held is None:
            if len(self._held) >= _NODES_MAX:
                raise RequestRefused(f"the files of {_NODES_MAX} nodes are held already")
            held = self._held[name] = _Held()
        if held.process >= 0 and held.pid != pid:
            if not _has_ended(held.process):
                raise RequestRefused(f"process {held.pid} has the memory of {name}")
            held.forget_process()
        if held.process < 0:
            try:
                held.process, held.pid = os.pidfd_open(pid), pid
            except OSError as error:
                raise RequestRefused(f"process {pid} cannot be watched from here: {error.strerror}") from None
        return held

    def _take(self, name: str, pid: int) -> HolderAnswer:
        held = self._of(name, pid)
        return {"files": len(held.files)}, list(held.files)

    def _keep(
        self, name: str, request: dict[str, object], files: list[int], pid: int, now_s: float
    ) -> HolderAnswer:
        hold_s = request.get("hold_s")
        if not isinstance(hold_s, int | float) or not 0 < hold_s <= HOLD_S_MAX:
            raise RequestRefused(f"hold_s: seconds, at most {HOLD_S_MAX:.0f}")
        if not files or len(files) != request.get("files"):
            raise RequestRefused("files: as many as there are descriptors")
        for file in files:
            _check_file(file)
        held = self._of(name, pid)
        held.drop_files()
        held.size_bytes = sum(os.fstat(file).st_size for file in files)
        held.files, held.hold_s, held.left_s = list(files), float(hold_s), now_s
        files.clear()
        return {}, []


def _row(held: _Held) -> dict[str, object]:
    return {"files": len(held.files), "bytes": held.size_bytes, "pid": held.pid}


def _has_ended(process: int) -> bool:
    """Whether a pidfd says that the process is gone, with all its threads and what they had open."""
    with selectors.PollSelector() as looking:
        looking.register(process, selectors.EVENT_READ)
        return bool(looking.select(0))


def _check_file(file: int) -> None:
    """Raises RequestRefused unless it is a memory file of this user that cannot be shrunk under those who map it."""
    facts = os.fstat(file)
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if facts.st_uid != os.geteuid() or facts.st_nlink != 0 or seals & _SEALS != _SEALS:
        raise RequestRefused("files: only sealed memory files of this user are held")


class _HolderServer:
    """The socket around a Holder."""

    def __init__(self, listener: socket.socket, holder: Holder, *, stays: bool) -> None:
        self._listener, self._holder, self._stays = listener, holder, stays
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._open: dict[socket.socket, float] = {}

    def run(self) -> None:
        """Until a request or a signal ends it; one that a node started also ends when it holds nothing for a while."""
        idle_since_s = time.monotonic()
        while not self._holder.ended:
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._serve(key.fileobj)
            now_s = time.monotonic()
            self._holder.tick(now_s)
            for peer in [peer for peer, since_s in self._open.items() if now_s - since_s > _REQUEST_S]:
                self._close(peer)
            if self._holder.holds or self._open or self._stays:
                idle_since_s = now_s
            if now_s - idle_since_s > _IDLE_S:
                return

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return
        if len(self._open) >= _CONNECTIONS_MAX or _peer(peer)[1] != os.geteuid():
            peer.close()
            return
        peer.setblocking(False)
        self._open[peer] = time.monotonic()
        self._selector.register(peer, selectors.EVENT_READ)

    def _serve(self, peer: socket.socket) -> None:
        files: list[int] = []
        try:
            data, files, flags, _ = socket.recv_fds(peer, MESSAGE_BYTES_MAX, FILES_MAX)
            if data:
                request = parsed(data, flags)
                answer, lent = self._holder.answer(request, files, _peer(peer)[0], time.monotonic())
                send(peer, {"ok": True, **answer}, lent)
        except RequestRefused as why:
            with contextlib.suppress(OSError):
                send(peer, {"ok": False, "why": str(why)}, [])
        except OSError:
            pass  # who does not take the answer has had it
        finally:
            for file in files:
                os.close(file)
            self._close(peer)

    def _close(self, peer: socket.socket) -> None:
        self._open.pop(peer, None)
        self._selector.unregister(peer)
        peer.close()


def parsed(data: bytes, flags: int) -> dict[str, object]:
    """The request in a message. Raises RequestRefused when there is none."""
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise RequestRefused(f"a request has at most {MESSAGE_BYTES_MAX} bytes and {FILES_MAX} files")
    try:
        request = json.loads(data)
    except (ValueError, RecursionError):
        raise RequestRefused("a request is a JSON object") from None
    if not isinstance(request, dict):
        raise RequestRefused("a request is a JSON object")
    return request


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def send(connection: socket.socket, message: dict[str, object], files: list[int]) -> None:
    """One message; the kernel takes it as a whole. Raises OSError."""
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    connection.sendmsg([json.dumps(message).encode()], control)


def listen(path: Path) -> socket.socket | None:
    """The holder's socket; None when another holder answers there.

    Raises:
        OSError: the folder or the socket cannot be made.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as long as this process lives
    except BlockingIOError:
        os.close(lock)
        return None
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    old = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(old)
    listener.listen(_CONNECTIONS_MAX)
    listener.setblocking(False)
    return listener


def main(arguments: list[str] | None = None) -> int:
    """Hold until a signal or a request ends it. 0; 1 when the socket cannot be made."""
    words = sys.argv[1:] if arguments is None else arguments
    path = Path(words[0])
    detached = DETACHED in words[1:]
    if detached and os.fork() > 0:
        return 0  # so that it is no child of who started it
    try:
        listener = listen(path)
    except OSError as error:
        sys.stderr.write(f"{path}: {error.strerror}\n")
        return 1
    if listener is None:
        return 0
    holder = Holder()

    def end(_number: int, _frame: object) -> None:
        holder.ended = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    with listener:
        _HolderServer(listener, holder, stays=not detached).run()
        holder.close()
        with contextlib.suppress(OSError):
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
