"""Whether every part of the cluster on this machine is well: what the supervisor says, and what each part answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from mooncache.chaos.core.faults import Aim, aims_of
from mooncache.client.state_dir import read_cluster_file
from mooncache.cluster.http_get import http_get
from mooncache.cluster.pins import pins_held
from mooncache.cluster.watch import reason_of


async def not_well(state_dir: Path) -> str:
    """What is not well, in a few words; "" when everything is."""
    found = read_cluster_file(state_dir)
    if found is None:
        return "no cluster runs here"
    for part in found.parts:
        if part.state != "ready" or part.reason:
            return f"{part.name}: {part.reason or part.state}"
    names = list(found.metrics)
    answers = await asyncio.gather(*(http_get(found.metrics[name], "/ready") for name in names))
    for name, (status, body) in zip(names, answers, strict=True):
        if status != 200:
            return f"{name}: {reason_of(body) or 'does not answer'}"
    return ""


async def pins_left(state_dir: Path) -> int:
    """Pins that the nodes hold; a node that does not say counts none."""
    found = read_cluster_file(state_dir)
    metrics = found.metrics if found is not None else {}
    nodes = [address for name, address in metrics.items() if Aim.STORE_NODE in aims_of(name)]
    return sum(pins or 0 for pins in await asyncio.gather(*(pins_held(address) for address in nodes)))
