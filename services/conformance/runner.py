"""Tries promises one after the other; a try that hangs ends the run, because what it holds is unknown."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from mooncache.conformance.core.verdicts import (
    ConformanceReport,
    NotOfferedError,
    PromiseBrokenError,
    PromiseText,
    PromiseVerdict,
    chosen,
    verdict_of,
)
from mooncache.conformance.limits import within

TRY_S: Final = 900.0
"""One promise takes at most so long; on an idle machine all of them take less than a minute."""

Bench = TypeVar("Bench")


class TryProgress:
    """What a run says while it goes on; this one is silent."""

    def begin(self, promise: PromiseText) -> None:
        """A promise is about to be tried."""

    def work(self, text: str) -> None:
        """How far the try is."""

    def end(self, verdict: PromiseVerdict) -> None:
        """It is over."""


def try_all(
    subject: str,
    seed: int,
    bench: Bench,
    promises: Mapping[PromiseText, Callable[[Bench], str]],
    only: Sequence[str],
    progress: TryProgress,
) -> ConformanceReport:
    """Try the promises with these names, or all.

    Raises:
        InvalidArgument: a name that none has.
    """
    verdicts: list[PromiseVerdict] = []
    begun_s = time.monotonic()
    hung = ""
    for promise in chosen(list(promises), only):
        progress.begin(promise)
        asked_s = time.monotonic()
        ended: str | Exception
        if hung:
            ended = NotOfferedError(f"not tried, because {hung} hangs")
        else:
            try:
                ended = within(TRY_S, promise.name, lambda p=promise: promises[p](bench))  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - it becomes the verdict
                ended = error
        took_s = time.monotonic() - asked_s
        if took_s >= TRY_S and isinstance(ended, PromiseBrokenError):
            hung = promise.name
        verdicts.append(verdict_of(promise, ended, took_s))
        progress.end(verdicts[-1])
    return ConformanceReport(subject, seed, time.monotonic() - begun_s, tuple(verdicts))
