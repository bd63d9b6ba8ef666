"""How much `mooncache bench gateway` measures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class GatewayBenchOptions:
    """How much is measured. Tokens are counted by the benchmark's tokenizer."""

    seed: int = 1
    short_tokens: int = 1000
    long_tokens: int = 32_000
    added_tokens: int = 2000
    requests: int = 512
    long_requests: int = 15
    streams: int = 64
    stream_events: int = 5000
    paced_streams: int = 250
    paced_events_per_s: float = 100.0
    paced_events: int = 500

    def quick(self) -> Self:
        """Less of everything: half a minute, not comparable."""
        return replace(
            self, requests=64, long_requests=3, stream_events=500, paced_streams=50, paced_events=50
        )
