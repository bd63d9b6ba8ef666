"""Spans of one request as bars on one line of time, as wide as the terminal.

The line ends a little after the last part that is not generating: an answer may take a hundred times as long as all
that came before its first token, and would leave no room for it. A bar that goes on is marked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

BARS: Final = {
    "plan": "-░",
    "wait": ".·",
    "load": "=▒",
    "queue": ":┄",
    "compute": "#█",
    "generate": "~▓",
    "unknown": "??",
}
MORE: Final = ">→"
_GENERATE: Final = "generate"
_ROOM: Final = 1.15  # of the line behind the last part that is not generating
_CELLS_MIN: Final = 10
_TICKS_MAX: Final = 5
_NAME_MAX: Final = 24


def bars(spans: Sequence[Mapping[str, Any]], width: int, *, plain: bool = False) -> list[str]:
    """Lines of text at most `width` wide (but for a very narrow terminal): a row for each span, above them the time.

    plain: with ASCII characters only.
    """
    if not spans:
        return []
    names = [row_name(span) for span in spans]
    labels = [
        ("" if at and names[at - 1] == name else name, str(span["part"]))
        for at, (name, span) in enumerate(zip(names, spans, strict=True))
    ]
    first, second = (max(len(label[column]) for label in labels) for column in (0, 1))
    times = [f"{span['to_ms'] - span['from_ms']:,.1f} ms" for span in spans]
    last = max(map(len, times))
    cells = max(_CELLS_MIN, width - first - second - last - 6)
    end_ms = last_shown_ms(spans)
    head = " " * (first + second + 4)
    rows = [head + _ticks(end_ms, cells, room=last + 2)]
    for (name, part), span, time in zip(labels, spans, times, strict=True):
        bar = _bar(span, end_ms, cells, plain=plain)
        rows.append(f"{name:<{first}}  {part:<{second}}  {bar}  {time:>{last}}")
    return [row.rstrip() for row in rows]


def row_name(span: Mapping[str, object]) -> str:
    """The leg of a span and its instance, not too long for a row."""
    name = f"{span['leg']} {span['instance']}".strip()
    return name if len(name) <= _NAME_MAX else name[: _NAME_MAX - 2] + ".."


def last_shown_ms(spans: Sequence[Mapping[str, Any]]) -> float:
    """The time at the right end of the line."""
    whole = max(float(span["to_ms"]) for span in spans)
    before = max((float(span["to_ms"]) for span in spans if span["part"] != _GENERATE), default=whole)
    return max(1e-3, min(whole, before * _ROOM))


def _bar(span: Mapping[str, Any], end_ms: float, cells: int, *, plain: bool) -> str:
    """The bar of one span: at least one cell, so that nothing that happened is invisible."""
    begin: int = min(cells - 1, math.floor(span["from_ms"] / end_ms * cells + 0.5))
    end: int = min(cells, max(begin + 1, math.floor(span["to_ms"] / end_ms * cells + 0.5)))
    kind = 0 if plain else 1
    bar = BARS.get(str(span["part"]), "??")[kind] * (end - begin)
    if span["to_ms"] > end_ms * (1 + 1e-9):
        bar = bar[:-1] + MORE[kind]
    return " " * begin + bar + " " * (cells - end)


def _ticks(end_ms: float, cells: int, room: int) -> str:
    """Round times above the bars: each number begins where its time is, and ends at most `room` cells behind them."""
    step_ms = _round_step(end_ms / _TICKS_MAX)
    row = [" "] * (cells + room)
    at_ms, free = 0.0, 0
    while at_ms <= end_ms:
        text = f"|{at_ms:,.{_digits(step_ms)}f}" + (" ms" if at_ms == 0 else "")
        cell = math.floor(at_ms / end_ms * cells + 0.5)
        if cell >= free and cell + len(text) <= len(row):
            row[cell : cell + len(text)] = text
            free = cell + len(text) + 1
        at_ms += step_ms
    return "".join(row)


def _round_step(least_ms: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50, ... that is not smaller."""
    power = 10.0 ** math.floor(math.log10(least_ms))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least_ms * (1 - 1e-9))


def _digits(step_ms: float) -> int:
    return max(0, -math.floor(math.log10(step_ms)))
