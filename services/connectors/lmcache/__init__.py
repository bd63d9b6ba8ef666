"""What LMCache loads by name: `MooncacheConnectorAdapter` as a remote storage plug-in of its in-process mode, and
`MooncacheL2Adapter` as an L2 adapter of `lmcache server`.

The classes are loaded on first use, so that the parts without LMCache (`core`, `settings`) can be read and tested
without it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MooncacheConnectorAdapter", "MooncacheL2Adapter"]


def __getattr__(name: str) -> Any:
    """A class of `__all__`. Raises ConfigInvalid for a version of LMCache that has other interfaces."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mooncache.connectors.lmcache.models import check_version

    check_version()
    if name == "MooncacheConnectorAdapter":
        from mooncache.connectors.lmcache.remote_connector import MooncacheConnectorAdapter

        return MooncacheConnectorAdapter
    from mooncache.connectors.lmcache.l2_adapter import MooncacheL2Adapter

    return MooncacheL2Adapter
