"""Everything that wants a real GPU, in one go: for machines that are lent for minutes.

Each check stands alone: what fails or is not there is a sentence in the result, and the next one runs. The whole stays
below `SECONDS_MAX`: checks that have not begun by then are left out, and the tests and the engine have limits of their
own. What comes out is one JSON file.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mooncache.bench.gpu import copies, engine_case
from mooncache.client import staging
from mooncache.client.native_call import call_native
from mooncache.errors import MooncacheError
from mooncache.reporting.rows import Report, describe_machine, describe_versions

SECONDS_MAX = 450.0
_TESTS = Path(__file__).resolve().parents[3] / "tests" / "gpu"
_TESTS_S = 120.0
_DISTRIBUTIONS = ("mooncache", "torch", "transformers", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc")
Progress = Callable[[str], None]
Check = Callable[[Report, Progress], dict[str, object]]


def run(checks: dict[str, Check], progress: Progress) -> dict[str, Any]:
    """All of them: for each what it found, or why there is nothing; the rows of all, and the machine."""
    begun_s = time.monotonic()
    report = Report(
        "mooncache on a GPU", machine=describe_machine(), versions=describe_versions(_DISTRIBUTIONS)
    )
    found: dict[str, Any] = {}
    for name, check in checks.items():
        at_s = time.monotonic()
        if at_s - begun_s > SECONDS_MAX:
            found[name] = {"ok": False, "why": f"left out: {SECONDS_MAX:g} s are over"}
            continue
        progress(name)
        try:
            found[name] = {"ok": True, **check(report, progress)}
        except MooncacheError as error:
            found[name] = {"ok": False, "why": error.message}
        except Exception as error:  # noqa: BLE001 - whatever one check meets, the others are wanted
            found[name] = {"ok": False, "why": f"{type(error).__name__}: {error}"}
        found[name]["seconds"] = round(time.monotonic() - at_s, 1)
    return {
        "checks": found,
        "rows": [asdict(row) for row in report.rows],
        "notes": report.notes,
        "machine": report.machine,
        "versions": report.versions,
        "command": " ".join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "seconds": round(time.monotonic() - begun_s, 1),
    }


def device(_report: Report, _progress: Progress) -> dict[str, Any]:
    """What is here, how its copies are made, and its driver's version."""
    gpu = staging.open_device(0)
    stager = call_native(gpu.make_stager, 1 << 20, 1)
    return {"name": gpu.name, "how": stager.how, "driver": _driver_version()}


def copy_rates(report: Report, progress: Progress) -> dict[str, object]:
    """Staging and gathering; ok when all bars are met."""
    before = len(report.rows)
    copies.measure(report, copies.CopyOptions(), progress)
    missed = [row.name for row in report.rows[before:] if row.met is False]
    return {"ok": not missed, "missed": missed}


def dma_buf(_report: Report, _progress: Progress) -> dict[str, object]:
    """Export of a range of plain device memory, and of a cupy buffer where cupy is."""
    gpu = staging.open_device(0)
    memory = call_native(gpu.allocate, 1 << 21)
    try:
        fd, offset, length = call_native(gpu.export_dma_buf, memory + 4096, 1 << 20)
        os.close(fd)
    finally:
        call_native(gpu.release, memory)
    exported = {"offset": offset, "length": length}
    if importlib.util.find_spec("cupy") is None:
        return exported | {"cupy": "not installed"}
    cupy: Any = importlib.import_module("cupy")
    buffer = cupy.zeros(1 << 22, dtype=cupy.uint8)
    fd, offset, length = call_native(gpu.export_dma_buf, int(buffer.data.ptr), int(buffer.nbytes))
    os.close(fd)
    return exported | {"cupy": {"offset": offset, "length": length}}


def tests(_report: Report, _progress: Progress) -> dict[str, object]:
    """The tests that are marked `gpu`, where they and pytest are at hand."""
    if not _TESTS.is_dir() or importlib.util.find_spec("pytest") is None:
        return {"ok": False, "why": "unavailable, because the tests or pytest are not installed"}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "gpu", str(_TESTS)]
    done = subprocess.run(
        command, cwd=_TESTS.parents[1], capture_output=True, text=True, timeout=_TESTS_S, check=False
    )
    lines = done.stdout.strip().splitlines()
    return {"ok": done.returncode == 0, "summary": lines[-1:], "tail": lines[-15:]}


def engine(report: Report, progress: Progress, options: engine_case.EngineOptions) -> dict[str, Any]:
    """The engine with the pool on and off."""
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            return {"ok": False, "why": f"unavailable, because {module} is not installed"}
    before = len(report.rows)
    engine_case.measure(report, options, progress)
    missed = [row.name for row in report.rows[before:] if row.met is False]
    return {"ok": not missed, "missed": missed, "model": asdict(options)}


def all_checks(options: engine_case.EngineOptions) -> dict[str, Check]:
    """By name, in the order in which they are worth most."""
    return {
        "device": device,
        "copies": copy_rates,
        "dma_buf": dma_buf,
        "tests": tests,
        "engine": lambda report, progress: engine(report, progress, options),
    }


def write(result: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _driver_version() -> int:
    """As the driver counts: 13000 is CUDA 13.0."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value
