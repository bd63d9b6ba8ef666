"""What an hour of an engine, a gigabyte of the pool and a gigabyte on the network cost, from a plan's hardware tables.

One file has all prices: `mooncache plan` chooses among its options, `mooncache cost` takes the first option of each
kind for what the cluster has. What the file does not have has no price, and no price is ever guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final, NamedTuple, Self

from pydantic import Field, model_validator

from mooncache.prices.core.hardware import OPTIONS_MAX, CostSpec, Dram, GpuNode, Nic, Ssd, Table, TokenTariff

HOURS_PER_MONTH: Final = 730.0
HOUR_S: Final = 3600.0
MILLION: Final = 1e6
_GB: Final = 1e9


class PricedEngine(NamedTuple):
    """An instance as its worker registered it."""

    instance_id: str
    engine: str  # "vllm", "hf", ...
    processes: int | None = None  # of all its replicas; None: not known
    replicas: int = 1  # data parallel copies of the model


class EngineHour(NamedTuple):
    """The price of one instance for an hour; None: the book does not say. `basis` says what was priced."""

    price: float | None
    basis: str
    assumed: bool = False  # neither a rule of the book nor the registration says what it runs on
    replicas: int = 1  # data parallel copies of the model: each computes prompts of its own

    @property
    def replica_price(self) -> float | None:
        """What computes one prompt, for an hour."""
        return None if self.price is None else self.price / self.replicas


class PriceBook(Table):
    """Prices. The hardware tables are those of a plan; the first option of each kind is what the cluster has."""

    gpu_node: tuple[GpuNode, ...] = Field(default=(), max_length=OPTIONS_MAX)
    """Machine types."""
    dram: tuple[Dram, ...] = Field(default=(), max_length=OPTIONS_MAX)
    """Pool memory of a machine."""
    ssd: tuple[Ssd, ...] = Field(default=(), max_length=OPTIONS_MAX)
    """Pool disks of a machine."""
    nic: tuple[Nic, ...] = Field(default=(), max_length=OPTIONS_MAX)
    """Network of a machine."""
    cost: CostSpec = CostSpec()
    """Currency, and what engines run on."""

    @model_validator(mode="after")
    def _rules_name_machines(self) -> Self:
        known = [node.name for node in self.gpu_node]
        for rule in self.cost.engine:
            if rule.machine and rule.machine not in known:
                raise ValueError(f"cost.engine: no entry of gpu_node is called {rule.machine!r}")
            if rule.machine and not rule.gpus:
                raise ValueError(f"cost.engine: {rule.instances!r} names a machine and 0 GPUs")
        return self

    @property
    def dram_gb_hour(self) -> float | None:
        """Price of a gigabyte of pool memory for an hour; 0: the machine's price covers it; None: no price."""
        return _gb_hour(self.dram)

    @property
    def ssd_gb_hour(self) -> float | None:
        """The same of pool disks."""
        return _gb_hour(self.ssd)

    @property
    def network_gb(self) -> float | None:
        """Price of a gigabyte on the network at the rate that transfers reach: idle hours of links are not in it."""
        if not self.nic:
            return None
        nic = self.nic[0]
        return nic.price_per_hour / (nic.bytes_per_s * HOUR_S / _GB)

    def engine_hour(self, engine: PricedEngine) -> EngineHour:
        """The price of one instance for an hour."""
        return self._engine_hour(engine)._replace(replicas=max(1, engine.replicas))

    def _engine_hour(self, engine: PricedEngine) -> EngineHour:
        for rule in self.cost.engine:
            if fnmatchcase(engine.instance_id, rule.instances):
                return self._gpus(rule.gpus, rule.machine) if rule.gpus else self._processors(assumed=False)
        if engine.engine == "hf":
            return self._processors(assumed=True)
        return self._gpus(engine.processes or 1, "")._replace(assumed=engine.processes is None)

    def token_prices(self, model: str, work_class: str) -> TokenTariff:
        """What tenants pay for tokens of a model and class; without a rule none has a price."""
        for rule in self.cost.tokens:
            if rule.work_class in ("any", work_class) and fnmatchcase(model, rule.models):
                return rule
        return TokenTariff()

    def holes(self) -> list[str]:
        """What has no price, a sentence each."""
        found = []
        if not self.gpu_node:
            found.append("no price for gpu_node: time of engines on GPUs is not counted")
        if self.cost.processor_price_per_hour is None:
            found.append(
                "no price for cost.processor_price_per_hour: time of engines without GPUs is not counted"
            )
        for name, price, what in (
            ("dram", self.dram_gb_hour, "memory of the pool is"),
            ("ssd", self.ssd_gb_hour, "storage on disks is"),
            ("nic", self.network_gb, "transfers are"),
        ):
            if price is None:
                found.append(f"no price for {name}: {what} not counted")
        return found

    def _gpus(self, gpus: int, machine: str) -> EngineHour:
        node = next((node for node in self.gpu_node if machine in ("", node.name)), None)
        if node is None:
            return EngineHour(None, f"{gpus} GPUs")
        return EngineHour(
            node.price_per_hour / node.gpus * gpus, f"{gpus} of {node.gpus} GPUs of a {node.name}"
        )

    def _processors(self, *, assumed: bool) -> EngineHour:
        return EngineHour(self.cost.processor_price_per_hour, "processors", assumed)


def _gb_hour(options: Sequence[Dram | Ssd]) -> float | None:
    option = next((option for option in options if not option.is_none), None)
    return option.price_per_hour / option.gb if option is not None else None


def per_million(cost: float, tokens: float) -> float | None:
    """Price of a million tokens of which `tokens` cost `cost`; None without tokens."""
    return cost / tokens * MILLION if tokens > 0 else None
