"""What one instance of a model costs: prefill, decode step, memory; built in, from a file, or fitted to points.

Idea: both costs are polynomials with few coefficients, so a handful of measured points is enough.
Prefill of n tokens with p cached: a + b(n-p) + c(n^2-p^2) + d p seconds (the regression of the Mooncake papers).
One decode step: base + per sequence + per KV token in the batch.
Invariant: a profile that exists is usable: all numbers finite, time grows with work, the weights fit the memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mooncache.conductor.core.policy.types import DecodeCost, PrefillCost
from mooncache.config.small_files import nearest, read_toml
from mooncache.errors import ModelTooLarge, ProfileInvalid

MEMORY_USABLE: Final = 0.9  # the share of GPU memory that engines take for weights and KV
FIT_ERROR_MAX: Final = 0.35  # a fit that misses a measured point by more explains nothing


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One model on one kind of instance; all times seconds, all sizes bytes.

    The numbers of GPUs and the rates describe the hardware it was measured on, so that a planner can scale it; 0 means
    unknown.
    """

    name: str
    prefill: PrefillCost
    decode: DecodeCost
    kv_bytes_per_token: float
    weights_bytes: float = 0.0
    gpus: int = 0
    gpu_tflops: float = 0.0  # of one GPU
    gpu_memory_bytes: float = 0.0  # of one GPU
    gpu_memory_bytes_per_s: float = 0.0
    host_to_device_bytes_per_s: float = 0.0
    load_bytes_per_s: float = 100e9  # DRAM to GPU when a sequence joins decode
    chunk_overhead_s: float = 0.002  # fixed cost of one prefill chunk inside a decode batch

    @property
    def kv_capacity_tokens(self) -> float:
        """KV that fits beside the weights; infinite when the memory is unknown."""
        if not self.gpus or not self.gpu_memory_bytes:
            return math.inf
        free = self.gpus * self.gpu_memory_bytes * MEMORY_USABLE - self.weights_bytes
        return free // self.kv_bytes_per_token

    def check(self) -> ModelProfile:
        """The profile itself. Raises PROFILE_INVALID or MODEL_TOO_LARGE with the field, its value and the unit."""
        costs = {f"prefill.{key}": value for key, value in self.prefill._asdict().items()}
        costs |= {f"decode.{key}": value for key, value in self.decode._asdict().items()}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)):
                costs[field.name] = value
        for name, value in costs.items():
            if not math.isfinite(value) or value < 0:
                unit = _UNITS.get(name, "s")
                raise ProfileInvalid(
                    f"profile {self.name}: {name} is {value} {unit}; it must be a finite number, not negative"
                )
        self._check_growth()
        if self.gpus and self.gpu_memory_bytes and self.kv_capacity_tokens < 1:
            have = self.gpus * self.gpu_memory_bytes * MEMORY_USABLE / 1e9
            raise ModelTooLarge(
                f"profile {self.name}: weights_bytes is {self.weights_bytes / 1e9:.1f} GB, but {self.gpus} GPUs of "
                f"{self.gpu_memory_bytes / 1e9:.1f} GB give {have:.1f} GB ({MEMORY_USABLE:.0%} of their memory) for "
                "weights and KV: take more GPUs or larger ones"
            )
        return self

    def _check_growth(self) -> None:
        if self.kv_bytes_per_token <= 0:
            raise ProfileInvalid(
                f"profile {self.name}: kv_bytes_per_token is {self.kv_bytes_per_token} bytes; every token has KV"
            )
        if self.load_bytes_per_s <= 0:
            raise ProfileInvalid(
                f"profile {self.name}: load_bytes_per_s is {self.load_bytes_per_s} bytes/s; it has to be above 0"
            )
        if self.prefill.b <= 0 and self.prefill.c <= 0:
            raise ProfileInvalid(
                f"profile {self.name}: prefill.b is {self.prefill.b} s/token and prefill.c {self.prefill.c} "
                "s/token^2; a longer prompt has to take longer"
            )
        if self.decode.base_s <= 0 and self.decode.per_sequence_s <= 0:
            raise ProfileInvalid(
                f"profile {self.name}: decode.base_s is {self.decode.base_s} s and decode.per_sequence_s "
                f"{self.decode.per_sequence_s} s; a decode step has to take time"
            )


