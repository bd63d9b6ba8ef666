"""What the KV of a request depends on beside its tokens: its adapter and its media, by their contents."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from mooncache.connectors.vllm.adapters import Adapters
from mooncache.connectors.vllm.core.refusals import PoolRefusal
from mooncache.connectors.vllm.core.request import RequestContent
from mooncache.connectors.vllm.media import MediaContents


class Contents:
    """Of every request. All methods are called on the scheduler's thread."""

    def __init__(self, state_dir: Path, lora_config: Any, changed: threading.Event) -> None:
        """
        Args:
            state_dir: where digests of files are remembered.
            lora_config: vLLM's LoRAConfig; None for an engine that takes no adapters.
            changed: set when an answer is there.
        """
        # No adapter was read before this moment.
        self._adapters = Adapters(state_dir, lora_config, started_ns=time.time_ns(), changed=changed)
        self._media = MediaContents(changed)

    def ask(self, request: Any) -> RequestContent | PoolRefusal | None:
        """What it is, or why that cannot be said; None while it is not known yet."""
        name = request.request_id
        lora = self._adapters.ask(name, getattr(request, "lora_request", None))
        media = self._media.ask(name, getattr(request, "mm_features", None))
        if isinstance(lora, PoolRefusal):
            return lora
        if isinstance(media, PoolRefusal):
            return media
        return None if lora is None or media is None else RequestContent(lora, media)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._adapters.forget(request_id)
        self._media.forget(request_id)

    @property
    def pending(self) -> bool:
        """True while an answer is missing."""
        return self._adapters.pending or self._media.pending

    def close(self) -> None:
        """End the threads."""
        self._adapters.close()
        self._media.close()
