"""One file for each figure or table, or for a few that share their simulations; ALL is the order of a whole run."""

from __future__ import annotations

from typing import Final

from mooncache.reproduce.scenario import Scenario
from mooncache.reproduce.scenarios import (
    calibration,
    comparison,
    coupled,
    hit_ratio,
    overload,
    pool,
    scheduling,
    ssd,
    trace_statistics,
)

ALL: Final[tuple[Scenario, ...]] = (
    *trace_statistics.SCENARIOS,
    *hit_ratio.SCENARIOS,
    *ssd.SCENARIOS,
    *calibration.SCENARIOS,
    *coupled.SCENARIOS,
    *scheduling.SCENARIOS,
    *pool.SCENARIOS,
    *overload.SCENARIOS,
    *comparison.SCENARIOS,
)