_UNITS: Final = {
    "prefill.b": "s/token",
    "prefill.c": "s/token^2",
    "prefill.d": "s/token",
    "decode.per_token_s": "s/token",
    "kv_bytes_per_token": "bytes",
    "weights_bytes": "bytes",
    "gpus": "GPUs",
    "gpu_tflops": "TFLOPS",
    "gpu_memory_bytes": "bytes",
    "gpu_memory_bytes_per_s": "bytes/s",
    "host_to_device_bytes_per_s": "bytes/s",
    "load_bytes_per_s": "bytes/s",
}

# LLaMA3-70B in bf16 on 8 x A800-SXM4-80GB: prefill fitted to FAST'25, Fig. 14 (at most 4.5 % off at its ten
# points); decode from the decode columns of that figure and the slope of arXiv 2407.00079, Fig. 2.
LLAMA3_70B_8XA800: Final = ModelProfile(
    name="llama3-70b-8xa800",
    prefill=PrefillCost(0.0666, 1.1003e-4, 7.386e-10, 2.618e-6),
    decode=DecodeCost(0.0263, 0.21e-3, 0.105e-3 * 327_680 / 1e9),
    kv_bytes_per_token=327_680.0,
    weights_bytes=141e9,
    gpus=8,
    gpu_tflops=312.0,
    gpu_memory_bytes=80e9,
    gpu_memory_bytes_per_s=2.04e12,
    host_to_device_bytes_per_s=128e9,
    load_bytes_per_s=100e9,
)
BUILT_IN: Final = {LLAMA3_70B_8XA800.name: LLAMA3_70B_8XA800}


