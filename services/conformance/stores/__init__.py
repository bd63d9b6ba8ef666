"""Our own stores as the kit drives them, and the short names that the command has for them."""

from __future__ import annotations

from typing import Final

OWN_STORES: Final = {
    "pool": "mooncache.conformance.stores.pool:PoolStore",
    "mooncake-store": "mooncache.conformance.stores.mooncake_store:MooncakeStore",
}
