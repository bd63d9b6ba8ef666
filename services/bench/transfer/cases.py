"""Runs the measurements of `mooncache bench transfer` and makes rows of them.

A case is one combination of transport, direction, block size, batch and threads, and over RDMA of how blocks follow
each other: in batches, as a stream (what the wire's own tool does), and as a stream without checksums. Every round
goes once over all cases and that tool, so a noisy moment of the machine falls on all alike; rows are medians over the
rounds, latencies come from all batches of all rounds together.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from mooncache import _native
from mooncache.bench.transfer import references
from mooncache.bench.transfer.nixl_lane import measure_nixl
from mooncache.bench.transfer.options import KIB, MIB, Direction, TransferOptions, Transport
from mooncache.client.native_call import call_native
from mooncache.errors import MooncacheError
from mooncache.reporting.rows import Report, bar_row

Progress = Callable[[str], None]
Shape = tuple[int, int]  # block bytes, batch
ToolRounds = dict[Shape, dict[Direction, list[float]]]  # GB/s of perftest, one for each round


class BlockFlow(StrEnum):
    """How blocks follow each other."""

    BATCH = "batch"
    STREAM = "stream"
    STREAM_UNCHECKED = "stream unchecked"


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement's coordinates."""

    transport: Transport
    direction: Direction
    block_bytes: int
    batch: int
    threads: int
    flow: BlockFlow = BlockFlow.BATCH

    def __str__(self) -> str:
        size = size_text(self.block_bytes)
        text = f"{self.transport} {self.direction} {size} x{self.batch} t{self.threads}"
        return text if self.flow == BlockFlow.BATCH else f"{text} {self.flow}"


@dataclass(slots=True)
class Samples:
    """What the rounds of one case gave."""

    gb_per_s: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)
    batch_us: list[float] = field(default_factory=list)


def size_text(size_bytes: int) -> str:
    """1 MiB, 16 KiB, 100 B."""
    if size_bytes % MIB == 0:
        return f"{size_bytes // MIB} MiB"
    return f"{size_bytes // KIB} KiB" if size_bytes % KIB == 0 else f"{size_bytes} B"


def cases(options: TransferOptions, transports: tuple[Transport, ...]) -> Iterator[Case]:
    """All combinations, the transports innermost, so that those that are compared run one after the other."""
    for size, batch, threads, direction, transport in itertools.product(
        options.block_bytes, options.batches, options.threads, options.directions, transports
    ):
        for flow in BlockFlow if transport == Transport.RDMA else (BlockFlow.BATCH,):
            yield Case(transport, direction, size, batch, threads, flow)


def measure(
    case: Case, peer: dict[str, Any], duration_ms: int, node_cpu: Callable[[], float] | None
) -> Samples:
    """One round of one case. Raises MooncacheError with the reason when it cannot run."""
    before = node_cpu() if node_cpu else 0.0
    shape: dict[str, Any] = {
        "write": case.direction == Direction.WRITE,
        "block_bytes": case.block_bytes,
        "batch": case.batch,
        "threads": case.threads,
        "duration_ms": duration_ms,
    }
    if case.transport == Transport.NIXL:
        result = measure_nixl(**shape)
    else:
        flow = {
            "continuous": case.flow != BlockFlow.BATCH,
            "verify": case.flow != BlockFlow.STREAM_UNCHECKED,
        }
        result = call_native(_native.transfer_probe, {**peer, **shape, **flow, "transport": case.transport})
    cpu_s = result["cpu_seconds"] + (node_cpu() - before if node_cpu else 0.0)
    gigabytes = result["bytes"] / 1e9
    return Samples([gigabytes / result["seconds"]], [cpu_s / gigabytes], result["batch_us"])


def measure_all(
    options: TransferOptions,
    transports: tuple[Transport, ...],
    peer: dict[str, object],
    node_cpu: Callable[[], float] | None,
    report: Report,
    progress: Progress,
    tool_rounds: ToolRounds | None = None,
) -> dict[Case, Samples]:
    """All rounds of all cases; a case that cannot run is left out and noted.

    With `tool_rounds` each round also runs perftest for every shape that was measured over RDMA, into it.
    """
    samples: dict[Case, Samples] = defaultdict(Samples)
    refused: set[tuple[Transport, int]] = set()  # NIXL refuses threads, not all of its cases
    for number in range(options.rounds):
        for case in cases(options, transports):
            if (case.transport, case.threads) in refused:
                continue
            progress(f"round {number + 1} of {options.rounds}: {case}")
            beside = rdma_device() if case.transport == Transport.RDMA and tool_rounds is not None else None
            try:
                got = measure(case, *_like_tool(peer, options, beside), node_cpu)
            except MooncacheError as error:
                refused.add((case.transport, case.threads))
                threads = f" with {case.threads} threads" if len(options.threads) > 1 else ""
                report.notes.append(f"{case.transport}{threads} was left out: {error}")
                continue
            known = samples[case]
            known.gb_per_s += got.gb_per_s
            known.cpu_s_per_gb += got.cpu_s_per_gb
            known.batch_us += got.batch_us
        if tool_rounds is not None:
            _tool_round(samples, report, progress, tool_rounds)
    return samples


def _like_tool(
    peer: dict[str, object], options: TransferOptions, device: str | None
) -> tuple[dict[str, object], int]:
    """Beside perftest: over the one device that it uses, and as long."""
    if device is None:
        return peer, options.duration_ms
    return {**peer, "rdma_devices": [device]}, max(options.duration_ms, references.DURATION_S * 1000)


