"""Mooncake Store's Python API on a Mooncache pool: `mooncake.store`, `mooncake.async_store`."""

from importlib import metadata as _metadata

_theirs = sorted(
    name
    for name in {str(found.name or "") for found in _metadata.distributions()}
    if name.lower().replace("_", "-").startswith("mooncake-transfer-engine")
)
if _theirs:
    raise ImportError(
        f"{_theirs[0]} and mooncache-mooncake both provide the package mooncake. "
        "Uninstall both, then install the one you want."
    )
