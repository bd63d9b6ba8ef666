"""Reads what a plan is asked from TOML and the command line; whatever is wrong is named with its place and its unit.

Hardware that a file does not describe is taken from the example, and the answer says so: prices that were not given
must never pass for prices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from mooncache.config.small_files import read_toml
from mooncache.errors import PlanInvalid
from mooncache.plan.core.machine import MeasuredModel
from mooncache.plan.core.spec import PLAUSIBLE, ModelSpec, SearchSpec, SloSpec, Spec, Workload
from mooncache.prices import example
from mooncache.prices.loading import TABLES, check_names, checked_tables
from mooncache.simulate import disk_profile
from mooncache.simulate import profile as profiles

_TABLES: Final[dict[str, type[BaseModel]]] = TABLES | {
    "slo": SloSpec, "model": ModelSpec, "search": SearchSpec, "workload": Workload,
}  # fmt: skip
_SPEED: Final = "speed"


@dataclass(frozen=True, slots=True)
class Question:
    """A checked question, and which of its tables are the example's."""

    spec: Spec
    from_example: tuple[str, ...]


def read(
    path: Path | str | None, overrides: Mapping[str, Any] | None = None, disk: Path | None = None
) -> Question:
    """The question of a file (None: the example), with single values ("slo.ttft_s") from the command line.

    `disk` is the profile of every disk that is bought. Raises PlanInvalid: every wrong value with its place, its unit
    and what was probably meant. Raises ProfileInvalid for a disk's profile.
    """
    where = str(path) if path is not None else "the example"
    tables: dict[str, Any] = {}
    if path is not None:
        tables = read_toml(Path(path).expanduser(), "plan's input", PlanInvalid)
    for name, value in (overrides or {}).items():
        if value is None:
            continue
        section, _, field = name.partition(".")
        if field:
            tables.setdefault(section, {})[field] = value
        else:
            tables[section] = value
    check_names(tables, where, _TABLES, (_SPEED,))
    filled = []
    for name, options in (
        ("gpu_node", example.NODES),
        ("dram", example.DRAM),
        ("ssd", example.SSD),
        ("nic", example.NIC),
    ):
        if name not in tables:
            filled.append(name)
            tables[name] = [option.model_dump() for option in options]
    if path is not None and "ssd" in filled:  # a file that lists no disks wants none
        filled.remove("ssd")
        del tables["ssd"]
    tables.update({"ssd": _measured_disks(tables["ssd"], disk, where)} if "ssd" in tables else {})
    return Question(checked_tables(Spec, tables, where, PLAUSIBLE), tuple(filled))


def _measured_disks(rows: list[dict[str, Any]], disk: Path | None, where: str) -> list[dict[str, Any]]:
    """The options with the rates of their profiles."""
    measured = []
    for number, row in enumerate(rows, start=1):
        own = row.get("profile", "")
        if own and not isinstance(own, str):
            raise PlanInvalid(f"{where}: ssd[{number}].profile: {own!r:.80} is not the name of a file.")
        profile = disk if disk is not None and row.get("gb") else Path(own) if own else None
        if profile is None:
            measured.append(row)
            continue
        rates = disk_profile.read(profile)
        if disk is None and "read_gb_per_s" in row:
            raise PlanInvalid(
                f"{where}: ssd[{number}]: profile and read_gb_per_s contradict each other: give one."
            )
        measured.append(
            {
                **row,
                "profile": str(profile),
                "read_gb_per_s": rates.machine_read_gb_per_s(disk_profile.LARGE_BYTES),
                "write_gb_per_s": rates.machine_write_gb_per_s,
            }
        )
    return measured


def measured(spec: Spec) -> dict[str, MeasuredModel]:
    """The profile that each machine type's instances come from, by the type's name.

    Raises ProfileInvalid for a profile that is not known or not usable, PlanInvalid for one without its hardware.
    """
    found = {}
    for node in spec.gpu_node:
        found[node.name] = of_profile(find_profile(node.profile or spec.model.profile))
    return found


def find_profile(name: str) -> profiles.ModelProfile:
    """A built-in profile by name, or one from a TOML file."""
    if name.endswith(".toml") or "/" in name:
        return profiles.read(name)
    return profiles.find(name)


def of_profile(profile: profiles.ModelProfile) -> MeasuredModel:
    """A profile as the planner scales it. Raises PlanInvalid when it does not say what it was measured on."""
    hardware = {
        "gpus": profile.gpus,
        "gpu_tflops": profile.gpu_tflops,
        "gpu_memory_bytes": profile.gpu_memory_bytes,
        "gpu_memory_bytes_per_s": profile.gpu_memory_bytes_per_s,
        "host_to_device_bytes_per_s": profile.host_to_device_bytes_per_s,
        "weights_bytes": profile.weights_bytes,
        "decode.per_token_s": profile.decode.per_token_s,
    }
    for name, value in hardware.items():
        if not value:
            raise PlanInvalid(
                f"profile {profile.name}: {name} is 0; a plan needs to know what was measured and on what."
            )
    return MeasuredModel(
        name=profile.name,
        prefill_s=(profile.prefill.a, profile.prefill.b, profile.prefill.c, profile.prefill.d),
        step_base_s=profile.decode.base_s,
        step_per_sequence_s=profile.decode.per_sequence_s,
        step_per_token_s=profile.decode.per_token_s,
        weights_bytes=profile.weights_bytes,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        gpus=profile.gpus,
        gpu_memory_gb=profile.gpu_memory_bytes / 1e9,
        gpu_memory_gb_per_s=profile.gpu_memory_bytes_per_s / 1e9,
        gpu_tflops=profile.gpu_tflops,
        host_gb_per_s=profile.host_to_device_bytes_per_s / 1e9,
        load_bytes_per_s=profile.load_bytes_per_s,
    )
