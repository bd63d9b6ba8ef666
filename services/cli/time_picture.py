"""The spans of one request as a picture: what `mooncache why --svg FILE` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mooncache.cli.core.time_bars import last_shown_ms, row_name
from mooncache.kvcache.span_part import SpanPart
from mooncache.simulate.report.figures import WIDTH_IN, intervals, new_figure, save_svg

_ROW_IN: Final = 0.24
_FRAME_IN: Final = 1.15  # title, axis and legend
_WIDE: Final = 1.5
_PARTS: Final[Mapping[str, str]] = {
    SpanPart.PLAN: "planning",
    SpanPart.WAIT: "waiting for blocks",
    SpanPart.LOAD: "loading blocks",
    SpanPart.QUEUE: "queueing",
    SpanPart.COMPUTE: "computing the prompt",
    SpanPart.GENERATE: "generating",
    SpanPart.UNKNOWN: "unknown",
}


def save_time_picture(spans: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write the picture as an SVG file that reads well in the light and in the dark.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    end_ms = last_shown_ms(spans)
    names: list[str] = []
    parts: dict[str, list[tuple[int, float, float]]] = {label: [] for label in _PARTS.values()}
    for span in spans:
        # Loading has a row of its own: it goes on while the leg waits.
        name = row_name(span) + (" loads" if span["part"] == SpanPart.LOAD else "")
        if name not in names:
            names.append(name)
        interval = (names.index(name), float(span["from_ms"]), min(end_ms, float(span["to_ms"])))
        parts[_PARTS.get(span["part"], "unknown")].append(interval)
    plot = new_figure(
        title,
        x_label="ms since the gateway took the request",
        width_in=WIDTH_IN * _WIDE,
        height_in=_FRAME_IN + _ROW_IN * len(names),
    )
    intervals(plot, names, parts)
    plot.axes.set_xlim(0, end_ms)
    save_svg(plot, path, alt=_alt(spans))


def _alt(spans: Sequence[Mapping[str, Any]]) -> str:
    """What a screen reader says: every span as a short clause."""
    return "; ".join(
        f"{row_name(span)}: {_PARTS.get(span['part'], 'unknown')} "
        f"from {span['from_ms']:,.0f} to {span['to_ms']:,.0f} ms"
        for span in spans
    )
