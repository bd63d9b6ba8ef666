"""What a person sees while promises are tried: a line for each verdict, and on a terminal what is tried now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich.status import Status

from mooncache.conformance.runner import TryProgress
from mooncache.reporting.output import console, error_console

if TYPE_CHECKING:
    from mooncache.conformance.core.verdicts import PromiseText, PromiseVerdict

_WORDS: Final = {"pass": ("pass", "green"), "fail": ("FAIL", "bold red"), "not applicable": ("n/a ", "dim")}


class _ShownProgress(TryProgress):
    """Verdicts as lines, the work under way in a status line."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._name = ""
        self._begun_s = time.monotonic()

    def begin(self, promise: PromiseText) -> None:
        """Show its name."""
        self._name, self._begun_s = promise.name, time.monotonic()
        self._status.update(f"{promise.name}: {promise.sentence}")

    def work(self, text: str) -> None:
        """Show how far it is, and for how long it has run."""
        took = f", {time.monotonic() - self._begun_s:.0f} s" if self._name else ""
        self._status.update(f"{self._name}: {text}{took}" if self._name else text)

    def end(self, verdict: PromiseVerdict) -> None:
        """A line."""
        word, style = _WORDS[verdict.outcome]
        console.print(f"[{style}]{word}[/] [bold]{verdict.promise.name}[/]", end="")
        console.print(f"  {verdict.seen}", markup=False, soft_wrap=True)


@contextmanager
def conformance_progress(*, quiet: bool) -> Iterator[TryProgress]:
    """Progress for a run; silent when a document is printed."""
    if quiet:
        yield TryProgress()
        return
    with error_console.status("starting") as status:
        yield _ShownProgress(status)
