"""What a scenario says: rows of ours and the paper's, as a table for people and as benchmark rows for machines."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mooncache.reporting.rows import Row


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of ours."""

    row: Row
    """Its `ratio` is ours / paper, or ours / another row of ours where its `against` names one."""
    paper: float | None = None
    """The published number in the same unit; None where nothing was published."""
    stand_in: bool = False
    """It was made on generated requests because the trace of the paper was not at hand."""


def measured(name: str, value: float, unit: str) -> Figure:
    """A number of ours that nothing published stands beside."""
    return Figure(Row(name, value, unit))


def published(name: str, value: float, unit: str, paper: float, within: float | None = None) -> Figure:
    """A number of ours beside the paper's; `within` makes a bar of the relative difference (0.2: 20 %)."""
    ratio = value / paper if paper else None
    bar = None if within is None else f"within {within:.1%} of the paper".replace(".0%", "%")
    met = None if within is None or ratio is None else math.isfinite(ratio) and abs(ratio - 1) <= within
    return Figure(Row(name, value, unit, ratio, f"paper {paper:g} {unit}".strip(), bar, met), paper)


@dataclass(slots=True)
class Sheet:
    """The rows of one scenario and the words that belong to them."""

    name: str
    title: str
    source: str
    findings: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    def rows(self) -> list[Row]:
        """Rows in the format of the benchmarks; a row on generated requests says so in its name."""
        mark = {True: " [generated requests]", False: ""}
        return [
            replace(found.row, name=f"{self.name}: {found.row.name}{mark[found.stand_in]}")
            for found in self.findings
        ]

    def print(self, console: Console) -> None:
        table = Table(
            title=f"{self.name}: {self.title} ({self.source})", title_justify="left", box=SIMPLE_HEAD
        )
        table.add_column("what", ratio=5)
        for column in ("ours", "paper", "unit", "ratio"):
            table.add_column(column, justify="left" if column == "unit" else "right", no_wrap=True)
        table.add_column("bar", ratio=3)
        table.add_column("met", no_wrap=True)
        for found in self.findings:
            table.add_row(*_cells(found, met={True: "[green]yes[/]", False: "[red]no[/]", None: ""}))
        console.print(table)
        for note in self.notes:
            console.print(f"[dim]{note}[/]")

    def to_markdown(self) -> str:
        lines = [
            "| what | ours | paper | unit | ratio | bar | met |",
            "| --- | --: | --: | --- | --: | --- | --- |",
        ]
        for found in self.findings:
            cells = _cells(found, met={True: "yes", False: "**no**", None: ""})
            lines.append("| " + " | ".join(cells) + " |")
        text = "".join(f"\n{note}\n" for note in self.notes)
        return f"## {self.name}: {self.title}\n\n{self.source}.\n{text}\n" + "\n".join(lines) + "\n"


def _cells(found: Figure, met: dict[bool | None, str]) -> list[str]:
    row = found.row
    name = f"{row.name} *" if found.stand_in else row.name
    paper = "" if found.paper is None else number(found.paper)
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    bar = row.bar or ("" if found.paper is not None or row.against is None else f"against {row.against}")
    return [name, number(row.value), paper, row.unit, ratio, bar, met[row.met]]


def number(value: float) -> str:
    """Three or four significant digits, thousands with commas; no exponents in the usual range."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
