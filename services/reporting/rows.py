"""What every benchmark prints: rows of one shape, as a table for people and as JSON for machines.

A row compares a value with another value *measured in the same run*: machines differ and are noisy, so
ratios are what travels. `bar` is the ratio (or value, when nothing is compared) that was promised.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

STDOUT: Final = Path("-")
JsonRows = Annotated[
    Path | None,
    Parameter(
        allow_leading_hyphen=True,
        help="Print one JSON document instead of the table; with a file name, write it there beside the table.",
    ),
]
MarkdownRows = Annotated[Path | None, Parameter(help="Also write the rows as a Markdown table.")]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a benchmark."""

    name: str
    value: float
    unit: str
    ratio: float | None = None
    """value / the value of the row `against` (inverted for latencies by the caller's choice of `bar_is_at_most`)."""
    against: str | None = None  # name of a row
    bar: str | None = None
    met: bool | None = None  # None when no bar was promised


def p99(values: Sequence[float]) -> float:
    """The value below which 99 of 100 lie; of fewer than 100 the highest. There has to be one."""
    return sorted(values)[int(0.99 * len(values))]


def bar_row(
    name: str,
    value: float,
    unit: str,
    *,
    against: str | None = None,
    reference: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Row:
    """A row whose bar is on the ratio to `reference`, or on the value itself when there is no reference.

    A reference that could not be measured (None while `against` names one) leaves `met` open, and so does one of zero
    that a value should reach: it says nothing. Beside zero, a value that should not exceed it has to be zero, too.
    """
    ratio = value / reference if reference else None
    bound = at_least if at_least is not None else at_most
    if bound is None:
        return Row(name, value, unit, ratio, against)
    word = "at least" if at_least is not None else "at most"
    bar = f"{word} {bound:g}x {against}" if against else f"{word} {bound:g} {unit}"
    if against and (reference is None or (reference == 0 and at_least is not None)):
        return Row(name, value, unit, None, against, bar, None)
    limit = bound * reference if against and reference is not None else bound
    met = value >= limit if at_least is not None else value <= limit
    return Row(name, value, unit, ratio, against, bar, met)


@dataclass(slots=True)
class Report:
    """All rows of one run, with the machine and the versions that they were measured on."""

    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, *rows: Row) -> None:
        self.rows.extend(rows)

    def to_json(self) -> str:
        return json.dumps(
            {
                "rows": [asdict(row) for row in self.rows],
                "machine": self.machine,
                "versions": self.versions,
                "notes": self.notes,
            },
            indent=1,
        )

    def write_json(self, path: Path) -> None:
        path.write_text(self.to_json() + "\n", encoding="utf-8")

    def deliver(self, console: Console, json: Path | None, markdown: Path | None) -> None:
        """Print the rows, and write them to the files that were asked for. A `json` of "-" is standard output."""
        if markdown is not None:
            markdown.write_text(self.to_markdown(), encoding="utf-8")
        if json == STDOUT:
            print(self.to_json())
            return
        self.print(console)
        if json is not None:
            self.write_json(json)
            console.print(f"rows written to {json}")
        if markdown is not None:
            console.print(f"table written to {markdown}")

    def to_markdown(self) -> str:
        """The rows as a table for docs/benchmarks/, with machine and versions above it."""
        facts = [f"{name} {value}" for name, value in {**self.machine, **self.versions}.items()]
        lines = [", ".join(facts) + ".", "", *(f"{note}." for note in self.notes), ""]
        lines += ["| what | value | ratio | bar | met |", "| --- | --: | --: | --- | --- |"]
        for row in self.rows:
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
            bar = row.bar or (f"against {row.against}" if row.against else "")
            met = "" if row.met is None else ("yes" if row.met else "**no**")
            lines.append(f"| {row.name} | {_number(row.value)} {row.unit} | {ratio} | {bar} | {met} |")
        return "\n".join(lines) + "\n"

    def print(self, console: Console) -> None:
        table = Table(title=self.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("what", ratio=5)
        table.add_column("value", justify="right", no_wrap=True)
        table.add_column("unit", no_wrap=True)
        table.add_column("ratio", justify="right", no_wrap=True)
        table.add_column("bar", ratio=4)
        table.add_column("met", no_wrap=True)
        for row in self.rows:
            verdict = "" if row.met is None else ("[green]yes[/]" if row.met else "[red]no[/]")
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
            bar = row.bar or (f"against {row.against}" if row.against else "")
            table.add_row(row.name, _number(row.value), row.unit, ratio, bar, verdict)
        console.print(table)
        for note in self.notes:
            console.print(f"[dim]{note}[/]")


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 10 else f"{value:.1f}"


def describe_machine() -> dict[str, str]:
    """The machine as far as figures depend on it: processor, cores, memory, kernel, Python."""
    model = "unknown"
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory_kib = next(
        (line.split()[1] for line in _lines(Path("/proc/meminfo")) if line.startswith("MemTotal")), "0"
    )
    return {
        "cpu": model,
        "cores": str(os.cpu_count()),
        "memory": f"{int(memory_kib) / 1024 / 1024:.1f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def describe_versions(distributions: Sequence[str]) -> dict[str, str]:
    """Versions of the named distributions that are installed here."""
    found = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _lines(path: Path) -> Iterable[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
