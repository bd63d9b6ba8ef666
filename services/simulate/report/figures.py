"""Small plots that read well on a phone, in the dark, and in a diff.

Every figure of Mooncache is drawn here: by matplotlib, as SVG text without ids that could collide, without dates and
random names, so that equal numbers give equal bytes. Colours are CSS variables with a light default; a page (or the
SVG itself, when it is a file) gives them other values in the dark. A series has a colour *and* a dash, so that
colour is never the only difference. Matplotlib is imported when something is drawn, never before.

    figure = new_figure("Time to first token")
    cdf(figure, seconds, "algorithm1", order=0)
    limit_line(figure, 30.0, "30 s promised")
    save_svg(figure, Path("ttft.svg"), alt="Half of the prompts are answered within 1.2 s")
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import ArrayLike

from mooncache.errors import Unsupported

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN: Final = 4.8
HEIGHT_IN: Final = 2.9
"""A figure is about as wide as a phone at 96 dpi, so its text keeps a readable size there."""

INK: Final = "#1f2430"
MUTED: Final = "#6b7280"
GRID: Final = "#d9dde3"
PAPER: Final = "#fdfdfe"
LIMIT: Final = "#c0392b"
SERIES: Final = (
    "#1f6fb4",
    "#d9730d",
    "#2a8f5b",
    "#b0398f",
    "#7a5cc4",
    "#9a7b00",
    "#0f8b9a",
    "#a8443a",
    "#5d6b7c",
    "#3f51c1",
)
DASHES: Final[tuple[object, ...]] = (
    "-",
    (0, (5, 1.6)),
    (0, (1.4, 1.4)),
    (0, (6, 1.5, 1.4, 1.5)),
    (0, (3, 1)),
)
_DARK: Final = {
    INK: "#e6e9ef",
    MUTED: "#9aa4b2",
    GRID: "#363d49",
    PAPER: "#14171c",
    LIMIT: "#ff7a6b",
    SERIES[0]: "#62aef2",
    SERIES[1]: "#ffa24d",
    SERIES[2]: "#5fce94",
    SERIES[3]: "#ee86cf",
    SERIES[4]: "#b39bff",
    SERIES[5]: "#e0c04a",
    SERIES[6]: "#4fd0e0",
    SERIES[7]: "#f0938a",
    SERIES[8]: "#a5b3c5",
    SERIES[9]: "#8f9dff",
}
_NAMES: Final[Mapping[str, str]] = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    PAPER: "paper",
    LIMIT: "limit",
    **{colour: f"c{number}" for number, colour in enumerate(SERIES)},
}
_RC: Final[Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mooncache",
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "text.color": INK,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "lines.linewidth": 1.7,
    "path.simplify": True,
    "path.simplify_threshold": 0.3,
}
_CURVE_POINTS_MAX: Final = 400
_STEPS_S: Final = (3, 6, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400)


@dataclass(slots=True)
class Plot:
    """One drawing area with its title; `figure` and `axes` are matplotlib's own, for what helpers do not do."""

    figure: Figure
    axes: Axes
    title: str
    labelled: int = 0


def colour_of(order: int) -> str:
    """The colour of the series of this order; the same order has the same colour in every figure of a page."""
    return SERIES[order % len(SERIES)]


def dash_of(order: int) -> object:
    """The dash of the series of this order (matplotlib's linestyle)."""
    return DASHES[order % len(DASHES)]


def colour_css(*, dark: bool) -> str:
    """Declarations of the CSS variables that figures refer to."""
    return "".join(f"--{name}:{_DARK[colour] if dark else colour};" for colour, name in _NAMES.items())


@contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise Unsupported(
            'Plots need matplotlib: pip install "mooncache[simulate]", or leave the plots out.'
        ) from error
    with mpl.rc_context(_RC):
        yield


