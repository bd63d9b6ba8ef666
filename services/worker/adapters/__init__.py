"""Engines that a worker can supervise: one small adapter each, found by name (see base.py)."""

from __future__ import annotations

import importlib

from mooncache.config import Config
from mooncache.errors import ConfigInvalid
from mooncache.worker.adapters.base import EngineAdapter

_HOMES = {
    "vllm": "mooncache.worker.adapters.vllm:VllmAdapter",
    "sglang": "mooncache.worker.adapters.sglang:SglangAdapter",
    "hf": "mooncache.worker.adapters.hf:HfAdapter",
}


def make(name: str, config: Config) -> EngineAdapter:
    """The adapter of that name, or of "package.module:Class" for an engine of your own.

    Raises:
        ConfigInvalid: no such adapter.
    """
    module_name, colon, class_name = _HOMES.get(name, name).partition(":")
    if not colon:
        raise ConfigInvalid(f"worker.engine is {name!r}; use {', '.join(_HOMES)} or package.module:Class.")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigInvalid(f"worker.engine {name!r} cannot be loaded: {error}.") from None
    if not isinstance(found, type) or not issubclass(found, EngineAdapter):
        raise ConfigInvalid(f"worker.engine {name!r} is not a subclass of EngineAdapter.")
    adapter: EngineAdapter = found(config)
    return adapter
