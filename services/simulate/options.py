"""How a run is made: which policy with which rules, the seed, what is recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from mooncache.conductor.core.policy.fleet import Fleet
from mooncache.conductor.core.policy.types import Choice, Request, Rules
from mooncache.errors import SimulationInvalid

OnDecision = Callable[[int, Request, Fleet, Choice, float], None]
SimProgress = Callable[[int, int, float], None]


class LengthForecast(StrEnum):
    """How the conductor expects lengths of answers."""

    LEARNED = "learned"  # from answers that ended, while it runs
    MEAN = "mean"  # of the trace
    ORACLE = "oracle"  # each request's own, which no real conductor knows


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Options of one run; equal options, trace and cluster give the same result, bit for bit."""

    policy: str = "mooncache"
    rules: Rules = field(default_factory=Rules)
    seed: int = 1
    spread_tick_s: float = 3.0
    """Requests of one tick of a coarse clock are spread over it; 0 keeps the times of the trace."""
    ttft_slo_s: float | None = None  # None takes the cluster's
    tbt_slo_s: float | None = None  # None takes the cluster's
    noise: float = 0.0  # relative standard deviation of actual prefill times around the model
    output_tokens: LengthForecast = LengthForecast.LEARNED  # how the conductor expects lengths of answers
    double_check: bool | None = None
    """The decode instance checks its own TBT when a request's KV has come. None does so in the paper's modes."""
    retries_max: int = 2  # times that a request goes elsewhere when its instance fails
    sources_max: int = 3
    sample_s: float = 15.0
    """Time between samples of the series. It is longer in a trace that would have more than 50,000 of them."""
    watched: tuple[int, ...] | None = None
    """Block ids whose copies are counted. None watches the blocks of hit rank 1, 10, 100, 1,000 and 10,000."""
    on_decision: OnDecision | None = None
    """Called with (request, Request, Fleet, Choice, now_s) for each decision. Do not keep the Fleet."""

    def check(self) -> SimOptions:
        """The options themselves. Raises SIMULATION_INVALID."""
        numbers = {"spread_tick_s": self.spread_tick_s, "noise": self.noise, "sample_s": self.sample_s}
        numbers |= {"ttft_slo_s": self.ttft_slo_s or 1.0, "tbt_slo_s": self.tbt_slo_s or 1.0}
        for name, value in numbers.items():
            if not math.isfinite(value) or value < 0:
                raise SimulationInvalid(f"{name} is {value}: it has to be a finite number, not negative")
        if self.sample_s == 0:
            raise SimulationInvalid("sample_s is 0 s: samples need time between them, 15 is usual")
        if self.noise > 1:
            raise SimulationInvalid(
                f"noise is {self.noise}: a relative deviation above 1 makes times meaningless"
            )
        if self.output_tokens not in set(LengthForecast):
            raise SimulationInvalid(
                f"output_tokens is {self.output_tokens!r}: choose one of {', '.join(LengthForecast)}"
            )
        if self.retries_max < 0 or self.sources_max < 1:
            raise SimulationInvalid(
                f"retries_max is {self.retries_max} (at least 0), sources_max is {self.sources_max} (at least 1)"
            )
        return self
