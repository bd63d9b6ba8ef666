"""`mooncache bench transfer`: what the transports move between two processes or two hosts, beside each wire's tool."""

from __future__ import annotations

from collections.abc import Callable

from mooncache import _native
from mooncache.bench.transfer.cases import Case, Samples, ToolRounds, add_rows, measure_all, reference_rows
from mooncache.bench.transfer.node import TransferNode
from mooncache.bench.transfer.options import TransferOptions, Transport
from mooncache.reporting.rows import Report, describe_machine, describe_versions

__all__ = ["TransferOptions", "run"]

_DISTRIBUTIONS = ("mooncache", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "nixl-cu12")


def run(
    options: TransferOptions, progress: Callable[[str], None], peer: dict[str, object] | None = None
) -> tuple[Report, dict[Case, Samples]]:
    """Measure against a node of its own, or against `peer` (tcp_host, tcp_port, token) on another host.

    Raises:
        WorkerError: the node's process did not start.
    """
    report = Report(
        "mooncache bench transfer", machine=describe_machine(), versions=describe_versions(_DISTRIBUTIONS)
    )
    report.notes.append(
        f"medians of {options.rounds} rounds; a batch is submitted whole and polled until its last block; a stream "
        "submits a block for each that is through; checksums of all reads compared, but where it says unchecked; "
        f"CRC-32C implementation: {_native.crc32c_implementation()}"
    )
    asked = options.transports or tuple(Transport)
    tool_rounds: ToolRounds = {}
    if peer is not None:
        report.notes.append("another host: processor time is that of this side only")
        asked = tuple(one for one in asked if one in {Transport.TCP, Transport.RDMA})
        samples = measure_all(options, asked, peer, None, report, progress)
    else:
        progress("starting a node")
        node = TransferNode(options.arena_bytes)
        try:
            tool = tool_rounds if options.references else None
            samples = measure_all(options, asked, node.peer, node.cpu_seconds, report, progress, tool)
        finally:
            node.close()
    yardsticks = {}
    if options.references and peer is None and samples:
        yardsticks = reference_rows(report, options, list(samples), progress, tool_rounds)
    add_rows(report, samples, yardsticks)
    return report, samples
