"""The real LMCache package, where it can be imported. It needs no GPU for what tests use of it."""

from __future__ import annotations

import importlib.util
import warnings

import pytest


def need_lmcache() -> None:
    """Import what tests use; skip the calling module, with the reason, where the package is missing."""
    if importlib.util.find_spec("lmcache") is None:
        pytest.skip(
            "LMCache is not installed (docs/lmcache.md says how, without a GPU)", allow_module_level=True
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lmcache.v1.distributed.l2_adapters.plugin_l2_adapter
        import lmcache.v1.storage_backend.remote_backend  # noqa: F401
