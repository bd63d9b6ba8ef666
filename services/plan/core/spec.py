"""What a plan is asked: SLOs, the model, the limits of the search, and hardware options with prices.

Units are part of every name. A value outside the plausible range of its unit is refused together with the unit that
was probably meant: a plan computed with 100 s for 100 ms would look like any other plan.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from mooncache.prices.core.hardware import (
    HARDWARE_PLAUSIBLE,
    OPTIONS_MAX,
    ROLES,
    CostSpec,
    Dram,
    GpuNode,
    Nic,
    Plausible,
    Positive,
    Ssd,
    Table,
)

GB: Final = 10**9


class Arrangement(StrEnum):
    """How the roles of a plan's instances are arranged."""

    FIXED = "fixed"  # the statistical model knows this one only
    SWITCHING = "switching"  # roles follow the load and only begin as planned
    BOTH = "both"  # every instance does both; the counts of the two roles only add up


Variant = Literal[Arrangement.SWITCHING, Arrangement.BOTH]


class SloSpec(Table):
    """What is promised."""

    ttft_s: Positive = 30.0
    """Time to the first token, seconds."""
    tbt_s: Positive = 0.1
    """Time between tokens (mean of a request's longest tenth), seconds."""
    attainment: float = Field(default=0.95, gt=0, le=1, allow_inf_nan=False)
    """Share of requests that meet both."""


class ModelSpec(Table):
    """The model that is served."""

    profile: str = "llama3-70b-8xa800"
    """Built-in profile, or a TOML file with measured points."""
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of GPU memory for weights and KV."""


class SearchSpec(Table):
    """Limits of the search."""

    gpus_per_instance: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = ()
    """GPUs of one instance (tensor parallel); empty: the GPUs of the profile, and all GPUs of a machine."""
    pipeline_stages: tuple[Annotated[int, Field(ge=1, le=16)], ...] = Field(default=(1, 4), min_length=1)
    """Prefill instances that compute one long prompt together (chunked pipeline); 1 means no pipeline."""
    arrangements: tuple[Variant, ...] = (Arrangement.SWITCHING, Arrangement.BOTH)
    """What the simulator tries besides fixed roles: roles that follow the load, instances that do both."""
    nodes_max: int = Field(default=64, ge=2, le=100_000)
    """Machines of one plan."""
    price_per_hour_max: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Budget for one hour; none when absent."""
    requests_max: int = Field(default=20_000, ge=100, le=1_000_000)
    """Requests of the trace that are looked at: the busiest stretch of so many."""


class Workload(Table):
    """What is asked of the cluster when there is no trace: a rate and how long prompts and answers are."""

    rate_per_s: Positive = 1.0
    """Requests per second."""
    duration_s: float = Field(default=1800.0, gt=0, le=86400, allow_inf_nan=False)
    """Stretch of time that is generated."""
    input_tokens_mean: Positive = 8000.0
    """Mean length of a prompt, tokens."""
    output_tokens_mean: Positive = 350.0
    """Mean length of an answer, tokens."""
    reuse: float = Field(default=0.4, ge=0, lt=1, allow_inf_nan=False)
    """Share of prompt tokens that an unlimited cache would have."""


class Spec(Table):
    """The whole question. Prices share one currency, whatever it is."""

    slo: SloSpec = SloSpec()
    """What is promised."""
    model: ModelSpec = ModelSpec()
    """The model."""
    search: SearchSpec = SearchSpec()
    """Limits of the search."""
    workload: Workload | None = None
    """Only without a trace."""
    cost: CostSpec | None = None
    """Of `mooncache cost`, which reads the prices of the same file."""
    speed: float = Field(default=1.0, gt=0, le=1000, allow_inf_nan=False)
    """How many times faster the trace arrives."""
    gpu_node: tuple[GpuNode, ...] = Field(min_length=1, max_length=OPTIONS_MAX)
    """Machine types."""
    dram: tuple[Dram, ...] = Field(min_length=1, max_length=OPTIONS_MAX)
    """Pool memory of a machine: one of these."""
    ssd: tuple[Ssd, ...] = Field(default=(Ssd(gb=0),), min_length=1, max_length=OPTIONS_MAX)
    """Pool disks of a machine: one of these."""
    nic: tuple[Nic, ...] = Field(min_length=1, max_length=OPTIONS_MAX)
    """Network of a machine: one of these."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [node.name for node in self.gpu_node]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two entries of gpu_node are called {twice[0]!r}")
        for role in ROLES:
            if not any(role in node.roles for node in self.gpu_node):
                raise ValueError(f"no entry of gpu_node may do {role}")
        needed = sum(node.count_min for node in self.gpu_node)
        if needed > self.search.nodes_max:
            raise ValueError(
                f"count_min of all types, {needed}, is above search.nodes_max {self.search.nodes_max}"
            )
        return self


PLAUSIBLE: Final[dict[str, Plausible]] = HARDWARE_PLAUSIBLE | {
    "slo.ttft_s": Plausible(0.005, 900, "s", "", "milliseconds? {thousandth:g} s is {value:g} ms"),
    "slo.tbt_s": Plausible(0.0005, 5, "s", "", "milliseconds? {thousandth:g} s is {value:g} ms"),
    "slo.attainment": Plausible(
        0.2, 1, "a share", "write a share such as 0.95", "percent? write {percent:g}"
    ),
    "workload.rate_per_s": Plausible(1e-4, 1e5, "requests/s", "", "requests per hour?"),
    "workload.input_tokens_mean": Plausible(4, 2e6, "tokens", "thousands of tokens?", "characters or a sum?"),
    "workload.output_tokens_mean": Plausible(
        1, 2e5, "tokens", "thousands of tokens?", "characters or a sum?"
    ),
}
