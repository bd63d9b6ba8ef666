"""Simulated clusters with faults in them: seeds that broke an invariant, seeds an hour, simulated seconds.

`python -m tests.simulation` of a checkout does it (docs/simulation.md), in two processes; here are its figures.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mooncache.errors import Internal, Unsupported
from mooncache.reporting.rows import Row, bar_row

_CHECKOUT: Final = Path(__file__).resolve().parents[3]
_LINE: Final = re.compile(
    r"^(\d+) seeds, (\d+) broken; \d+ simulated s in [\d.]+ processor s \((\d+) a second\), (\d+) seeds an hour",
    re.MULTILINE,
)
_JOBS: Final = 2
_MAX_S: Final = 3600.0
_SIMULATED_BAR: Final = 100.0
_SEEDS_BAR: Final = 2000.0


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Raises Unsupported: an installed package has no simulation. Internal: it did not end as it should."""
    if not (_CHECKOUT / "tests" / "simulation").is_dir():
        raise Unsupported("The simulation is among the tests; run this from a checkout.")
    seeds = 20 if quick else 400
    progress(f"{seeds} clusters")
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--seeds", f"0:{seeds}", "--jobs", str(_JOBS)],
        cwd=_CHECKOUT,
        capture_output=True,
        text=True,
        timeout=_MAX_S,
        check=False,
    )
    return rows_of(done.stdout, done.stderr)


def rows_of(said: str, errors: str = "") -> list[Row]:
    """The last line of a run, as rows. Raises Internal: there is none."""
    found = _LINE.search(said)
    if found is None:
        raise Internal(f"python -m tests.simulation: {said[-500:]}{errors[-500:]}")
    seeds, broken, simulated, an_hour = map(float, found.groups())
    return [
        Row("seeds", seeds, ""),
        bar_row("seeds that broke an invariant", broken, "", at_most=0.0),
        bar_row("simulated seconds a processor second", simulated, "s", at_least=_SIMULATED_BAR),
        bar_row(f"seeds an hour, {_JOBS} processes", an_hour, "", at_least=_SEEDS_BAR),
    ]
