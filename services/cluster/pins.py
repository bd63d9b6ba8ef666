"""Pins that a store node of this machine holds, by its metrics."""

from __future__ import annotations

import re
import ssl
from typing import Final

from mooncache.cluster.http_get import http_get

_PINS: Final = re.compile(rb"^mooncache_store_node_store_pins(?:{[^}]*})? ([0-9.e+-]+)$", re.MULTILINE)


async def pins_held(metrics: str, *, key: str = "", tls: ssl.SSLContext | None = None) -> int | None:
    """Pins of the node whose probe server is at host:port; None when it does not say.

    Beyond loopback it asks for the metrics key, and is https where TLS is on.
    """
    status, body = await http_get(metrics, "/metrics", token=key, tls=tls)
    found = _PINS.search(body) if status == 200 else None
    return round(float(found[1])) if found is not None else None
