"""Rows, bars and the report's JSON shape."""

from __future__ import annotations

import io
import json

from rich.console import Console

from mooncache.reporting.rows import Report, bar_row


def test_ratio_bar_is_met_or_missed() -> None:
    assert bar_row("get", 2.0, "GB/s", against="raw", reference=1.0, at_least=1.5).met is True
    assert bar_row("get", 1.0, "GB/s", against="raw", reference=1.0, at_least=1.5).met is False
    assert bar_row("p50", 40.0, "us", against="peer", reference=100.0, at_most=0.5).met is True


def test_bar_without_its_reference_stays_open() -> None:
    row = bar_row("get", 2.0, "GB/s", against="peer", reference=None, at_least=1.5)
    assert (row.met, row.ratio, row.bar) == (None, None, "at least 1.5x peer")


def test_a_reference_of_zero_limits_and_promises_nothing() -> None:
    assert bar_row("failed", 1.0, "", against="before", reference=0.0, at_most=1.2).met is False
    assert bar_row("failed", 0.0, "", against="before", reference=0.0, at_most=1.2).met is True
    row = bar_row("hits", 0.0, "", against="before", reference=0.0, at_least=0.99)
    assert (row.ratio, row.met, row.bar) == (None, None, "at least 0.99x before")


def test_bar_on_the_value_itself() -> None:
    assert bar_row("rebuild", 3.5, "s", at_most=3.0).met is False
    assert bar_row("rebuild", 3.5, "s").met is None


def test_json_has_the_promised_shape() -> None:
    report = Report("t", machine={"cores": "2"}, versions={"mooncache": "0"})
    report.add(bar_row("get", 2.0, "GB/s", against="raw", reference=1.0, at_least=1.5))
    document = json.loads(report.to_json())
    assert set(document) >= {"rows", "machine", "versions"}
    assert set(document["rows"][0]) == {"name", "value", "unit", "ratio", "against", "bar", "met"}


def test_table_names_what_was_missed() -> None:
    report = Report("t")
    report.add(bar_row("get", 1.0, "GB/s", against="raw", reference=1.0, at_least=1.5))
    output = io.StringIO()
    report.print(Console(file=output, width=120))
    assert "1.00x" in output.getvalue()
    assert "no" in output.getvalue()


def test_markdown_marks_what_was_missed() -> None:
    report = Report("t", machine={"cores": "2"}, notes=["medians of 9 rounds"])
    report.add(bar_row("get", 1.0, "GB/s", against="raw", reference=1.0, at_least=1.5))
    assert "| get | 1 GB/s | 1.00x | at least 1.5x raw | **no** |" in report.to_markdown()
