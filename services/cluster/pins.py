"""Pins that a store node of this machine holds, by its metrics."""

from __future__ import annotations

import re
from typing import Final

from mooncache.cluster.http_get import http_get

_PINS: Final = re.compile(rb"^mooncache_store_node_store_pins(?:{[^}]*})? ([0-9.e+-]+)$", re.MULTILINE)


async def pins_held(metrics: str) -> int | None:
    """Pins of the node whose probe server is at host:port; None when it does not say."""
    status, body = await http_get(metrics, "/metrics")
    found = _PINS.search(body) if status == 200 else None
    return round(float(found[1])) if found is not None else None