def new_figure(
    title: str,
    *,
    x_label: str = "",
    y_label: str = "",
    width_in: float = WIDTH_IN,
    height_in: float = HEIGHT_IN,
) -> Plot:
    """An empty plot in the house style.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.tick_params(length=3, width=0.7)
        return Plot(figure, axes, title)


def line(plot: Plot, x: ArrayLike, y: ArrayLike, label: str, *, order: int = 0, faint: bool = False) -> None:
    """One curve; `order` gives colour and dash. NaN leaves a gap."""
    with _style():
        plot.axes.plot(
            np.asarray(x, dtype=np.float64),
            np.asarray(y, dtype=np.float64),
            label=label,
            color=MUTED if faint else colour_of(order),
            linestyle="-" if faint else dash_of(order),
            linewidth=1.0 if faint else 1.7,
        )
        plot.labelled += 1


def cdf(plot: Plot, values: ArrayLike, label: str, *, order: int = 0, of: int | None = None) -> None:
    """Share (percent) of values not above x. `of` counts those that never got a value: the curve ends below 100.

    At most a few hundred points are drawn, those of equal steps in share, so a million requests stay small.
    """
    known = np.sort(np.asarray(values, dtype=np.float64))
    known = known[np.isfinite(known)]
    if not known.size:
        line(plot, [], [], label, order=order)
        return
    shares = np.arange(1, known.size + 1) * (100.0 / max(of or known.size, known.size))
    if known.size > _CURVE_POINTS_MAX:
        picked = np.unique(np.linspace(0, known.size - 1, _CURVE_POINTS_MAX).astype(np.int64))
        known, shares = known[picked], shares[picked]
    line(plot, known, shares, label, order=order)
    plot.axes.set_ylim(0, 102)


def bars(
    plot: Plot,
    names: Sequence[str],
    parts: Mapping[str, ArrayLike],
    *,
    text: Callable[[float], str] | None = None,
) -> None:
    """Horizontal bars, first name on top; several parts are stacked. `text` writes the sum at the end of each bar."""
    with _style():
        at = np.arange(len(names))
        begin = np.zeros(len(names))
        for order, (label, values) in enumerate(parts.items()):
            lengths = np.nan_to_num(np.asarray(values, dtype=np.float64))
            plot.axes.barh(at, lengths, left=begin, height=0.62, label=label, color=colour_of(order))
            begin = begin + lengths
            plot.labelled += len(parts) > 1
        if text is not None:
            for row, total in enumerate(begin):
                plot.axes.annotate(
                    text(float(total)),
                    (total, row),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
            plot.axes.margins(x=0.14)
        plot.axes.set_yticks(at, list(names))
        plot.axes.invert_yaxis()
        plot.axes.grid(visible=False, axis="y")


def intervals(
    plot: Plot, names: Sequence[str], parts: Mapping[str, Sequence[tuple[int, float, float]]]
) -> None:
    """Rows on one line of time, first name on top; each part is a colour with its intervals (row, begin, end).

    A part without intervals keeps its colour for other figures, and is not in the legend.
    """
    with _style():
        for order, (label, found) in enumerate(parts.items()):
            if not found:
                continue
            rows, begins, ends = (np.array([each[column] for each in found]) for column in range(3))
            plot.axes.barh(
                rows,
                ends - begins,
                left=begins,
                height=0.62,
                label=label,
                color=colour_of(order),
                linewidth=0,
            )
            plot.labelled += 1
        plot.axes.set_yticks(np.arange(len(names)), list(names))
        plot.axes.invert_yaxis()
        plot.axes.grid(visible=False, axis="y")


def limit_line(plot: Plot, at: float, text: str, *, vertical: bool = True) -> None:
    """A promise: a thin red line with its name. Vertical at x, or horizontal at y."""
    with _style():
        style: dict[str, Any] = {"color": LIMIT, "linewidth": 1.1, "linestyle": (0, (2, 1.5))}
        # Outside of what is drawn a promise would squeeze the plot instead of explaining it.
        note: dict[str, Any] = {"color": LIMIT, "fontsize": 7.5, "annotation_clip": True, "in_layout": False}
        if vertical:
            plot.axes.axvline(at, **style)
            plot.axes.annotate(
                text,
                (at, 0.03),
                (-4, 0),
                xycoords=plot.axes.get_xaxis_transform(),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="bottom",
                **note,
            )
        else:
            plot.axes.axhline(at, **style)
            plot.axes.annotate(
                text,
                (0.01, at),
                (0, 3),
                xycoords=plot.axes.get_yaxis_transform(),
                textcoords="offset points",
                **note,
            )


def seconds_axis(plot: Plot, *, log: bool = True) -> None:
    """The x axis is a duration: logarithmic, with ticks a person reads ("10 ms", "1 s", "30 s")."""
    with _style():
        from matplotlib.ticker import FuncFormatter, NullFormatter

        if log:
            plot.axes.set_xscale("log")
            plot.axes.xaxis.set_minor_formatter(NullFormatter())
        plot.axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: duration_text(value)))


def minutes_axis(plot: Plot) -> None:
    """The x axis is time since the start of the trace, given in seconds and shown in minutes."""
    with _style():
        from matplotlib.ticker import FuncFormatter, MultipleLocator

        low_s, high_s = plot.axes.get_xlim()
        step_s = next((s for s in _STEPS_S if (high_s - low_s) / s <= 7), _STEPS_S[-1])
        plot.axes.xaxis.set_major_locator(MultipleLocator(max(step_s, (high_s - low_s) / 50)))
        plot.axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 60:g}"))
        plot.axes.set_xlabel("minutes since the start")
        plot.axes.margins(x=0.01)


def duration_text(value_s: float) -> str:
    """0.0425 -> "42.5 ms", 0.5 -> "500 ms", 30 -> "30 s"."""
    if not np.isfinite(value_s):
        return "-"
    if value_s == 0.0:
        return "0 s"
    if abs(value_s) < 1e-3:
        return f"{value_s * 1e6:.3g} µs"
    if abs(value_s) < 1.0:
        return f"{value_s * 1e3:.3g} ms"
    return f"{value_s:,.0f} s" if abs(value_s) >= 100 else f"{value_s:.3g} s"


def svg(plot: Plot, alt: str, *, prefix: str = "f") -> str:
    """The plot as an `<svg>` element for a page that declares `colour_css`. `prefix` keeps ids of a page apart.

    `alt` is what a screen reader says instead of the plot: its main message, not "a chart".
    """
    with _style():
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        if plot.labelled > 1:
            columns = 1 if plot.labelled < 4 else 2 if plot.labelled < 8 else 3
            plot.figure.legend(
                *plot.axes.get_legend_handles_labels(), loc="outside lower center", ncols=max(columns, 2)
            )
        buffer = io.StringIO()
        canvas: Any = FigureCanvasSVG(plot.figure)
        canvas.print_svg(buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)
    text = text.replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans'")
    for colour, name in _NAMES.items():
        text = text.replace(colour, f"var(--{name}, {colour})")
    width, height = (round(float(size) * 72) for size in plot.figure.get_size_inches())
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(alt, quote=True)}">'
        f"<title>{html.escape(plot.title)}</title><desc>{html.escape(alt)}</desc>"
    )
    return head + re.sub(r"\n\s*", "\n", re.sub(r"^<svg[^>]*>", "", text)).rstrip() + "\n"


def save_svg(plot: Plot, path: Path, alt: str) -> None:
    """Write the plot as a file that brings its own colours, light and dark, with a background of its own."""
    text = svg(plot, alt)
    width, height = (float(size) * 72 for size in plot.figure.get_size_inches())
    style = (
        f"<style>svg{{{colour_css(dark=False)}}}"
        f"@media (prefers-color-scheme: dark){{svg{{{colour_css(dark=True)}}}}}</style>"
        f'<rect width="{width:g}" height="{height:g}" rx="6" style="fill: var(--paper, {PAPER})"/>'
    )
    text = text.replace("</desc>", f"</desc>{style}", 1)
    path.write_text(text, encoding="utf-8")
