"""`mooncache up --detach`: the cluster runs behind the terminal, the command shows its start and returns.

A forked child is the same `mooncache up`, in a session of its own; it tells the terminal's process over a pipe what
happens, one JSON object a line, until everything is ready. When the terminal's process dies first, the child stops.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import msgspec

from mooncache.cli.watch import LOOK_S, Stop, watch
from mooncache.cluster.supervisor import PartNews
from mooncache.errors import Cancelled, Internal, MooncacheError, error_for
from mooncache.reporting.output import EXIT_DEFECT, EXIT_INTERRUPTED, EXIT_OK, console, print_json

if TYPE_CHECKING:
    from mooncache.cluster.embedded import ClusterSettings

LINE_CHARS_MAX: Final = 4 << 20  # the document of a thousand engines takes a tenth of it


class _Failure(msgspec.Struct):
    code: int
    message: str


class _ChildMessage(msgspec.Struct):
    """One line of the pipe: a part that changed, and at the end the document or the error."""

    tell: tuple[str, PartNews] | None = None
    document: dict[str, object] | None = None
    token_created: bool = False
    error: _Failure | None = None


def run_detached(settings: ClusterSettings, ready_s: float | None, *, as_json: bool) -> int:
    """Start behind the terminal and show the start. Raises what the start raised."""
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        code = EXIT_DEFECT
        try:
            code = _behind(settings, ready_s, os.fdopen(write_end, "w", encoding="utf-8", buffering=1))
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, encoding="utf-8") as lines:
        try:
            return _show(lines, as_json=as_json)
        except KeyboardInterrupt:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
            return EXIT_INTERRUPTED


def _show(lines: IO[str], *, as_json: bool) -> int:
    from mooncache.cli.announce import show
    from mooncache.cli.progress import StartView

    message = _ChildMessage()
    with contextlib.ExitStack() as stack:
        tell = None if as_json else stack.enter_context(StartView(console)).tell
        while line := lines.readline(LINE_CHARS_MAX):
            message = _parsed(line)
            if message.tell is None:
                break
            if tell is not None:
                tell(*message.tell)
    if message.error is not None:
        raise error_for(message.error.code, message.error.message)
    if message.document is None:
        raise Internal(_NO_WORD)
    if as_json:
        print_json(message.document)
    else:
        show(message.document, token_created=message.token_created, detached=True)
    return EXIT_OK


_NO_WORD: Final = "The start ended without a message; see logs/up.log in the state folder."


def _parsed(line: str) -> _ChildMessage:
    """One line of the pipe. Raises Internal for a line that was cut off because the child was killed."""
    try:
        return msgspec.json.decode(line, type=_ChildMessage)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise Internal(_NO_WORD) from None


def _behind(settings: ClusterSettings, ready_s: float | None, pipe: IO[str]) -> int:
    """The child: its words go to logs/up.log."""
    from mooncache.cli.announce import document_of
    from mooncache.cluster.embedded import EmbeddedCluster

    os.setsid()
    cluster = EmbeddedCluster(settings)
    stop = Stop()
    gone = [False]

    def send(message: _ChildMessage) -> None:
        try:
            pipe.write(msgspec.json.encode(message).decode() + "\n")
        except OSError:
            gone[0] = True

    try:
        _redirect(cluster.state_dir)
        cluster.start(
            ready_s,
            lambda name, news: send(_ChildMessage(tell=(name, news))),
            lambda: stop.asked or gone[0],
        )
        document = document_of(cluster, cluster.wait_ready(LOOK_S))
        send(_ChildMessage(document=document, token_created=cluster.token_created))
        with contextlib.suppress(OSError):
            pipe.close()
        return watch(cluster, stop, as_json=False)
    except (Cancelled, KeyboardInterrupt):
        return EXIT_OK
    except MooncacheError as error:
        send(_ChildMessage(error=_Failure(error.code, error.message)))
        return 1
    finally:
        cluster.stop()


def _redirect(state_dir: Path) -> None:
    """Standard output and error into logs/up.log, nothing to read."""
    folder = state_dir / "logs"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = os.open(folder / "up.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(nothing)
