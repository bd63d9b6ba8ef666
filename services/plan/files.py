"""Files that come out of a plan: the configuration that services read, and the cluster that the simulator reads.

The configuration is loaded by the schema before it is written: a plan never writes what a service would refuse.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any, Final

from mooncache.config import Config, load
from mooncache.config.small_files import toml_value
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.plan import simulation
from mooncache.plan.answer import PlanReport
from mooncache.plan.core.estimate import Layout
from mooncache.plan.core.spec import GB, Arrangement
from mooncache.simulate.cluster import ClusterSpec
from mooncache.simulate.profile import ModelProfile

CONFIG_NAME: Final = "mooncache.toml"
CLUSTER_NAME: Final = "cluster.toml"


def settings_of(answer: PlanReport) -> dict[str, dict[str, object]]:
    """The settings that a plan decides, by section."""
    layout, slo = answer.best.plan.layout, answer.spec.slo
    gpus = max(layout.prefill.gpus, layout.decode.gpus)
    settings: dict[str, dict[str, Any]] = {
        "conductor": {
            "policy": simulation.POLICY,
            "ttft_slo_s": slo.ttft_s,
            "tbt_slo_s": slo.tbt_s,
            "admission_enabled": True,
            "rebalance_roles": layout.arrangement is Arrangement.SWITCHING,
        },
        "store_node": {"capacity_bytes": math.floor(layout.dram.gb * GB)},
    }
    if layout.ssd.gb:
        settings["store_node"]["ssd_bytes"] = math.floor(layout.ssd.gb * GB)
    if gpus > 1 and layout.prefill.gpus == layout.decode.gpus:
        settings["vllm"] = {"extra_args": ["--tensor-parallel-size", str(gpus)]}
    return settings


def config_toml(answer: PlanReport) -> str:
    """The configuration for every machine of the plan, with what belongs where as comments."""
    layout = answer.best.plan.layout
    lines = [
        "# Written by `mooncache plan`. Read it with MOONCACHE_CONFIG=this-file, on every machine.",
        f"# Plan: {layout.name}",
        *(f"# {line}" for line in _where(layout)),
    ]
    for section, fields in settings_of(answer).items():
        lines += ["", f"[{section}]"]
        lines += [f"{name} = {toml_value(value)}" for name, value in fields.items()]
    text = "\n".join(lines) + "\n"
    check(text)
    return text


def _where(layout: Layout) -> list[str]:
    lines = []
    parts = [
        (InstanceRole.PREFILL, layout.prefill, layout.prefill_nodes),
        (InstanceRole.DECODE, layout.decode, layout.decode_nodes),
    ]
    if layout.arrangement is Arrangement.BOTH:
        parts = [(InstanceRole.BOTH, layout.prefill, layout.nodes)]
    for role, engine, machines in parts:
        lines.append(
            f"{role}: {machines} x {engine.node.name}, {engine.per_node} per machine with {engine.gpus} GPUs each: "
            f"MOONCACHE_WORKER_ROLE={role} mooncache worker"
        )
        if layout.prefill.gpus != layout.decode.gpus and engine.gpus > 1:
            lines.append(f"  with MOONCACHE_VLLM_EXTRA_ARGS=--tensor-parallel-size,{engine.gpus}")
    lines.append("One store node on every machine (mooncache store-node); one master, conductor and gateway.")
    lines.append(f"Everything on one machine, to try: {up_command(layout)}")
    return lines + [f"NOT SET HERE: {line}" for line in beyond(layout)]


def beyond(layout: Layout) -> list[str]:
    """What the plan counts on and no setting of the services can bring about: it is in cluster.toml only."""
    lines = []
    if layout.stages > 1:
        lines.append(
            f"pipelines of {layout.stages} prefill instances for long prompts; engines of this version compute a "
            "prompt alone. Plan with search.pipeline_stages = [1] for what runs as it is."
        )
    return lines


def up_command(layout: Layout) -> str:
    """The whole layout with `mooncache up`."""
    prefill, decode = layout.prefill_instances, layout.decode_instances
    if layout.arrangement is Arrangement.BOTH:
        prefill, decode = 0, prefill + decode
    ssd = f" --ssd {math.floor(layout.ssd.gb)}GB" if layout.ssd.gb else ""
    return (
        f"mooncache up --prefill {prefill} --decode {decode} "
        f"--nodes {min(layout.nodes, 64)} --capacity {math.floor(layout.dram.gb)}GB{ssd}"
    )


def check(text: str) -> Config:
    """What the services would read. Raises ConfigInvalid."""
    with tempfile.TemporaryDirectory(prefix="mooncache-plan-") as folder:
        path = Path(folder) / CONFIG_NAME
        path.write_text(text, encoding="utf-8")
        return load(path, env={})


def cluster(answer: PlanReport, bases: dict[str, ModelProfile], block_tokens: int) -> ClusterSpec:
    """The best plan as a cluster for `mooncache simulate`."""
    return simulation.cluster_of(answer.best.plan.layout, bases, answer.spec.slo, block_tokens)
