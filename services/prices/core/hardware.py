"""Hardware with prices, and what engines run on: the tables of a price book, which a plan chooses among, too.

Units are part of every name. A value outside the plausible range of its unit is refused together with the unit that
was probably meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mooncache.kvcache.instance_role import InstanceRole

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
SpecName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._+-]*$")]
TokenPrice = Annotated[float, Field(strict=True, ge=0, le=1e6, allow_inf_nan=False)] | None
OPTIONS_MAX: Final = 16  # of one kind; the search is their product
Role = Literal[InstanceRole.PREFILL, InstanceRole.DECODE]
ROLES: Final[tuple[Role, ...]] = (InstanceRole.PREFILL, InstanceRole.DECODE)


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
        if self.gb and not self.read_gb_per_s and not self.profile:  # prices need no rates; a plan reads them
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


class EngineRule(Table):
    """What engines run on whose worker does not say it; the first rule whose pattern fits counts."""

    instances: str = Field(min_length=1, max_length=128)
    """Names of instances, a pattern such as "prefill-*"."""
    machine: str = ""
    """Name of an entry of gpu_node; empty: the first one."""
    gpus: int = Field(ge=0, le=1024)
    """GPUs of one instance; 0: it runs on processors."""


class TokenTariff(Table):
    """What tenants pay for a million tokens; the first rule that fits counts. What is absent has no price."""

    models: str = Field(default="*", min_length=1, max_length=256)
    """Names of models, a pattern such as "llama-*"."""
    work_class: Literal["any", "online", "offline"] = "any"
    """Of which requests; offline ones are those of batches."""
    input_per_million: TokenPrice = None
    """Input tokens that were computed."""
    cached_per_million: TokenPrice = None
    """Input tokens that came from a cache."""
    output_per_million: TokenPrice = None
    """Output tokens."""


class CostSpec(Table):
    """What `mooncache cost` and `mooncache usage` need besides the hardware; a plan does not read it."""

    currency: str = Field(default="units", min_length=1, max_length=16)
    """Of all prices of the file; it is only printed."""
    processor_price_per_hour: Positive | None = None
    """Price of one engine without a GPU for one hour; absent: such engines are not priced."""
    engine: tuple[EngineRule, ...] = Field(default=(), max_length=256)
    """What engines run on; without a rule: as many GPUs as their passport has ranks, of the first machine."""
    tokens: tuple[TokenTariff, ...] = Field(default=(), max_length=256)
    """What tenants pay for tokens; usage without a rule has no price."""


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
HARDWARE_PLAUSIBLE: Final[dict[str, Plausible]] = {
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


def implausible(ranges: Mapping[str, Plausible], name: str, value: float) -> str:
    """A sentence when `value` is outside of what `name` ("section.field") can sensibly be; empty when it is fine."""
    known = ranges.get(name)
    if known is None or value == 0 or known.low <= value <= known.high:
        return ""
    guess = (known.below if value < known.low else known.above).format(
        value=value, thousandth=value / 1000, thousandfold=value * 1000, percent=value / 100
    )
    tail = f": {guess}" if guess else ""
    return f"{value:g} is outside of the usual {known.low:g} to {known.high:g} ({known.unit}){tail}"
