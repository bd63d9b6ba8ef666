"""The one list of the conductor's duties."""

from __future__ import annotations

from collections.abc import Callable

from mooncache.conductor.background import (
    announce,
    check_invariants,
    elect,
    expire,
    lead,
    look_at_pool,
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
from mooncache.conductor.core.members import INTERVAL_S
from mooncache.conductor.shell.peers import Peers
from mooncache.conductor.shell.pool_status import PoolStatus
from mooncache.conductor.state import ConductorState
from mooncache.coordination import Coordinator
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.duties import Duty


def conductor_duties(
    state: ConductorState,
    peers: Peers | None,
    pool: PoolStatus,
    describe: Callable[[], pb.Member],
    coordinator: Coordinator | None = None,
) -> list[Duty]:
    """Every duty. peers: the lines to all conductors, None when there is one. describe: this process as it is then.
    coordinator: who elects, None when conductors elect each other."""
    leading = [] if peers is None else [Duty("lead", lambda: lead.run(state, peers), LEAD_PAUSE_S)]
    if coordinator is not None:
        leading.append(Duty("elect", lambda: elect.run(state, coordinator), LEAD_PAUSE_S))
    return [
        *leading,
        Duty("announce", lambda: announce.run(state, peers, describe)),
        Duty("look_at_pool", lambda: look_at_pool.run_once(state, pool), INTERVAL_S),
        Duty("expire", lambda: expire.run_once(state), EXPIRE_INTERVAL_S),
        Duty("work_off", lambda: work_off.run_once(state), REMEMBER_INTERVAL_S),
        Duty("pool_connection", lambda: pool_connection.run_once(state), POOL_RETRY_S),
        Duty("rebalance_roles", lambda: rebalance_roles.run_once(state), REBALANCE_INTERVAL_S),
        Duty("measure_needs", lambda: measure_needs.run_once(state), SCALER_LOOK_S),
        Duty("replicate_prefixes", lambda: replicate_prefixes.run_once(state), REPLICATE_INTERVAL_S),
        Duty("check_invariants", lambda: check_invariants.run_once(state), CHECK_INTERVAL_S),
    ]
