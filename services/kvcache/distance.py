"""How far two blocks of KV are from each other, and how far they may be.

The distance is the largest, over the parts of a block (a layer, or K and V of one), of the root mean square of the
differences over the root mean square of the stored numbers. A part counts by itself, because a wrong layer must not
disappear among right ones. What is not a number on one side alone is infinitely far; 0 means equal bytes.

Engines that are right differ as well: the order of a sum depends on how many tokens a step computes, on the kernel and
on the device. Each rounding is within half a unit in the last place, 2^-24, 2^-11 or 2^-8 of the number, and the layers
before add theirs. The tolerances are some thousand units for float32 and ten to twenty for the others: above what
equal engines were seen to differ. A flipped low bit is below them, and does no harm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mooncache.client.results import Deviation

if TYPE_CHECKING:
    from numpy.typing import NDArray

DISTANCES: Final = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0)
"""Buckets of a histogram."""
TOLERANCES: Final = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True, slots=True)
class Comparison:
    """How blocks of one engine are compared: the type of their numbers, and into how many equal parts they fall."""

    dtype: str
    parts: int
    tolerance: float
    """The distance up to which two blocks are the same."""

    @classmethod
    def of(cls, dtype: str, parts: int, tolerance: float = 0.0) -> Comparison | None:
        """`tolerance` 0: that of the type. None for other types (quantised KV), which are not compared."""
        own = TOLERANCES.get(dtype)
        return cls(dtype, max(1, parts), tolerance or own) if own is not None else None

    def difference(self, distance: float) -> Deviation:
        """As it is reported."""
        return Deviation(distance, self.tolerance, self.dtype)

    def distance(self, computed: Sequence[memoryview], stored: bytes | bytearray | memoryview) -> float:
        """Of two blocks with the same bytes; infinite when their sizes differ."""
        mine = b"".join(computed)
        if mine == stored:
            return 0.0
        if len(mine) != len(stored):
            return math.inf
        import numpy as np

        # Any bytes are compared: a signalling NaN is "invalid" when it is widened, and infinity minus infinity too.
        with np.errstate(invalid="ignore", over="ignore"):
            ours, theirs = _numbers(mine, self.dtype), _numbers(stored, self.dtype)
            parts = self.parts if ours.size % self.parts == 0 else 1
            return max(
                _part(a, b) for a, b in zip(ours.reshape(parts, -1), theirs.reshape(parts, -1), strict=True)
            )


def _part(computed: NDArray[Any], stored: NDArray[Any]) -> float:
    import numpy as np

    apart = float(np.sqrt(np.mean(np.square(computed - stored))))
    scale = float(np.sqrt(np.mean(np.square(stored))))
    if apart == 0.0:
        return 0.0
    found = apart / scale if scale > 0.0 else math.inf
    return found if math.isfinite(found) else math.inf


def _numbers(data: bytes | bytearray | memoryview, dtype: str) -> NDArray[Any]:
    import numpy as np

    if dtype == "bfloat16":  # the upper half of a float32
        bits = np.frombuffer(data, dtype="<u2").astype("<u4") << 16
        return bits.view("<f4").astype(np.float64)
    return np.frombuffer(data, dtype={"float32": "<f4", "float16": "<f2"}[dtype]).astype(np.float64)
