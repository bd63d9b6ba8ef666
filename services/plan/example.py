"""The sample file of hardware options, generated from the values here and of the sample price book, so it loads."""

from __future__ import annotations

from typing import Final

from mooncache.plan.core.spec import SearchSpec, SloSpec, Spec
from mooncache.prices.core.hardware import Table
from mooncache.prices.example import DRAM, NIC, NODES, SSD, table_lines

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
    lines += table_lines("slo", chosen.slo, SloSpec)
    lines += table_lines("model", chosen.model, type(chosen.model))
    lines += table_lines("search", chosen.search, SearchSpec)
    if chosen.workload is not None:
        lines += table_lines("workload", chosen.workload, type(chosen.workload))
    for name in ("gpu_node", "dram", "ssd", "nic"):
        options: tuple[Table, ...] = getattr(chosen, name)
        for number, option in enumerate(options):
            lines += table_lines(f"[{name}]", option, type(option), comments=number == 0)
    return "\n".join(lines)
