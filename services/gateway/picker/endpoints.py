"""Endpoints as Envoy names them, `ip:port`, and which instances are behind them: pure functions.

The Gateway API Inference Extension lets Envoy say which endpoints may be chosen (the subset hint), and takes several in
order: the first one, then those to try when it cannot be reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from mooncache.gateway.core.fleet import EngineInstance

SUBSET_MAX: Final = 8192
_ADDRESS_CHARS_MAX: Final = 128
_PORTS: Final = {"http": 80, "https": 443}


def host_and_port(url: str) -> tuple[str, int]:
    """Host (IPv6 without brackets) and port of an engine's URL; ("", 0) for one that is no URL."""
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        return "", 0


def subset_of(value: object) -> frozenset[str] | None:
    """The endpoints that a subset hint names, None without a hint.

    value: what the metadata hold, a list or a text with commas. A hint that is neither names nothing.
    """
    if value is None:
        return None
    items: Sequence[object] = (
        value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    )
    texts = (item.strip() for item in items[:SUBSET_MAX] if isinstance(item, str))
    return frozenset(text for text in texts if 0 < len(text) <= _ADDRESS_CHARS_MAX)


def outside(
    instances: Iterable[EngineInstance], addresses: Mapping[str, str], subset: frozenset[str] | None
) -> list[str]:
    """Instances that generate and that the subset leaves out.

    Prefill instances stay: Envoy sends them nothing.

    addresses: endpoint of each instance, by its id.
    """
    if subset is None:
        return []
    return [
        one.instance_id
        for one in instances
        if one.can_generate and addresses.get(one.instance_id, "") not in subset
    ]


def fallbacks(
    instances: Sequence[EngineInstance], chosen: str, excluded: Iterable[str], count: int
) -> list[EngineInstance]:
    """Instances that could generate instead of the chosen one, at most `count`.

    They follow the chosen one in the list, so that the requests of an instance that ends go to different ones. They
    take the same key, and a place in their queue or none like it, since Envoy sends each of them the same.
    """
    left_out = {chosen, *excluded}
    at = next((number for number, one in enumerate(instances) if one.instance_id == chosen), 0)
    turned = [*instances[at + 1 :], *instances[:at]]
    able = [one for one in turned if one.can_generate and one.is_ready and one.instance_id not in left_out]
    token = token_of(instances, chosen)
    ordered = any(one.orders_by_priority for one in instances if one.instance_id == chosen)
    return [one for one in able if (one.engine_token, one.orders_by_priority) == (token, ordered)][:count]


def token_of(instances: Iterable[EngineInstance], instance_id: str) -> str:
    """Fingerprint of the cluster token that an instance was started with; "" when it is not known."""
    return next((one.engine_token for one in instances if one.instance_id == instance_id), "")