def find(name: str) -> ModelProfile:
    """A built-in profile. Raises PROFILE_INVALID with the nearest name."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    advice = nearest(name, BUILT_IN, f"built in: {', '.join(sorted(BUILT_IN))}.", cutoff=0.4)
    raise ProfileInvalid(f"There is no model profile {name}; {advice} Others are read from a TOML file.")


def fit_prefill(points: Sequence[tuple[float, float, float]]) -> PrefillCost:
    """Fit a + b(n-p) + c(n^2-p^2) + d p to measured (n tokens, p cached tokens, seconds).

    Least squares weighted by 1/seconds, so that short prompts count as much as long ones; coefficients that come
    out negative are set to 0 and the rest fitted again. Points without cached tokens leave d at 0.
    Raises PROFILE_INVALID when points are too few, not numbers, or not explained within 35 %.
    """
    data = _points(points, "prefill", ("n tokens", "p cached tokens", "seconds"))
    n, p, seconds = data.T
    if np.any(p >= n) or np.any(p < 0):
        raise ProfileInvalid(
            "prefill points: cached tokens have to be at least 0 and less than the prompt's tokens"
        )
    columns = np.stack([np.ones_like(n), n - p, n * n - p * p, p], axis=1)
    wanted = [0, 1, 2, 3] if np.any(p > 0) else [0, 1, 2]
    values = _least_squares(columns, seconds, wanted, "prefill")
    return PrefillCost(*values)


def fit_decode(points: Sequence[tuple[float, float, float]]) -> DecodeCost:
    """Fit base + per sequence + per KV token to measured (sequences, KV tokens of the batch, seconds of a step).

    Raises PROFILE_INVALID as `fit_prefill` does.
    """
    data = _points(points, "decode", ("sequences", "kv tokens", "seconds of a step"))
    sequences, tokens, seconds = data.T
    columns = np.stack([np.ones_like(sequences), sequences, tokens], axis=1)
    values = _least_squares(columns, seconds, [0, 1, 2], "decode")
    return DecodeCost(*values)


def _points(
    points: Sequence[tuple[float, float, float]], what: str, names: tuple[str, ...]
) -> NDArray[np.float64]:
    if len(points) < 3:
        raise ProfileInvalid(
            f"{what} points: {len(points)} given, at least 3 are needed ({', '.join(names)})"
        )
    for number, point in enumerate(points, start=1):
        if len(point) != 3:
            raise ProfileInvalid(f"{what} point {number}: {len(point)} numbers, wanted {', '.join(names)}")
        for name, value in zip(names, point, strict=True):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ProfileInvalid(f"{what} point {number}: {name} is {value!r}, not a finite number")
        if point[2] <= 0 or point[0] <= 0 or point[1] < 0:
            raise ProfileInvalid(
                f"{what} point {number}: {tuple(point)} has to be positive ({', '.join(names)})"
            )
    return np.array(points, dtype=np.float64)


def _least_squares(
    columns: NDArray[np.float64], seconds: NDArray[np.float64], wanted: list[int], what: str
) -> list[float]:
    weight = 1.0 / seconds
    values = np.zeros(columns.shape[1])
    while wanted:
        scale = np.maximum(columns[:, wanted].max(axis=0), 1e-12)
        system = columns[:, wanted] / scale * weight[:, None]
        found, _, rank, _ = np.linalg.lstsq(system, np.ones(len(seconds)), rcond=1e-9)
        if rank < len(wanted):
            # Points on one line or of one length: the last, least important column cannot be distinguished.
            wanted = wanted[:-1]
            continue
        values[:] = 0.0
        values[wanted] = found / scale
        if found.min() >= 0:
            break
        wanted = [column for column, value in zip(wanted, found, strict=True) if value > 0]
    error = np.abs(columns @ values - seconds) / seconds
    worst = int(error.argmax())
    if not wanted or error[worst] > FIT_ERROR_MAX:
        raise ProfileInvalid(
            f"{what} points: point {worst + 1} ({seconds[worst]:.6g} s) is {error[worst]:.0%} off the best fit; "
            "the time does not grow with the work as it should, measure it again"
        )
    return [float(value) for value in values]


def read(path: Path | str) -> ModelProfile:
    """Read a profile from a TOML file; see docs/simulator.md. Raises PROFILE_INVALID or MODEL_TOO_LARGE."""
    where = Path(path).expanduser()
    return from_table(read_toml(where, "model profile", ProfileInvalid), str(where))


_NUMBERS: Final = tuple(f.name for f in fields(ModelProfile) if f.name not in ("name", "prefill", "decode"))


def from_table(table: dict[str, Any], where: str = "profile") -> ModelProfile:
    """Make a profile of a TOML table: coefficients, or `points` to fit them to."""
    known = ("name", "base", "prefill", "decode", *_NUMBERS)
    for key in table:
        if key not in known:
            raise ProfileInvalid(f"{where}: there is no field {key}; {nearest(key, known)}")
    for key in _NUMBERS:
        value = table.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ProfileInvalid(f"{where}: {key} is {value!r}, not a number")
    numbers = {key: table[key] for key in _NUMBERS if key in table}
    name = str(table.get("name", Path(where).stem))
    if "base" in table:
        base = replace(find(str(table["base"])), name=name, **numbers)
        changed: dict[str, Any] = {}
        if "prefill" in table:
            changed["prefill"] = _prefill_of(table["prefill"], where)
        if "decode" in table:
            changed["decode"] = _decode_of(table["decode"], where)
        return replace(base, **changed).check()
    for key in ("prefill", "decode", "kv_bytes_per_token"):
        if key not in table:
            raise ProfileInvalid(f"{where}: {key} is missing (or name a profile to start from: base = ...)")
    prefill, decode = _prefill_of(table["prefill"], where), _decode_of(table["decode"], where)
    return ModelProfile(name=name, prefill=prefill, decode=decode, **numbers).check()


def _prefill_of(table: object, where: str) -> PrefillCost:
    if isinstance(table, dict) and "points" in table:
        return fit_prefill(table["points"])
    return PrefillCost(
        *_coefficients(table, ("a_s", "b_s_per_token", "c_s_per_token2", "d_s_per_token"), where)
    )


def _decode_of(table: object, where: str) -> DecodeCost:
    if isinstance(table, dict) and "points" in table:
        return fit_decode(table["points"])
    return DecodeCost(*_coefficients(table, ("base_s", "per_sequence_s", "per_token_s"), where))


def _coefficients(table: object, names: tuple[str, ...], where: str) -> list[float]:
    wanted = f"a table with {', '.join(names)}, or with points = [[...], ...]"
    if not isinstance(table, dict) or set(table) - set(names):
        raise ProfileInvalid(f"{where}: {table!r:.120} is not {wanted}")
    values = []
    for name in names:
        value = table.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ProfileInvalid(f"{where}: {name} is {value!r}; wanted {wanted}")
        values.append(float(value))
    return values


def to_table(profile: ModelProfile) -> dict[str, object]:
    """The table that `from_table` reads back."""
    a, b, c, d = profile.prefill
    base, per_sequence, per_token = profile.decode
    table: dict[str, object] = {"name": profile.name}
    table |= {name: getattr(profile, name) for name in _NUMBERS}
    table["prefill"] = {"a_s": a, "b_s_per_token": b, "c_s_per_token2": c, "d_s_per_token": d}
    table["decode"] = {"base_s": base, "per_sequence_s": per_sequence, "per_token_s": per_token}
    return table
