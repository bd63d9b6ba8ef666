"""The KV cache connector for TensorRT-LLM: `MooncacheScheduler` and `MooncacheWorker`, for a `KvCacheConnectorConfig`
with `connector_module="mooncache.connectors.tensorrt_llm"`.

The classes are loaded on first use, so that `core` can be read and tested without the engine.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["MooncacheScheduler", "MooncacheWorker"]
_HOMES = {"MooncacheScheduler": "scheduler_side", "MooncacheWorker": "worker_side"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
