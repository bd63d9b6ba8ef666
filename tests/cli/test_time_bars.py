"""Bars on one line of time: as wide as the terminal, true to scale, and nothing invisible."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.cli.core.time_bars import BARS, MORE, bars


def span(leg: str, part: str, from_ms: float, to_ms: float, instance: str = "") -> dict[str, Any]:
    return {"leg": leg, "instance": instance, "part": part, "from_ms": from_ms, "to_ms": to_ms}


REQUEST = [
    span("gateway", "plan", 0.0, 2.0),
    span("prefill", "wait", 2.0, 2.5, "prefill-1"),
    span("prefill", "compute", 2.5, 60.0, "prefill-1"),
    span("decode", "wait", 2.5, 65.0, "decode-1"),
    span("decode", "load", 55.0, 70.0, "decode-1"),
    span("decode", "compute", 70.0, 80.0, "decode-1"),
    span("decode", "generate", 80.0, 9000.0, "decode-1"),
]


def cells(row: str) -> tuple[int, int]:
    """Where the bar of a row begins and how long it is; rows are those of REQUEST in ASCII."""
    where = [at for at, character in enumerate(row) if character in "-.#=~>"]
    where = [at for at in where if at >= 28 and at < row.rindex("ms") - 8]
    return where[0], len(where)


@pytest.mark.parametrize("width", [80, 120])
def test_they_fill_the_terminal_and_no_more(width: int) -> None:
    for plain in (False, True):
        rows = bars(REQUEST, width, plain=plain)
        assert len(rows) == 1 + len(REQUEST)
        assert max(map(len, rows)) == width
        assert plain is all(row.isascii() for row in rows)


def test_bars_are_true_to_scale_and_generating_goes_on() -> None:
    rows = bars(REQUEST, 120, plain=True)
    assert rows[0].split() == ["|0", "ms", "|20", "|40", "|60", "|80"]
    zero = rows[0].index("|0")
    assert [rows[0].index(f"|{ms}") - zero for ms in (20, 40)] == pytest.approx([18, 35], abs=2)
    compute, wait, load = cells(rows[3]), cells(rows[4]), cells(rows[5])
    assert compute[1] > 3 * load[1] and wait[1] > compute[1]
    assert load[0] < wait[0] + wait[1], "it began while the leg waited"
    assert MORE[0] in rows[-1] and "8,920.0 ms" in rows[-1]
    assert "prefill prefill-1" in rows[2] and "prefill" not in rows[3], "a leg is named once"


def test_long_names_and_narrow_terminals() -> None:
    long = [span("decode", "wait", 0.0, 5.0, "an-instance-with-a-name-of-many-characters-on-a-host")]
    assert max(map(len, bars(long, 60))) <= 60
    assert len(bars(REQUEST, 1)) == 1 + len(REQUEST)
    assert bars([], 80) == []


parts = st.sampled_from(sorted(BARS))
times = st.floats(0.0, 1e7, allow_nan=False)


@given(st.lists(st.tuples(parts, times, times), min_size=1, max_size=8), st.integers(40, 200), st.booleans())
def test_any_spans_fit(spans: list[tuple[str, float, float]], width: int, plain: bool) -> None:
    given_spans = [span("decode", part, min(a, b), max(a, b), "d1") for part, a, b in spans]
    rows = bars(given_spans, width, plain=plain)
    assert len(rows) == 1 + len(spans)
    assert max(map(len, rows)) <= max(width, 50)
    kind = 0 if plain else 1
    for row, (part, _, _) in zip(rows[1:], spans, strict=True):
        assert BARS[part][kind] in row or MORE[kind] in row, "every span is visible"
