"""TensorRT-LLM's own base classes, wherever its version has them."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any, Final

from mooncache.connectors.versions import supported_minor
from mooncache.errors import ConfigInvalid

OLDEST: Final = (1, 2, 0)
NEWER_THAN_ALL: Final = (1, 5, 0)
_HOMES: Final = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)


def check_version() -> str:
    """TensorRT-LLM's minor version, for example 1.3. Raises ConfigInvalid for one that is not known."""
    text = importlib.metadata.version("tensorrt_llm")
    return supported_minor("TensorRT-LLM", text, oldest=OLDEST, newer_than_all=NEWER_THAN_ALL)


def base_class(name: str) -> Any:
    """A class of the engine's connector interface.

    Raises:
        ConfigInvalid: this version has none.
    """
    for home in _HOMES:
        try:
            return getattr(importlib.import_module(home), name)
        except ModuleNotFoundError as error:
            if error.name is None or not home.startswith(error.name):
                raise
    raise ConfigInvalid(f"This TensorRT-LLM has no {name}; its connector interface is another one.")
