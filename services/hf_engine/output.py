"""What leaves the engine's thread."""

from __future__ import annotations

from dataclasses import dataclass

from mooncache.hf_engine.core.sequence import FinishReason
from mooncache.hf_engine.sampling import SampledToken
from mooncache.kvcache.leg_hint import CacheReport


@dataclass(frozen=True, slots=True)
class Output:
    """What a sequence gives out: one token, or its end. `finish` None: it goes on. `cache` comes with the first token
    and with the end."""

    index: int
    chosen: SampledToken | None = None
    finish: FinishReason | None = None
    stop_id: int | None = None
    cache: CacheReport | None = None
    message: str = ""
