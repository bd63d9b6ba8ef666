"""`mooncache bench gateway`: what a gateway costs, beside the engine without it, in one run on one machine."""

from __future__ import annotations

from collections.abc import Callable

from mooncache.bench.gateway.options import GatewayBenchOptions
from mooncache.reporting.rows import Report, describe_machine, describe_versions

__all__ = ["CASES", "GatewayBenchOptions", "run"]

CASES = ("tokens", "latency", "turns", "relay")
"""Names for `--only`, in the order in which they run."""

_DISTRIBUTIONS = ("mooncache", "tokenizers", "uvicorn", "aiohttp", "uvloop", "grpcio")


def run(
    options: GatewayBenchOptions,
    progress: Callable[[str], None],
    only: tuple[str, ...] = CASES,
) -> Report:
    """Run the chosen cases and return their rows.

    Raises:
        WorkerError, MooncacheError: a measured process did not start or gave a wrong answer.
    """
    from mooncache.bench.gateway import cases
    from mooncache.bench.gateway.stack import start_stack

    report = Report(
        "mooncache bench gateway", machine=describe_machine(), versions=describe_versions(_DISTRIBUTIONS)
    )
    if "tokens" in only:
        progress("tokens")
        cases.token_rows(report, options)
    if {"latency", "turns", "relay"} & set(only):
        progress("starting conductor, gateway and null engines")
        with start_stack() as stack, cases.start_load(stack, options) as load:
            if "latency" in only:
                cases.latency_rows(report, stack, load, options, progress)
            if "turns" in only:
                cases.turn_rows(report, stack, load, options, progress)
            if "relay" in only:
                cases.relay_rows(report, stack, load, options, progress)
    return report
