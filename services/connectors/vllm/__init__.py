"""The KV connector for vLLM: `MooncacheConnector`, with `kv_connector_module_path="mooncache.connectors.vllm"`.

The class is loaded on first use, so that the parts without vLLM (`core`, `stats`) can be read and tested without it.
So a version of vLLM with other interfaces is named before one of its modules is missing.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MooncacheConnector"]


def __getattr__(name: str) -> Any:
    if name != "MooncacheConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mooncache.connectors.vllm.engine_passport import check_version

    check_version()
    from mooncache.connectors.vllm.connector import MooncacheConnector

    return MooncacheConnector
