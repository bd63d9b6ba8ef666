"""What moves between parts of the cluster each second, from counters that only grow, and who holds what in the pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

WINDOW_S: Final = 10.0
_LOOKS_MAX: Final = 16
_GAP_WINDOWS_MAX: Final = (
    6  # between two looks; they are as far apart only in clusters of many thousand instances
)
TENANTS_SHOWN: Final = 8
OTHERS: Final = "(others)"
Counters = Mapping[str, Mapping[str, int]]
"""What is counted of each owner, by name."""


class TenantShare(NamedTuple):
    """Bytes of a tenant on one node."""

    node_id: str
    tenant: str
    memory_bytes: int
    disk_bytes: int


class PartFlow(NamedTuple):
    """What moves from one part to another each second; None: not counted, or not yet."""

    source: str
    target: str
    what: str
    bytes_per_s: float | None = None
    tokens_per_s: float | None = None


class CounterRates:
    """Rates over the last seconds. A counter that fell, because its owner was started again, has none for a while."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._looks: deque[tuple[float, Counters]] = deque(maxlen=_LOOKS_MAX)

    def take(self, at_s: float, counters: Counters) -> None:
        """A look; one that is not newer than the last is ignored."""
        if self._looks and at_s <= self._looks[-1][0]:
            return
        if self._looks:
            if at_s - self._looks[-1][0] > _GAP_WINDOWS_MAX * self._window_s:
                self._looks.clear()  # a mean over a time without looks is not of the last seconds
            else:
                self._forget_restarted(counters)
        self._looks.append((at_s, counters))
        while len(self._looks) > 2 and self._looks[1][0] <= at_s - self._window_s:
            self._looks.popleft()

    def _forget_restarted(self, counters: Counters) -> None:
        """Forget looks at owners of which a counter fell: later it may pass what it was, and the rate be wrong."""
        last = self._looks[-1][1]
        restarted = {
            owner
            for owner, now in counters.items()
            if any(value < last.get(owner, {}).get(name, value) for name, value in now.items())
        }
        if restarted:
            for at, (at_s, old) in enumerate(self._looks):
                self._looks[at] = (at_s, {owner: old[owner] for owner in old if owner not in restarted})

    def rates(self) -> dict[str, dict[str, float]]:
        """A second's growth of each counter that did not fall; owners that were not there before have none."""
        if len(self._looks) < 2:
            return {}
        (first_s, first), (last_s, last) = self._looks[0], self._looks[-1]
        found: dict[str, dict[str, float]] = {}
        for owner, counters in last.items():
            before = first.get(owner, {})
            grown = {
                name: (value - before[name]) / (last_s - first_s)
                for name, value in counters.items()
                if name in before and value >= before[name]
            }
            if grown:
                found[owner] = grown
        return found


def flows(
    nodes: Mapping[str, Mapping[str, float]],
    instances: Mapping[str, Mapping[str, float]],
    roles: Mapping[str, str],
) -> list[PartFlow]:
    """The ways of a request's bytes, from the rates of nodes and of instances with their roles.

    nodes: `stored_bytes`, `hit_bytes`, `down_bytes`, `up_bytes`. instances: `pool_bytes`, `computed_tokens`,
    `output_tokens`.
    """

    def of_nodes(name: str) -> float | None:
        return _sum(rates.get(name) for rates in nodes.values())

    found = []
    for role in ("prefill", "decode", "both"):
        mine = [rates for name, rates in instances.items() if roles.get(name) == role]
        if mine:
            part = f"{role} engines" if role != "both" else "engines"
            computed = _sum(rates.get("computed_tokens") for rates in mine)
            output = _sum(rates.get("output_tokens") for rates in mine)
            loaded = _sum(rates.get("pool_bytes") for rates in mine)
            found += [
                PartFlow("gateways", part, "prompt tokens computed", tokens_per_s=computed),
                PartFlow("pool", part, "blocks loaded", bytes_per_s=loaded),
                PartFlow(part, "gateways", "tokens generated", tokens_per_s=output),
            ]
    found += [
        PartFlow("all writers", "pool", "blocks stored", bytes_per_s=of_nodes("stored_bytes")),
        PartFlow("pool", "all readers", "blocks read", bytes_per_s=of_nodes("hit_bytes")),
        PartFlow("memory", "disks", "blocks demoted", bytes_per_s=of_nodes("down_bytes")),
        PartFlow("disks", "memory", "blocks promoted", bytes_per_s=of_nodes("up_bytes")),
    ]
    return found


def tenant_view(shares: Iterable[TenantShare], shown: int = TENANTS_SHOWN) -> dict[str, Any]:
    """The tenants that hold most, the others together, and what each holds on each node.

    A cell is `[node, tenant, memory, disk]`, sizes in bytes. Tenants are places in `tenants`, which are ordered by what
    they hold.
    """
    held: dict[str, int] = {}
    cells: dict[tuple[str, str], list[int]] = {}
    known = [each for each in shares if each.memory_bytes or each.disk_bytes]
    for each in known:
        name = each.tenant or OTHERS
        held[name] = held.get(name, 0) + each.memory_bytes + each.disk_bytes
    names = sorted((name for name in held if name != OTHERS), key=lambda name: (-held[name], name))
    top = names[:shown]
    if len(names) > shown or OTHERS in held:
        top.append(OTHERS)
    place = {name: at for at, name in enumerate(top)}
    for each in known:
        tenant = each.tenant if each.tenant in place else OTHERS
        cell = cells.setdefault((each.node_id, tenant), [0, 0])
        cell[0] += each.memory_bytes
        cell[1] += each.disk_bytes
    rows = [[node, place[tenant], *cell] for (node, tenant), cell in sorted(cells.items())]
    return {
        "tenants": top,
        "others": max(0, len(names) - shown),
        "cells": rows,
    }


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
