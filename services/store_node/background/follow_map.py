"""Duty: follow the cluster map, and have the native server hand it out to peers that ask no master.

It is the map as the master published it: what a new master does not list yet is carried over by those who ask. Without
a master the last map stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mooncache.client.map_keeper import MapKeeper
from mooncache.client.native_call import call_native
from mooncache.client.results import ClusterView
from mooncache.errors import MooncacheError
from mooncache.runtime.logs import Event, get_logger
from mooncache.store_node.state import StoreNodeState

PAUSE_S: Final = 0.5  # between two maps: a cluster that starts makes one for each node that joins

log = get_logger(__name__)

Publish = Callable[[int, int, list[dict[str, object]]], None]
"""Term, epoch and nodes of a map, for the native server, which refuses one beyond the limits of the data plane."""


def nodes_of(view: ClusterView) -> list[dict[str, object]]:
    """The nodes of a map as the native server takes them."""
    return [
        {
            "index": node.index,
            "incarnation": node.incarnation,
            "state": str(node.state),
            "rdma": bool(node.rails),
            "node_id": node.node_id,
            "host_id": node.host_id,
            "tcp_host": node.tcp_host,
            "tcp_port": node.tcp_port,
            "unix_path": node.unix_path,
            "arena": node.arena,
            "free_bytes": node.free_bytes,
            "weight": node.weight,
            "labels": list(node.labels),
        }
        for node in view.nodes
    ]


async def run(state: StoreNodeState, publish: Publish) -> None:
    """Until cancelled."""
    assert state.link is not None

    def apply(_carried_over: ClusterView) -> None:
        known = keeper.known
        try:
            call_native(publish, known.term, known.epoch, nodes_of(known))
        except MooncacheError as error:
            log.warning(Event.NODE_MAP_REFUSED, term=known.term, epoch=known.epoch, reason=error.message)

    keeper = MapKeeper(state.link, apply, state.clock, state.rng, pause_s=PAUSE_S)
    await keeper.run()
