"""How many processes an engine has, as its worker registers it and prices and speeds are looked up by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineSize:
    """Each process has a GPU of its own, where the engine has GPUs. All numbers are at least 1.

    Attributes:
        stages: of its pipeline.
        ranks: processes of each stage.
        replicas: data parallel copies of the model, of `stages` * `ranks` processes each.
    """

    stages: int = 1
    ranks: int = 1
    replicas: int = 1

    @property
    def processes(self) -> int:
        return self.stages * self.ranks * self.replicas

    def __str__(self) -> str:
        """What one request is computed by; "" for one process."""
        return "" if self.stages == self.ranks == 1 else f"{self.stages}x{self.ranks}"
