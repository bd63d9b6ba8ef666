"""The one list of the conductor's duties."""

from __future__ import annotations

from mooncache.conductor.background import (
    check_invariants,
    expire,
    lead,
    measure_needs,
    pool_connection,
    rebalance_roles,
    replicate_prefixes,
    work_off,
)
from mooncache.conductor.config import (
    CHECK_INTERVAL_S,
    EXPIRE_INTERVAL_S,
    LEAD_PAUSE_S,
    POOL_RETRY_S,
    REBALANCE_INTERVAL_S,
    REMEMBER_INTERVAL_S,
    REPLICATE_INTERVAL_S,
    SCALER_LOOK_S,
)
from mooncache.conductor.shell.peers import Peers
from mooncache.conductor.state import ConductorState
from mooncache.runtime.duties import Duty


def conductor_duties(state: ConductorState, peers: Peers | None = None) -> list[Duty]:
    """Every duty. peers: the lines to all conductors, None when there is one."""
    leading = [] if peers is None else [Duty("lead", lambda: lead.run(state, peers), LEAD_PAUSE_S)]
    return [
        *leading,
        Duty("expire", lambda: expire.run_once(state), EXPIRE_INTERVAL_S),
        Duty("work_off", lambda: work_off.run_once(state), REMEMBER_INTERVAL_S),
        Duty("pool_connection", lambda: pool_connection.run_once(state), POOL_RETRY_S),
        Duty("rebalance_roles", lambda: rebalance_roles.run_once(state), REBALANCE_INTERVAL_S),
        Duty("measure_needs", lambda: measure_needs.run_once(state), SCALER_LOOK_S),
        Duty("replicate_prefixes", lambda: replicate_prefixes.run_once(state), REPLICATE_INTERVAL_S),
        Duty("check_invariants", lambda: check_invariants.run_once(state), CHECK_INTERVAL_S),
    ]
