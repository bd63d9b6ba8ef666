"""`mooncache bench store`: this store beside raw copies and beside the original, in one run on one machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from mooncache.bench.store.options import StoreBenchOptions
from mooncache.reporting.rows import Report, describe_machine, describe_versions

__all__ = ["CASES", "StoreBenchOptions", "run"]

CASES = (
    "memory",
    "batch",
    "small",
    "chain",
    "dropin",
    "index",
    "rebuild",
    "membership",
    "footprint",
    "eviction",
)
"""Names for `--only`, in the order in which they run."""

_DISTRIBUTIONS = ("mooncache", "mooncake-transfer-engine-non-cuda", "grpcio", "protobuf", "nanobind")


def run(
    options: StoreBenchOptions,
    progress: Callable[[str], None],
    only: tuple[str, ...] = CASES,
) -> Report:
    """Run the chosen cases and return their rows.

    Raises:
        WorkerError: a measured process did not start or gave a wrong answer.
    """
    from mooncache.bench.store import byte_cases, dropin_case, eviction_case, membership_case, metadata_cases

    report = Report(
        "mooncache bench store", machine=describe_machine(), versions=describe_versions(_DISTRIBUTIONS)
    )
    report.notes.append(
        f"medians of {options.repeats} rounds over all systems in turn; CRC-32C verification on"
    )
    if "memory" in only:
        progress("memory")
        byte_cases.native_memory_rows(report, options)
    if {"batch", "small", "chain"} & set(only):
        with ExitStack() as stack:
            systems = byte_cases.Systems(options, stack, progress)
            if "batch" in only:
                byte_cases.batch_rows(report, systems, options, progress)
            if "small" in only:
                byte_cases.small_rows(report, systems, options, progress)
            if "chain" in only:
                byte_cases.chain_rows(report, systems, options, progress)
    if "dropin" in only:
        dropin_case.dropin_rows(report, options, progress)
    if "index" in only:
        metadata_cases.index_rows(report, options, progress)
    if "rebuild" in only:
        metadata_cases.rebuild_rows(report, options, progress)
    if "membership" in only:
        membership_case.membership_rows(report, options, progress)
    if "footprint" in only:
        metadata_cases.memory_rows(report, options, progress)
    if "eviction" in only:
        eviction_case.eviction_rows(report, options, progress)
    return report
