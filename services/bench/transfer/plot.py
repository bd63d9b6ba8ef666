"""The throughput of a transfer benchmark over the block size: one curve for each transport and direction."""

from __future__ import annotations

import html
import statistics
from pathlib import Path

from mooncache.bench.transfer.cases import Case, Samples, size_text
from mooncache.simulate.report import figures
from mooncache.simulate.report.html_page import html_page


def throughput_plot(samples: dict[Case, Samples]) -> tuple[figures.Plot, str]:
    """The plot and its message, for the first batch size and thread count. Raises Unsupported without matplotlib."""
    first = next(iter(samples))
    shown = [
        case
        for case in samples
        if (case.batch, case.threads, case.flow) == (first.batch, first.threads, first.flow)
    ]
    plot = figures.new_figure(
        f"Transfers: {first.batch} blocks at a time, {first.threads} thread(s)",
        x_label="block size",
        y_label="GB/s",
    )
    sizes = sorted({case.block_bytes for case in shown})
    best = (0.0, "")
    for order, (transport, direction) in enumerate(dict.fromkeys((c.transport, c.direction) for c in shown)):
        line = {
            c.block_bytes: statistics.median(samples[c].gb_per_s)
            for c in shown
            if (c.transport, c.direction) == (transport, direction)
        }
        values = [line.get(size, float("nan")) for size in sizes]
        figures.line(plot, sizes, values, f"{transport} {direction}", order=order)
        best = max(
            best, *((rate, f"{transport} {direction} at {size_text(size)}") for size, rate in line.items())
        )
    plot.axes.set_xscale("log", base=2)
    plot.axes.set_xticks(sizes, [size_text(size) for size in sizes])
    plot.axes.set_ylim(bottom=0)
    return plot, f"The fastest is {best[1]}: {best[0]:.2f} GB/s"


def write_svg(samples: dict[Case, Samples], path: Path) -> None:
    plot, alt = throughput_plot(samples)
    figures.save_svg(plot, path, alt)


def write_html(samples: dict[Case, Samples], table_markdown: str, path: Path) -> None:
    """One page without scripts: the plot, and the table as text below it."""
    plot, alt = throughput_plot(samples)
    table = html.escape(table_markdown)
    body = f"<h1>Transfers</h1><p>{html.escape(alt)}.</p>{figures.svg(plot, alt)}<pre>{table}</pre>"
    path.write_text(html_page("mooncache bench transfer", body), encoding="utf-8")
