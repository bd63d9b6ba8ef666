"""The original's helper that keeps a thread on one NUMA node."""

from __future__ import annotations

import os
from pathlib import Path

from mooncache.dropin.base import refuse

_NODES = Path("/sys/devices/system/node")


def bind_to_numa_node(node: int) -> None:
    """Let the calling thread run on this NUMA node's processors only; the kernel then takes memory there first.

    Does nothing, with a line in the log, where the machine has no such node.
    """
    try:
        text = (_NODES / f"node{int(node)}" / "cpulist").read_text(encoding="ascii").strip()
        processors = {
            number
            for item in text.split(",")
            for low, _, high in (item.partition("-"),)
            for number in range(int(low), int(high or low) + 1)
        }
        os.sched_setaffinity(0, processors)
    except (OSError, ValueError) as error:
        refuse("bind_to_numa_node", f"there is no NUMA node {node} to run on: {error}")
