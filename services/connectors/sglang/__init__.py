"""The HiCache storage backend for SGLang: `MooncacheHiCache`, for `--hicache-storage-backend dynamic` with
`"module_path": "mooncache.connectors.sglang"` and `"class_name": "MooncacheHiCache"`.

The class is loaded on first use, so that the parts without SGLang (`core`, `settings`) can be read and tested without
it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MooncacheHiCache"]


def __getattr__(name: str) -> Any:
    if name != "MooncacheHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mooncache.connectors.sglang.backend import MooncacheHiCache

    return MooncacheHiCache
