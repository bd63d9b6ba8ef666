"""The scenarios by name, in the order in which they are run, and the running of them."""

from __future__ import annotations

import difflib
import time
from collections.abc import Sequence

from mooncache.errors import ScenarioUnknown
from mooncache.reporting.rows import Report, describe_machine, describe_versions
from mooncache.reproduce.finding import Sheet
from mooncache.reproduce.lab import Lab
from mooncache.reproduce.scenario import Scenario
from mooncache.reproduce.scenarios import ALL
from mooncache.reproduce.workloads import PUBLISHED


def scenarios() -> dict[str, Scenario]:
    """All scenarios."""
    return {scenario.name: scenario for scenario in ALL}


def choose(names: Sequence[str]) -> list[Scenario]:
    """The named scenarios in the order of the registry; all of them for no name.

    Raises: ScenarioUnknown, with the nearest name.
    """
    known = scenarios()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
            advice = f"did you mean {near[0]}? " if near else ""
            raise ScenarioUnknown(f"There is no scenario {name!r}; {advice}known: {', '.join(known)}.")
    return [scenario for scenario in known.values() if not names or scenario.name in names]


def run_one(lab: Lab, scenario: Scenario) -> Sheet:
    """Run one scenario and return its filled sheet."""
    sheet = Sheet(scenario.name, scenario.title, scenario.source)
    begin_s = time.perf_counter()
    scenario.run(lab, sheet)
    sheet.wall_s = time.perf_counter() - begin_s
    return sheet


def report(lab: Lab, sheets: Sequence[Sheet]) -> Report:
    """All rows with machine, versions, and where the requests came from."""
    sources = lab.sources
    report = Report(
        "reproduce", machine=describe_machine(), versions=describe_versions(("mooncache", "numpy"))
    )
    for name in PUBLISHED:
        path = sources.path(name)
        report.notes.append(f"{name}: {'generated stand-in' if path is None else path.name}")
    if sources.first:
        report.notes.append(
            f"only the first {sources.first} requests of each trace; the paper's are of whole traces"
        )
    for sheet in sheets:
        report.add(*sheet.rows())
        report.notes += [f"{sheet.name}: {note}" for note in sheet.notes]
    return report


def page(report: Report, sheets: Sequence[Sheet]) -> str:
    """The report as a page: where it was made, then a table for each scenario."""
    facts = ", ".join(f"{name} {value}" for name, value in {**report.machine, **report.versions}.items())
    sources = "; ".join(note for note in report.notes if note.split(":")[0] in PUBLISHED)
    head = f"# Reproduction: every row\n\nMade by `mooncache reproduce --markdown`. {facts}. Traces: {sources}.\n"
    star = "A star marks rows made on generated requests.\n"
    return "\n".join([head, star, *(sheet.to_markdown() for sheet in sheets)])
