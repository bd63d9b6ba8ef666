"""`mooncache bench gateway`: what a gateway costs, beside the engine without it, in one run on one machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from mooncache.reporting.rows import Report, describe_machine, describe_versions

__all__ = ["CASES", "GatewayBenchOptions", "run"]

CASES = ("tokens", "latency", "turns", "relay")
"""Names for `--only`, in the order in which they run."""

_DISTRIBUTIONS = ("mooncache", "tokenizers", "uvicorn", "aiohttp", "uvloop", "grpcio")


@dataclass(frozen=True, slots=True)
class GatewayBenchOptions:
    """How much is measured. Tokens are counted by the benchmark's tokenizer."""

    seed: int = 1
    short_tokens: int = 1000
    long_tokens: int = 32_000
    added_tokens: int = 2000
    requests: int = 512
    long_requests: int = 15
    streams: int = 64
    stream_events: int = 5000
    paced_streams: int = 250
    paced_events_per_s: float = 100.0
    paced_events: int = 500

    def quick(self) -> Self:
        """Less of everything: half a minute, not comparable."""
        return replace(
            self, requests=64, long_requests=3, stream_events=500, paced_streams=50, paced_events=50
        )


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
