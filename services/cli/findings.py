"""How both doctors say what they found: a line each, or JSON, and an exit code."""

from __future__ import annotations

from collections.abc import Sequence

from mooncache.reporting.output import EXIT_MISS, EXIT_OK, console, print_json
from mooncache.topology.core.findings import Finding, Grade

_SIGNS = {Grade.OK: "[green]✓[/]", Grade.WARN: "[yellow]![/]", Grade.BAD: "[red]✗[/]"}


def report(found: Sequence[Finding], *, as_json: bool) -> int:
    """Print all findings. Returns EXIT_MISS when one of them is bad."""
    if as_json:
        print_json({"findings": [finding._asdict() for finding in found]})
    else:
        show(found)
    return EXIT_MISS if any(finding.grade == Grade.BAD for finding in found) else EXIT_OK


def show(found: Sequence[Finding]) -> None:
    """Print findings for people."""
    for finding in found:
        console.print(f"{_SIGNS[finding.grade]} [bold]{finding.what}[/] ", end="")
        console.print(finding.found, markup=False, soft_wrap=True)
        if finding.advice:
            console.print(f"  {finding.advice}", style="dim", markup=False, soft_wrap=True)
