"""What a scenario is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mooncache.reproduce.finding import Sheet
from mooncache.reproduce.lab import Lab


@dataclass(frozen=True, slots=True)
class Scenario:
    """One figure or table. `run` fills the sheet; `work` says what it costs: "at once", "seconds", "minutes"."""

    name: str
    title: str
    source: str
    run: Callable[[Lab, Sheet], None]
    work: str = "seconds"
