"""The sample file of hardware options, generated from the values here so that it always loads.

Machine data are from public data sheets. All prices are made up for the example: put your own there.
"""

from __future__ import annotations

from typing import Final

from mooncache.config.small_files import toml_value
from mooncache.plan.core.spec import Dram, GpuNode, Nic, SearchSpec, SloSpec, Spec, Ssd, Table

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
_HEAD: Final = """\
# Input of `mooncache plan`: mooncache plan --trace trace.jsonl --spec this-file.toml
#
# ALL PRICES ARE EXAMPLES, of no supplier and in no particular currency: put your own here.
# Units are the end of each name. Machine data are from public data sheets; machines other than the one that the
# model's profile was measured on are scaled from it (name a profile of your own in gpu_node.profile to avoid that).
"""


def spec() -> Spec:
    """The example as a question."""
    return Spec(gpu_node=NODES, dram=DRAM, ssd=SSD, nic=NIC)


def toml(chosen: Spec | None = None) -> str:
    """The example (or another question) as a commented file that `loading.read` takes."""
    chosen = chosen or spec()
    lines = [_HEAD]
    lines += _table("slo", chosen.slo, SloSpec)
    lines += _table("model", chosen.model, type(chosen.model))
    lines += _table("search", chosen.search, SearchSpec)
    if chosen.workload is not None:
        lines += _table("workload", chosen.workload, type(chosen.workload))
    for name in ("gpu_node", "dram", "ssd", "nic"):
        options: tuple[Table, ...] = getattr(chosen, name)
        for number, option in enumerate(options):
            lines += _table(f"[{name}]", option, type(option), comments=number == 0)
    return "\n".join(lines)


def _table(name: str, values: Table, model: type[Table], *, comments: bool = True) -> list[str]:
    lines = [f"[{name}]"]
    for field, info in model.model_fields.items():
        value = getattr(values, field)
        if value is None or (not comments and value == info.default):
            continue
        if comments and info.description:
            lines.append(f"# {info.description}")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        lines.append(f"{field} = {toml_value(value)}")
    return [*lines, ""]
