"""What a plan is asked: SLOs, the model, the limits of the search, and hardware options with prices.

Units are part of every name. A value outside the plausible range of its unit is refused together with the unit that
was probably meant: a plan computed with 100 s for 100 ms would look like any other plan.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mooncache.kvcache.instance_role import InstanceRole

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
SpecName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._+-]*$")]
GB: Final = 10**9
OPTIONS_MAX: Final = 16  # of one kind; the search is their product


class Arrangement(StrEnum):
    """How the roles of a plan's instances are arranged."""

    FIXED = "fixed"  # the statistical model knows this one only
    SWITCHING = "switching"  # roles follow the load and only begin as planned
    BOTH = "both"  # every instance does both; the counts of the two roles only add up


Role = Literal[InstanceRole.PREFILL, InstanceRole.DECODE]
ROLES: Final[tuple[Role, ...]] = (InstanceRole.PREFILL, InstanceRole.DECODE)
Variant = Literal[Arrangement.SWITCHING, Arrangement.BOTH]


class Table(BaseModel):
    """Base of all tables: frozen, unknown names refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True
    )


class Priced(Table):
    """Something that each node gets one of, for a price per hour."""

    price_per_hour: Number = Field(default=0.0, ge=0)
    """Price for one node and hour."""
    included: bool = False
    """Whether the price of the node covers it; only then there is no price of its own."""

    @model_validator(mode="after")
    def _priced(self) -> Self:
        if self.included and self.price_per_hour:
            raise ValueError("included = true and price_per_hour contradict each other")
        if not self.included and not self.price_per_hour and not self.is_none:
            raise ValueError(
                "price_per_hour has to be above 0; say included = true when the node's price covers it"
            )
        if self.is_none and self.price_per_hour:
            raise ValueError("an option of 0 GB means none and cannot have a price")
        return self

    @property
    def is_none(self) -> bool:
        """Whether this option means to buy nothing."""
        return False


class GpuNode(Table):
    """A machine type with GPUs. Numbers are for one GPU where the name begins with gpu_, else for the machine."""

    name: SpecName
    """Name of the type."""
    gpus: int = Field(ge=1, le=1024)
    """GPUs of one machine."""
    gpu_memory_gb: Positive
    """Memory of one GPU, GB."""
    gpu_memory_gb_per_s: Positive
    """Memory bandwidth of one GPU, GB/s."""
    gpu_tflops: Positive
    """Dense 16 bit floating point speed of one GPU, TFLOPS."""
    host_gb_per_s: Positive
    """Host memory to all GPUs together, GB/s."""
    price_per_hour: Positive
    """Price of one machine and hour."""
    count_min: int = Field(default=0, ge=0, le=100_000)
    """Machines that are there anyway and are paid for."""
    count_max: int = Field(default=32, ge=1, le=100_000)
    """Machines that can be had."""
    roles: tuple[Role, ...] = Field(default=ROLES, min_length=1)
    """What instances on it may do."""
    profile: str = ""
    """Profile measured on this type; empty scales the model's profile."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.count_min > self.count_max:
            raise ValueError(f"count_min {self.count_min} is above count_max {self.count_max}")
        return self


class Dram(Priced):
    """Memory of one machine for the pool."""

    gb: Number = Field(ge=0)
    """GB for blocks."""

    @property
    def is_none(self) -> bool:
        return self.gb == 0


class Ssd(Priced):
    """Disks of one machine for the pool."""

    gb: Number = Field(ge=0)
    """GB for blocks; 0 means no disk."""
    read_gb_per_s: Number = Field(default=0.0, ge=0)
    """Read bandwidth of one machine, GB/s."""
    write_gb_per_s: Number = Field(default=0.0, ge=0)
    """Write bandwidth of one machine, GB/s; 0: no limit."""
    profile: str = ""
    """File with measured rates (`mooncache bench tiers --calibrate`), instead of the two above."""

    @property
    def is_none(self) -> bool:
        return self.gb == 0

    @model_validator(mode="after")
    def _readable(self) -> Self:
        if self.gb and not self.read_gb_per_s:
            raise ValueError("read_gb_per_s has to be above 0")
        return self


