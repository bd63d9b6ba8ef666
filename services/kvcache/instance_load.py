"""What a worker reports of its engine and a conductor keeps of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """One moment of an engine. Times are milliseconds, 0 when nothing was measured; totals count since its start."""

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    ttft_ms: float = 0.0
    tbt_ms: float = 0.0
    prompt_tokens_total: int = 0
    output_tokens_total: int = 0
    local_hit_tokens_total: int = 0
    pool_hit_tokens_total: int = 0

    @property
    def idle(self) -> bool:
        """Whether the engine has no request."""
        return self.waiting == 0 and self.running == 0
