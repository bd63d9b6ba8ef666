"""What is shown of runs: numbers that agree with the run, a page that needs nothing else, figures that repeat."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from mooncache.simulate import Result
from mooncache.simulate.report import figures, plots, tables
from mooncache.simulate.report.document import document, plain
from mooncache.simulate.report.page import page
from mooncache.simulate.report.summary import Spread, Summary, limiting, per_window

VOID = {"meta", "br", "img", "link"}


class Balanced(HTMLParser):
    """Every element that opens closes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def test_summary_counts_every_request_once(results: list[Result], summaries: list[Summary]) -> None:
    for result, summary in zip(results, summaries, strict=True):
        assert sum(summary.outcomes.values()) == len(result) == summary.requests
        assert summary.outcomes["done"] == int(result.done.sum())
        assert 0 < summary.attainment <= min(summary.ttft_within, summary.tbt_within)
        assert sum(summary.reasons.values()) == len(result) - summary.outcomes["done"]


def test_spread_leaves_out_who_never_got_there() -> None:
    spread = Spread.of(np.array([1.0, float("nan"), 3.0]))
    assert (spread.mean, spread.p50, spread.count) == (2.0, 2.0, 2)
    assert math.isnan(Spread.of(np.array([float("nan")])).mean)


def test_windows_hold_all_requests(results: list[Result]) -> None:
    at_s, arrived, kept = per_window(results[0])
    width_s = at_s[1] - at_s[0]
    assert round(float(arrived.sum() * width_s)) == len(results[0])
    assert round(float(kept.sum() * width_s)) == int(results[0].effective().sum())


def test_document_is_json_without_nan(summaries: list[Summary], about: dict[str, Any]) -> None:
    text = json.dumps(document(summaries, about), allow_nan=False)
    found = json.loads(text)
    assert {row["name"] for row in found["rows"]} >= {"mooncache: mean TTFT", "random: hit ratio"}
    ratios = [row for row in found["rows"] if row["name"] == "mooncache: mean TTFT"]
    expected = summaries[0].ttft_s.mean / summaries[1].ttft_s.mean
    assert ratios[0]["ratio"] == pytest.approx(expected)
    assert ratios[0]["against"] == "random: mean TTFT"
    assert plain({"a": [float("inf"), 1.0]}) == {"a": [None, 1.0]}


def test_page_needs_nothing_else(
    results: list[Result], summaries: list[Summary], about: dict[str, Any]
) -> None:
    text = page(results, summaries, about)
    checker = Balanced()
    checker.feed(text)
    assert not checker.open
    assert "<script" not in text
    outside = {url for url in re.findall(r"https?://[^\"'\s<>)]+", text) if "w3.org" not in url}
    assert not outside, "the page would need the network"
    assert "3P+2D &lt;b&gt;" in text
    assert "3P+2D <b>" not in text, "a name from a file became markup"
    plots = text.count("<svg ")
    assert plots >= 8
    assert plots == len(re.findall(r'aria-label="[^"]{20,}"', text)) == text.count("<details>")
    assert "prefers-color-scheme:dark" in text
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "ids of plots collide"
    for target in re.findall(r'(?:url\(#|href="#)([^")]+)', text):
        assert target in ids


def test_arrivals_are_not_cut_off(results: list[Result], summaries: list[Summary]) -> None:
    drawing = plots.goodput(results, summaries)
    _, arrived, _ = per_window(results[0])
    assert drawing.plot.axes.get_ylim()[1] > arrived.max()


@pytest.mark.parametrize("span_s", [1.0, 75.0, 3600.0, 30 * 86_400.0])
def test_minutes_have_a_few_ticks(span_s: float) -> None:
    plot = figures.new_figure("t")
    figures.line(plot, [0.0, span_s], [0.0, 1.0], "x")
    figures.minutes_axis(plot)
    assert len(plot.axes.get_xticks()) <= 55
    assert figures.svg(plot, "a line")


def test_page_is_the_same_twice(
    results: list[Result], summaries: list[Summary], about: dict[str, Any]
) -> None:
    assert page(results, summaries, about) == page(results, summaries, about)


def test_figure_file_is_xml_with_colours_of_its_own(tmp_path: Path) -> None:
    plot = figures.new_figure("A < B", y_label="%")
    figures.cdf(plot, np.arange(5000.0), "x", of=10_000)
    figures.limit_line(plot, 30.0, "promised")
    path = tmp_path / "figure.svg"
    figures.save_svg(plot, path, alt='it says "half"')
    root = ElementTree.parse(path).getroot()
    assert root.attrib["aria-label"] == 'it says "half"'
    assert "--paper" in path.read_text()
    assert path.stat().st_size < 40_000, "a curve of many points was not thinned"


def test_cdf_ends_where_requests_were_lost() -> None:
    plot = figures.new_figure("t")
    figures.cdf(plot, np.array([1.0, 2.0, float("nan")]), "x", of=4)
    line = plot.axes.get_lines()[0]
    assert list(np.asarray(line.get_ydata())) == [25.0, 50.0]
    figures.cdf(plot, np.array([float("nan")]), "nobody")
    assert figures.svg(plot, "nobody got there")


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (0.0, "0 s"),
        (4.25e-5, "42.5 µs"),
        (0.0425, "42.5 ms"),
        (1.5, "1.5 s"),
        (1234.0, "1,234 s"),
        (math.nan, "-"),
    ],
)
def test_durations_are_read_at_once(value_s: float, text: str) -> None:
    assert figures.duration_text(value_s) == text


def test_tables_fit_a_terminal(
    results: list[Result], summaries: list[Summary], about: dict[str, Any]
) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, highlight=False)
    tables.show_about(console, about, summaries)
    tables.show_run(console, results[0], summaries[0])
    tables.show_comparison(console, summaries)
    text = stream.getvalue()
    assert "…" not in text, "a column was cut"
    for word in ("attainment", "hit ratio", "prefill-0", "decode-1", "p99", "Bottleneck"):
        assert word in text


def test_what_holds_it_back_follows_the_numbers(summaries: list[Summary]) -> None:
    assert any(word in limiting(summaries[1]) for word in ("refused", "Prompts wait", "Tokens come"))


def test_failures_are_not_called_slow_tokens(summaries: list[Summary]) -> None:
    lost = replace(
        summaries[0], attainment=0.0, outcomes={"failed": summaries[0].requests}, reasons={"too_large": 9}
    )
    assert "too_large" in limiting(lost)
