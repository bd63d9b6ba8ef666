"""The gateway's bars, by the cases of `mooncache bench gateway`, so that one file has all bars of operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mooncache.bench.gateway import cases
from mooncache.bench.gateway.stack import start_stack
from mooncache.reporting.rows import Report

if TYPE_CHECKING:
    from mooncache.bench.operate.options import OperateBenchOptions

_TIMES_TOKENIZER: Final = 1.5


def rows(report: Report, options: OperateBenchOptions, progress: Callable[[str], None]) -> None:
    """Measure, and add the rows. Raises WorkerError."""
    progress("starting conductor, gateway and null engines")
    asked = options.gateway
    with start_stack() as stack, cases.start_load(stack, asked) as load:
        cases.latency_rows(report, stack, load, asked, progress)
        cases.turn_rows(report, stack, load, asked, progress, times_tokenizer=_TIMES_TOKENIZER)
