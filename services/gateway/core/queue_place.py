"""Where a request stands in an engine's queue: a number in its leg, of which engines take the lowest first.

The number is a moment: when it was first sent, put off by what its class and its priority are worth. So equals are
first come, first served, over all gateways; offline work lets online requests pass that are sent up to a minute later;
and nothing starves, because whatever comes later still stands behind.
"""

from __future__ import annotations

from typing import Final

from mooncache.accounts.core.request_limits import PRIORITY_MAX

OFFLINE_S: Final = 60.0
"""An offline request stands where an online one would that came so much later."""
PRIORITY_S: Final = 5.0
"""The same for a step of priority: 0 is normal, 1 stands before what came up to so much earlier."""


def queue_place(came_s: float, *, priority: int = 0, offline: bool = False) -> int:
    """The place of a request that came at `came_s` (Unix time), in milliseconds; lower is earlier.

    priority: steps; four count at most, in both directions.
    """
    steps = min(PRIORITY_MAX, max(-PRIORITY_MAX, priority))
    return round((came_s - PRIORITY_S * steps + (OFFLINE_S if offline else 0.0)) * 1e3)
