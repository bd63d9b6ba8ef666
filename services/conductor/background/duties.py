"""The one list of the conductor's duties."""

from __future__ import annotations

from mooncache.conductor.background import (
    check_invariants,
    expire,
    pool_connection,
    rebalance_roles,
    replicate_prefixes,
    work_off,
)
from mooncache.conductor.config import (
    CHECK_INTERVAL_S,
    EXPIRE_INTERVAL_S,
    POOL_RETRY_S,
    REBALANCE_INTERVAL_S,
    REMEMBER_INTERVAL_S,
    REPLICATE_INTERVAL_S,
)
from mooncache.conductor.state import ConductorState
from mooncache.runtime.duties import Duty


def conductor_duties(state: ConductorState) -> list[Duty]:
    """Every duty."""
    return [
        Duty("expire", lambda: expire.run_once(state), EXPIRE_INTERVAL_S),
        Duty("work_off", lambda: work_off.run_once(state), REMEMBER_INTERVAL_S),
        Duty("pool_connection", lambda: pool_connection.run_once(state), POOL_RETRY_S),
        Duty("rebalance_roles", lambda: rebalance_roles.run_once(state), REBALANCE_INTERVAL_S),
        Duty("replicate_prefixes", lambda: replicate_prefixes.run_once(state), REPLICATE_INTERVAL_S),
        Duty("check_invariants", lambda: check_invariants.run_once(state), CHECK_INTERVAL_S),
    ]
