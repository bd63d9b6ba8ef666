"""The sample price book, generated from the values here so that it always loads.

Machine data are from public data sheets. All prices are made up for the example: put your own there.
"""

from __future__ import annotations

from typing import Final

from mooncache.config.small_files import toml_value
from mooncache.prices.core.hardware import CostSpec, Dram, GpuNode, Nic, Ssd, Table, TokenTariff
from mooncache.prices.core.price_book import PriceBook

NODES: Final = (
    GpuNode(
        name="A800", gpus=8, gpu_memory_gb=80, gpu_memory_gb_per_s=2040, gpu_tflops=312,
        host_gb_per_s=128, price_per_hour=14.0, count_max=32,
    ),
    GpuNode(
        name="H800", gpus=8, gpu_memory_gb=80, gpu_memory_gb_per_s=3350, gpu_tflops=989,
        host_gb_per_s=256, price_per_hour=26.0, count_max=32,
    ),
    GpuNode(
        name="H20", gpus=8, gpu_memory_gb=96, gpu_memory_gb_per_s=4000, gpu_tflops=148,
        host_gb_per_s=256, price_per_hour=11.0, count_max=32,
    ),
)  # fmt: skip
DRAM: Final = (
    Dram(gb=250, price_per_hour=0.25),
    Dram(gb=500, price_per_hour=0.5),
    Dram(gb=1000, price_per_hour=1.0),
    Dram(gb=2000, price_per_hour=2.2),
)
SSD: Final = (
    Ssd(gb=0),
    Ssd(gb=4000, read_gb_per_s=6, price_per_hour=0.2),
    Ssd(gb=16000, read_gb_per_s=20, price_per_hour=0.7),
)
NIC: Final = (
    Nic(gbps=200, included=True),
    Nic(gbps=400, price_per_hour=0.4),
    Nic(gbps=800, price_per_hour=0.9),
)
TOKENS: Final = (
    TokenTariff(
        work_class="offline", input_per_million=0.25, cached_per_million=0.05, output_per_million=1.0
    ),
    TokenTariff(input_per_million=0.5, cached_per_million=0.1, output_per_million=2.0),
)
COST: Final = CostSpec(processor_price_per_hour=0.4, tokens=TOKENS)
_PRICES_HEAD: Final = """\
# Price book of `mooncache cost`: mooncache cost --prices this-file.toml. `mooncache plan --spec` reads the same file.
#
# ALL PRICES ARE EXAMPLES, written in November 2026. They have no source: they are made up for the example of
# `mooncache plan`, of no supplier and in no particular currency. Put your own here; what you take out is not counted.
# The first entry of each kind is what the cluster has. Several machine types: one gpu_node each, and rules such as
#   [[cost.engine]]
#   instances = "prefill-*"
#   machine = "A800"
#   gpus = 8
"""


def price_book() -> PriceBook:
    """One option of each kind of the example."""
    return PriceBook(cost=COST, gpu_node=NODES[:1], dram=DRAM[2:3], ssd=SSD[1:2], nic=NIC[1:2])


def prices_toml() -> str:
    """The example's price book as a commented file that `loading.read_prices` and `loading.read` take."""
    lines = [_PRICES_HEAD, *table_lines("cost", COST, CostSpec, leave_out=("engine", "tokens"))]
    for number, rule in enumerate(TOKENS):
        lines += table_lines("[cost.tokens]", rule, TokenTariff, comments=number == 0)
    book = price_book()
    options: dict[str, tuple[Table, ...]] = {
        "gpu_node": book.gpu_node, "dram": book.dram, "ssd": book.ssd, "nic": book.nic,
    }  # fmt: skip
    for name, (option,) in options.items():
        lines += table_lines(f"[{name}]", option, type(option))
    return "\n".join(lines)


def table_lines(
    name: str, values: Table, model: type[Table], *, comments: bool = True, leave_out: tuple[str, ...] = ()
) -> list[str]:
    """A table of a TOML file, with what its fields mean."""
    lines = [f"[{name}]"]
    for field, info in model.model_fields.items():
        value = getattr(values, field)
        if field in leave_out or value is None or (not comments and value == info.default):
            continue
        if comments and info.description:
            lines.append(f"# {info.description}")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        lines.append(f"{field} = {toml_value(value)}")
    return [*lines, ""]
