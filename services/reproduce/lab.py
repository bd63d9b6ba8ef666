"""The laboratory that scenarios share: their traces, one run of each distinct simulation, processes, progress.

Invariant: an experiment is a pure function of (sources, item), so the same item asked twice is simulated once and
the results do not depend on the number of processes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self, TypeVar

from mooncache.reproduce.finding import Figure
from mooncache.reproduce.workloads import Sources, load
from mooncache.traces import Trace, TracePart

Item = TypeVar("Item", bound=Hashable)
Result = TypeVar("Result")
LabProgress = Callable[[str, int, int], None]


def _silent(_what: str, _done: int, _total: int) -> None:
    return None


class Lab:
    """Runs experiments; close it, or use it in a `with`."""

    def __init__(self, sources: Sources, jobs: int = 1, progress: LabProgress = _silent) -> None:
        self.sources = sources
        self._jobs = max(1, jobs)
        self.progress = progress
        self._done: dict[tuple[str, Any], Any] = {}
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @property
    def quick(self) -> bool:
        """Whether only the beginning of each trace is played: then scenarios leave out halves and ranges."""
        return self.sources.first > 0

    @property
    def parts(self) -> tuple[TracePart, ...]:
        """What of each trace is played."""
        return (TracePart.WHOLE,) if self.quick else tuple(TracePart)

    def trace(self, name: str) -> Trace:
        """The requests of a workload."""
        return load(self.sources, name)

    def mark(self, workload: str, findings: Sequence[Figure]) -> list[Figure]:
        """The findings, marked when the workload's trace is a stand-in."""
        if not self.sources.stand_in(workload):
            return list(findings)
        return [replace(found, stand_in=True) for found in findings]

    def map(self, experiment: Callable[[Sources, Item], Result], items: Sequence[Item]) -> list[Result]:
        """`experiment(sources, item)` of each item, in order; items that ran before are not run again."""
        name = f"{experiment.__module__}.{experiment.__qualname__}"
        missing = [item for item in dict.fromkeys(items) if (name, item) not in self._done]
        label = experiment.__name__.replace("_", " ").strip()
        for number, (item, result) in enumerate(self._run(experiment, missing), start=1):
            self._done[name, item] = result
            self.progress(label, number, len(missing))
        return [self._done[name, item] for item in items]

    def _run(
        self, experiment: Callable[[Sources, Item], Result], items: Sequence[Item]
    ) -> Iterator[tuple[Item, Result]]:
        if self._jobs == 1 or len(items) < 2:
            yield from ((item, experiment(self.sources, item)) for item in items)
            return
        if self._pool is None:
            # Fresh processes: a copy of this one would copy its threads' locks as well.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._jobs, mp_context=context)
        with _waiting(self._pool, experiment, self.sources, items) as futures:
            for future in as_completed(futures):
                yield futures[future], future.result()


@contextmanager
def _waiting(
    pool: ProcessPoolExecutor,
    experiment: Callable[[Sources, Item], Result],
    sources: Sources,
    items: Sequence[Item],
) -> Iterator[dict[Future[Result], Item]]:
    """The futures of all items; those that have not begun are dropped when one fails."""
    futures = {pool.submit(experiment, sources, item): item for item in items}
    try:
        yield futures
    finally:
        for future in futures:
            future.cancel()