class Nic(Priced):
    """Network of one machine."""

    gbps: Positive
    """Line rate of all its ports together, Gbit/s, each way."""
    efficiency: float = Field(default=0.87, gt=0, le=1)
    """Share of the line rate that transfers reach."""

    @property
    def bytes_per_s(self) -> float:
        """What transfers reach, bytes/s each way."""
        return self.gbps * self.efficiency * 1e9 / 8


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


class EngineRule(Table):
    """What engines run on whose worker does not say it; the first rule whose pattern fits counts."""

    instances: str = Field(min_length=1, max_length=128)
    """Names of instances, a pattern such as "prefill-*"."""
    machine: str = ""
    """Name of an entry of gpu_node; empty: the first one."""
    gpus: int = Field(ge=0, le=1024)
    """GPUs of one instance; 0: it runs on processors."""


class CostSpec(Table):
    """What `mooncache cost` needs besides the hardware; a plan does not read it."""

    currency: str = Field(default="units", min_length=1, max_length=16)
    """Of all prices of the file; it is only printed."""
    processor_price_per_hour: Positive | None = None
    """Price of one engine without a GPU for one hour; absent: such engines are not priced."""
    engine: tuple[EngineRule, ...] = Field(default=(), max_length=256)
    """What engines run on; without a rule: as many GPUs as their passport has ranks, of the first machine."""


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


class Plausible(NamedTuple):
    """Range of a field in its unit, and what a value outside of it probably is."""

    low: float
    high: float
    unit: str
    below: str
    above: str


_PRICE: Final = Plausible(
    1e-4, 10_000, "a price per hour", "is the price per second?", "is the price per month or year?"
)
PLAUSIBLE: Final[dict[str, Plausible]] = {
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
    "gpu_node.gpu_memory_gb": Plausible(4, 2048, "GB", "TB? write {thousandfold:g}", "MB or bytes?"),
    "gpu_node.gpu_memory_gb_per_s": Plausible(
        50, 60_000, "GB/s", "TB/s? write {thousandfold:g}", "MB/s or bytes/s?"
    ),
    "gpu_node.gpu_tflops": Plausible(2, 20_000, "TFLOPS", "PFLOPS? write {thousandfold:g}", "GFLOPS?"),
    "gpu_node.host_gb_per_s": Plausible(2, 5_000, "GB/s", "TB/s? write {thousandfold:g}", "MB/s?"),
    "gpu_node.price_per_hour": _PRICE,
    "dram.gb": Plausible(8, 65_536, "GB", "TB? write {thousandfold:g}", "MB or bytes?"),
    "dram.price_per_hour": _PRICE,
    "ssd.gb": Plausible(64, 2_000_000, "GB", "TB? write {thousandfold:g}", "MB or bytes?"),
    "ssd.read_gb_per_s": Plausible(0.1, 1_000, "GB/s", "TB/s?", "MB/s? write {thousandth:g}"),
    "ssd.write_gb_per_s": Plausible(0.05, 1_000, "GB/s", "TB/s?", "MB/s? write {thousandth:g}"),
    "ssd.price_per_hour": _PRICE,
    "nic.gbps": Plausible(1, 12_800, "Gbit/s", "Tbit/s or GB/s?", "Mbit/s? write {thousandth:g}"),
    "nic.price_per_hour": _PRICE,
    "cost.processor_price_per_hour": _PRICE,
}


def implausible(name: str, value: float) -> str:
    """A sentence when `value` is outside of what `name` ("section.field") can sensibly be; empty when it is fine."""
    known = PLAUSIBLE.get(name)
    if known is None or value == 0 or known.low <= value <= known.high:
        return ""
    guess = (known.below if value < known.low else known.above).format(
        value=value, thousandth=value / 1000, thousandfold=value * 1000, percent=value / 100
    )
    tail = f": {guess}" if guess else ""
    return f"{value:g} is outside of the usual {known.low:g} to {known.high:g} ({known.unit}){tail}"
