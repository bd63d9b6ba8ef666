"""`mooncache bench transfer --engines`: batches between two engines, ours beside NIXL over UCX and the original's.

Each lane is two processes with registered memory. A round asks every lane in turn for every shape and direction, so
that a noisy moment of the machine falls on all of them alike; ratios are those of medians over the rounds. The
original is measured where its package is importable (it is another distribution of the name `mooncake`, so
`PYTHONPATH` has to name a folder that it was installed to).
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from mooncache.bench.transfer.options import KIB, MIB
from mooncache.bench.worker import Worker, WorkerError
from mooncache.reporting.rows import Report, bar_row, describe_machine, describe_versions

SHAPES: Final = ((MIB, 64), (64 * KIB, 512))
_BAR: Final = 1.0
_MODULE: Final = "mooncache.bench.transfer.engine_lane"
_TCP: Final = {"UCX_TLS": "tcp,self", "NIXL_LOG_LEVEL": "ERROR", "MC_LOG_LEVEL": "error"}
# Without tcp its plugin does not start; bytes go through shared memory.
_SHM: Final = {"UCX_TLS": "posix,sysv,cma,self,tcp", "NIXL_LOG_LEVEL": "ERROR"}
_DISTRIBUTIONS: Final = ("mooncache", "nixl-cu12", "mooncake-transfer-engine-non-cuda")


@dataclass(frozen=True, slots=True)
class LaneKind:
    """One engine on one wire."""

    engine: str
    wire: str
    env: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return f"{self.engine} {self.wire}"


LANES: Final = (
    LaneKind("mooncache", "tcp", ()),
    LaneKind("nixl", "tcp", tuple(_TCP.items())),
    LaneKind("original", "tcp", tuple(_TCP.items())),
    LaneKind("mooncache", "shm", ()),
    LaneKind("nixl", "shm", tuple(_SHM.items())),
)


class Lane:
    """Two processes: one owns memory, the other one reads and writes it."""

    def __init__(self, kind: LaneKind, size_bytes: int) -> None:
        self.kind = kind
        env = dict(kind.env)
        with contextlib.ExitStack() as stack:
            arguments = [kind.engine, kind.wire, str(size_bytes)]
            owner = stack.enter_context(Worker(_MODULE, ["owner", *arguments], env=env))
            self._user = stack.enter_context(Worker(_MODULE, ["user", *arguments], env=env))
            self._user.ask("connect", owner=owner.hello)
            self._pids = (owner.pid, self._user.pid)
            self._stack = stack.pop_all()
        self._signal(signal.SIGSTOP)

    def gb_per_s(self, *, write: bool, block_bytes: int, batch: int, seconds: float) -> float:
        """One measurement; but for its time both processes stand still, since some spin. Raises WorkerError."""
        self._signal(signal.SIGCONT)
        try:
            got = self._user.ask("run", write=write, block_bytes=block_bytes, batch=batch, seconds=seconds)
        finally:
            self._signal(signal.SIGSTOP)
        return float(got["bytes"]) / 1e9 / float(got["seconds"])

    def close(self) -> None:
        """End both processes."""
        self._signal(signal.SIGCONT)
        self._stack.close()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def run_engines(rounds: int, seconds: float, progress: Callable[[str], None]) -> Report:
    """All lanes that this machine has; a missing one is a note, and its bars stay open."""
    report = Report(
        "mooncache bench transfer --engines",
        machine=describe_machine(),
        versions=describe_versions(_DISTRIBUTIONS),
    )
    report.notes.append(
        f"medians of {rounds} rounds of {seconds:g} s; one batch at a time, the other lanes stopped meanwhile; "
        "mooncache compares a CRC-32C of every "
        "range over tcp, and copies between mapped memory over shm; the others compare none"
    )
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    with _lanes(report, progress) as lanes:
        for number in range(rounds):
            for (block_bytes, batch), write in (
                (shape, write) for shape in SHAPES for write in (False, True)
            ):
                for lane in lanes:
                    progress(f"round {number + 1} of {rounds}: {lane.kind.name}")
                    got = lane.gb_per_s(write=write, block_bytes=block_bytes, batch=batch, seconds=seconds)
                    samples[lane.kind.name, case_name(block_bytes, batch, write)].append(got)
    add_rows(report, {key: statistics.median(values) for key, values in samples.items()})
    return report


def case_name(block_bytes: int, batch: int, write: bool) -> str:
    """For example "read 1 MiB x64"."""
    size = f"{block_bytes // MIB} MiB" if block_bytes >= MIB else f"{block_bytes // KIB} KiB"
    return f"{'write' if write else 'read'} {size} x{batch}"


def add_rows(report: Report, medians: dict[tuple[str, str], float]) -> None:
    """A row for each lane and case; ours has a bar against each other engine on its wire."""
    cases = [case_name(size, batch, write) for size, batch in SHAPES for write in (False, True)]
    for case in cases:
        for kind in LANES:
            value = medians.get((kind.name, case))
            if value is None:
                continue
            if kind.engine != "mooncache":
                report.add(bar_row(f"{kind.name} {case}", value, "GB/s"))
                continue
            for other in (one for one in LANES if one.wire == kind.wire and one.engine != "mooncache"):
                report.add(
                    bar_row(
                        f"{kind.name} {case}",
                        value,
                        "GB/s",
                        against=f"{other.name} {case}",
                        reference=medians.get((other.name, case)),
                        at_least=_BAR,
                    )
                )


@contextlib.contextmanager
def _lanes(report: Report, progress: Callable[[str], None]) -> Iterator[list[Lane]]:
    largest = max(size * batch for size, batch in SHAPES)
    with contextlib.ExitStack() as stack:
        lanes: list[Lane] = []
        for kind in LANES:
            progress(f"starting {kind.name}")
            try:
                lanes.append(stack.enter_context(contextlib.closing(Lane(kind, largest))))
            except WorkerError as error:
                if kind.engine == "mooncache":
                    raise
                report.notes.append(f"{kind.name} was left out: {str(error)[-300:]}")
        yield lanes
