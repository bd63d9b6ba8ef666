"""The real SGLang package, where it can be imported: its configuration, its host pools and its loader of backends.

It needs no GPU for that, and of torchvision (of which many machines have no CPU build) only that it exists. So a module
of that name stands in when there is none, made after transformers has looked for the real one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from typing import Any

import pytest


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".", maxsplit=1)[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: see `_StandIn`."""


def need_sglang() -> None:
    """Import what tests use; skip the calling module, with the reason, where the package is missing."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip(
            "SGLang is not installed (docs/sglang.md says how, without a GPU)", allow_module_level=True
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if importlib.util.find_spec("torchvision") is None:
            from transformers.utils import is_torchvision_available

            assert not is_torchvision_available()
            sys.meta_path.append(_Finder())
        import sglang.srt.managers.cache_controller
        import sglang.srt.mem_cache.pool_host.mha
        import sglang.srt.mem_cache.pool_host.mla
        import sglang.srt.mem_cache.storage.backend_factory  # noqa: F401
