"""How much `mooncache bench operate` measures."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from mooncache.bench.gateway.options import GatewayBenchOptions


@dataclass(frozen=True, slots=True)
class OperateBenchOptions:
    """How much is measured. body_bytes: of one request; added_bytes: of it, what no earlier request had."""

    seed: int = 1
    body_bytes: int = 220_000
    added_bytes: int = 8000
    rate_per_s: float = 10.0
    requests: int = 200  # at that rate, by each way
    clients: int = 8
    sustained_s: float = 20.0
    rounds: int = 8  # of the case batches, each with a batch of its own
    batch_prompts: int = 500
    batch_prompt_tokens: int = 100
    online_prompt_tokens: int = 2000
    online_per_s: float = 1.5
    engine_tokens_per_s: float = 10_000.0
    metered_rounds: int = 8  # of the case metering, each on, off, off, on
    metered_requests: int = 1500
    console_rows: int = 1000  # instances that do not report: of many more the first would be forgotten
    console_blocks: int = 10_000  # rows that no conductor has to keep
    console_viewers: int = 100
    console_paints: int = 7
    console_scroll_s: float = 5.0
    gateway: GatewayBenchOptions = field(default_factory=GatewayBenchOptions)

    def quick(self) -> Self:
        """Less of everything: a minute, not comparable."""
        few = replace(self, requests=20, sustained_s=3.0, rounds=1, batch_prompts=100)
        few = replace(few, gateway=self.gateway.quick())
        few = replace(few, metered_rounds=1, metered_requests=300)
        return replace(few, console_rows=300, console_viewers=20, console_paints=3, console_scroll_s=2.0)