def _tool_round(
    samples: dict[Case, Samples], report: Report, progress: Progress, tool_rounds: ToolRounds
) -> None:
    device = rdma_device()
    shapes = dict.fromkeys(
        (case.block_bytes, case.batch) for case in samples if case.transport == Transport.RDMA
    )
    for size, batch in shapes if device else ():
        progress(f"perftest {size_text(size)} x{batch}")
        for direction, rate in _figures(report, references.perftest(device or "", size, batch)).items():
            tool_rounds.setdefault((size, batch), {}).setdefault(direction, []).append(rate)


def percentile_us(values: list[float], percent: int) -> float:
    """The nearest-rank percentile; of few values the highest."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * percent // 100) - 1))]


def add_rows(report: Report, samples: dict[Case, Samples], yardsticks: dict[Case, tuple[str, float]]) -> None:
    """Four rows for each case; throughput stands against the case's yardstick where there is one."""
    for case, known in samples.items():
        against, reference = yardsticks.get(case, (None, None))
        # the tool streams: a batch that ends before the next begins cannot match it, and is shown without a bar
        at_least = 0.85 if against and against.startswith("ib_") and case.flow != BlockFlow.BATCH else None
        report.add(
            bar_row(
                str(case),
                statistics.median(known.gb_per_s),
                "GB/s",
                against=against,
                reference=reference,
                at_least=at_least,
            ),
            bar_row(f"{case} batch p50", percentile_us(known.batch_us, 50), "us"),
            bar_row(f"{case} batch p99", percentile_us(known.batch_us, 99), "us"),
            bar_row(f"{case} processor", statistics.median(known.cpu_s_per_gb), "CPU s/GB"),
        )


def reference_rows(
    report: Report,
    options: TransferOptions,
    measured: list[Case],
    progress: Progress,
    tool_rounds: ToolRounds,
) -> dict[Case, tuple[str, float]]:
    """Run the reference tools, add their rows, and map each case to its reference."""
    yardsticks: dict[Case, tuple[str, float]] = {}
    shapes = dict.fromkeys((case.block_bytes, case.batch) for case in measured)
    for size, batch in shapes:
        mine = [case for case in measured if (case.block_bytes, case.batch) == (size, batch)]
        used = {case.transport for case in mine}
        label = f"{size_text(size)} x{batch}"
        found: dict[tuple[Transport, Direction], tuple[str, float]] = {}
        if used & {Transport.SHM, Transport.LOOPBACK}:
            progress(f"memcpy {label}")
            rate = references.memcpy(size, batch, options.duration_ms / 1e3)
            report.add(bar_row(f"memcpy {label}", rate, "GB/s"))
            for transport, direction in itertools.product(
                (Transport.SHM, Transport.LOOPBACK), options.directions
            ):
                found[transport, direction] = (f"memcpy {label}", rate)
        if Transport.NIXL in used:
            progress(f"NIXL itself {label}")
            answer = references.nixl(size, batch, options.duration_ms / 1e3)
            _note(report, found, Transport.NIXL, "NIXL over UCX", label, _figures(report, answer))
        if Transport.TCP in used:
            progress(f"raw socket {label}")
            figures = references.raw_socket(size, batch, options.duration_ms / 1e3)
            _note(report, found, Transport.TCP, "raw socket", label, figures)
            _original(report, mine, label, progress)
        for direction, rates in tool_rounds.get((size, batch), {}).items():
            name = f"ib_{direction}_bw {label}"
            report.add(bar_row(name, statistics.median(rates), "GB/s"))
            found[Transport.RDMA, direction] = (name, statistics.median(rates))
        for case in mine:
            if case.threads == 1 and (case.transport, case.direction) in found:
                yardsticks[case] = found[case.transport, case.direction]
    if any(case.transport == Transport.TCP for case in measured):
        progress("iperf3")
        for direction, rate in _figures(report, references.iperf3()).items():
            report.add(bar_row(f"iperf3 {direction}, one stream", rate, "GB/s"))
    return yardsticks


def _note(
    report: Report,
    found: dict[tuple[Transport, Direction], tuple[str, float]],
    transport: Transport,
    tool: str,
    label: str,
    figures: references.ReferenceFigures,
) -> None:
    for direction, rate in figures.items():
        name = f"{tool} {direction} {label}"
        report.add(bar_row(name, rate, "GB/s"))
        found[transport, direction] = (name, rate)


def _original(report: Report, mine: list[Case], label: str, progress: Progress) -> None:
    for threads in dict.fromkeys(case.threads for case in mine):
        progress(f"transfer_engine_bench {label} t{threads}")
        answer = references.original_engine(mine[0].block_bytes, mine[0].batch, threads)
        for direction, rate in _figures(report, answer).items():
            report.add(
                bar_row(f"original transfer_engine_bench tcp {direction} {label} t{threads}", rate, "GB/s")
            )


def _figures(report: Report, answer: references.ReferenceFigures | str) -> references.ReferenceFigures:
    if isinstance(answer, dict):
        return answer
    if answer not in report.notes:
        report.notes.append(answer)
    return {}


def rdma_device() -> str | None:
    """The first device of this host, as the kernel lists them."""
    folder = Path("/sys/class/infiniband")
    return min((path.name for path in folder.iterdir()), default=None) if folder.is_dir() else None
