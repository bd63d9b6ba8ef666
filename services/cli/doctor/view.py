"""What a person sees: trouble in full, what is well in one line for each group, and progress while it is asked."""

from __future__ import annotations

import json
import sys
from collections import Counter
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status as Spinner

from mooncache.cli.doctor.core.result import CheckResult, Status

_SIGNS = {
    Status.PASS: "[green]✓[/]",
    Status.WARN: "[yellow]![/]",
    Status.FAIL: "[red]✗[/]",
    Status.SKIPPED: "[dim]·[/]",
}
_COLOURS = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "red", Status.SKIPPED: "dim"}
_ORDER = (Status.FAIL, Status.WARN, Status.PASS, Status.SKIPPED)
_WORDS = {Status.FAIL: "failed", Status.WARN: "to look at", Status.PASS: "passed", Status.SKIPPED: "skipped"}


class AskingView:
    """On a terminal one line that names what is still being asked; elsewhere nothing."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._spinner = Spinner("looking…", console=console) if console.is_terminal and not quiet else None
        self._open: dict[str, None] = {}

    def __enter__(self) -> Self:
        if self._spinner is not None:
            self._spinner.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._spinner is not None:
            self._spinner.stop()

    def tell(self, part: str, is_over: bool) -> None:
        """A part begins or ends."""
        if is_over:
            self._open.pop(part, None)
        else:
            self._open[part] = None
        if self._spinner is not None and self._open:
            self._spinner.update(f"asking: {', '.join(self._open)}")


def write_step(part: str, is_over: bool) -> None:
    """A part begins or ends: for the program that runs the doctor."""
    sys.stderr.write(json.dumps({"part": part, "is_over": is_over}) + "\n")
    sys.stderr.flush()


def show(console: Console, groups: dict[str, list[CheckResult]], elapsed_s: float, *, verbose: bool) -> None:
    """Print all groups and a last line with the counts."""
    width = max(map(len, groups), default=0)  # so that the counts stand below each other
    for name, results in groups.items():
        _show_group(console, name.ljust(width), results, verbose=verbose)
    counts = Counter(result.status for results in groups.values() for result in results)
    console.print()
    console.print(f"{_counted(counts)} [dim]in {elapsed_s:.1f} s[/]")
    if counts[Status.FAIL] or counts[Status.WARN]:
        return
    hint = "" if verbose else "; --verbose shows each"
    console.print(f"[green]nothing is wrong[/][dim]{hint}[/]")


def _show_group(console: Console, name: str, results: list[CheckResult], *, verbose: bool) -> None:
    counts = Counter(result.status for result in results)
    worst = next((status for status in _ORDER if counts[status]), Status.SKIPPED)
    checks = list(dict.fromkeys(result.check for result in results if result.status is not Status.SKIPPED))
    console.print(f"{_SIGNS[worst]} [bold]{name}[/] ", end="")
    console.print(_counted(counts), end="")
    console.print(f"  {', '.join(checks)}".rstrip(), style="dim", markup=False, soft_wrap=True)
    for status in _ORDER:
        if verbose or status in {Status.FAIL, Status.WARN}:
            for result in results:
                if result.status is status:
                    _show_result(console, result)


def _show_result(console: Console, result: CheckResult) -> None:
    console.print(f"    {_SIGNS[result.status]} ", end="")
    console.print(f"{result.check}, {result.subject}: ", style="bold", markup=False, end="")
    console.print(result.why, markup=False, soft_wrap=True)
    if result.fix:
        console.print("      → ", style="cyan", end="")
        console.print(result.fix, style="dim", markup=False, soft_wrap=True)


def _counted(counts: Counter[Status]) -> str:
    texts = [
        f"[{_COLOURS[status]}]{counts[status]} {_WORDS[status]}[/]" for status in _ORDER if counts[status]
    ]
    return ", ".join(texts) or "nothing to look at"
