"""Keeps the cluster map fresh by long polling; without a master the last map stays in use.

Maps are ordered by (term, epoch). A master that leads under an older term is not followed at once (terms.py), and is
asked again with pauses. After a change of master, nodes that the new one has not heard of yet are carried over for a
while (`carry_over`). `view_of_map` turns the control message into plain values; `MapKeeper.run` is the loop. Time and
randomness come from outside, so that a simulated cluster runs the same loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Sequence

from mooncache.client.master_link import MasterLink
from mooncache.client.results import BlockTier, ClusterView, MapNodeState, NodeView, tier_of_message
from mooncache.client.terms import PATIENCE_S, Terms
from mooncache.errors import MooncacheError, NotLeader
from mooncache.proto.v1 import common_pb2, master_pb2
from mooncache.runtime.backoff import Backoff
from mooncache.runtime.clock import Clock
from mooncache.runtime.logs import Event, get_logger

WAIT_S = 10.0
CARRY_S = 15.0
CARRIED_INDEX = 65_535
_SLACK_S = 2.0
_STATES = {
    common_pb2.NODE_STATE_ACTIVE: MapNodeState.ACTIVE,
    common_pb2.NODE_STATE_SUSPECT: MapNodeState.SUSPECT,
    common_pb2.NODE_STATE_DRAINING: MapNodeState.DRAINING,
    common_pb2.NODE_STATE_DEAD: MapNodeState.DEAD,
}

log = get_logger(__name__)


def view_of_node(node: common_pb2.NodeInfo) -> NodeView:
    """One node of the map as plain values. A state that is not known here counts as suspect: last choice."""
    tier, arena = memory_of(node.segments)
    return NodeView(
        index=node.index,
        node_id=node.node_id,
        host_id=node.host_id,
        incarnation=node.incarnation,
        state=_STATES.get(node.state, MapNodeState.SUSPECT),
        tcp_host=node.endpoints.tcp_host,
        tcp_port=node.endpoints.tcp_port,
        unix_path=node.endpoints.unix_path,
        capacity_bytes=node.capacity_bytes,
        free_bytes=node.free_bytes,
        weight=node.weight,
        grpc_target=node.endpoints.grpc_target,
        tls=node.endpoints.tls,
        software_version=node.software_version,
        rails=tuple(f"{rail.device}:{rail.port}" for rail in node.rails if rail.up),
        tier=tier,
        arena=arena,
        labels=tuple(sorted(node.labels.items())),
    )


def memory_of(segments: Sequence[common_pb2.Segment]) -> tuple[str, str]:
    """Tier and kind of a node's memory, as `NodeView` has them; of several segments those of the slowest tier."""
    if not segments:
        return BlockTier.DRAM, ""
    slowest = max(segments, key=lambda segment: segment.tier)
    return tier_of_message(slowest.tier), slowest.kind


def view_of_map(cluster_map: common_pb2.ClusterMap) -> ClusterView:
    """A cluster map as plain values."""
    return ClusterView(
        epoch=cluster_map.epoch,
        term=cluster_map.term,
        leader=cluster_map.leader,
        nodes=tuple(view_of_node(node) for node in cluster_map.nodes),
    )


def is_newer(candidate: ClusterView, known: ClusterView) -> bool:
    """Maps are ordered by (term, epoch)."""
    return (candidate.term, candidate.epoch) > (known.term, known.epoch)


def carry_over(fresh: ClusterView, carried: Sequence[NodeView]) -> ClusterView:
    """The fresh map plus the carried nodes that it does not list yet, under indices no master gives out.

    A new master starts with an empty map and learns of the nodes within a heartbeat. Forgetting them for that moment
    would turn every get into a miss and every put into NO_NODES.
    """
    listed = {node.node_id for node in fresh.nodes}
    taken = {node.index for node in fresh.nodes}
    extra: list[NodeView] = []
    index = CARRIED_INDEX
    for node in carried:
        if node.node_id in listed or node.state == MapNodeState.DEAD:
            continue
        while index in taken:
            index -= 1
        extra.append(dataclasses.replace(node, index=index))
        index -= 1
    return dataclasses.replace(fresh, nodes=(*fresh.nodes, *extra)) if extra else fresh


class MapKeeper:
    """Calls `apply` with every newer map. A failure is kept in `last_error` and never stops the loop."""

    def __init__(
        self,
        link: MasterLink,
        apply: Callable[[ClusterView], None],
        clock: Clock,
        rng: random.Random,
        wait_s: float = WAIT_S,
        pause_s: float = 0.0,
    ) -> None:
        """pause_s: between two questions, for those who need not have every map."""
        self._link = link
        self._apply = apply
        self._clock = clock
        self._backoff = Backoff(rng, first_s=0.1, cap_s=2.0)
        self._wait_s, self._pause_s = wait_s, pause_s
        self._known = ClusterView()  # as the master sent it
        self._terms = Terms()
        self._carried: tuple[NodeView, ...] = ()
        self._carry_until_s = 0.0
        self.view = ClusterView()
        self.last_error: MooncacheError | None = None

    @property
    def known(self) -> ClusterView:
        """The newest map as the master published it, without what is carried over."""
        return self._known

    async def fetch(self, timeout_s: float) -> ClusterView:
        """Get and apply the map now.

        Raises:
            MasterUnavailable: no leading master answered in time.
            Unauthenticated: the master does not accept the token.
        """
        request = master_pb2.GetClusterMapRequest()
        response = await self._link.call(
            "GetClusterMap",
            request,
            master_pb2.GetClusterMapResponse,
            timeout_s,
            attempt_s=max(0.5, timeout_s / 3),
        )
        self._take(response.map)
        return self.view

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            request = master_pb2.WatchClusterMapRequest(
                known_epoch=self._known.epoch, known_term=self._known.term, wait_ms=int(self._wait_s * 1000)
            )
            try:
                response = await self._link.call_once(
                    "WatchClusterMap", request, master_pb2.WatchClusterMapResponse, self._wait_s + _SLACK_S
                )
            except MooncacheError as error:
                self.last_error = error
                await self._clock.sleep(self._backoff.next_s())
                continue
            except asyncio.CancelledError:
                raise
            self.last_error = None
            self._expire_carried()
            if response.changed and not self._take(response.map):
                await self._clock.sleep(self._backoff.next_s())
                continue
            self._backoff.reset()
            await self._clock.sleep(
                self._pause_s
            )  # also 0: a master that answers at once must not starve the loop

    def _take(self, cluster_map: common_pb2.ClusterMap) -> bool:
        """Apply a map, unless it is not newer, or comes from a leader whose time seems to be over."""
        fresh = view_of_map(cluster_map)
        if fresh.term == self._known.term and not is_newer(fresh, self._known):
            return False
        if not self._terms.hear(fresh.term, self._clock.now_s()):
            self._refuse(fresh)
            return False
        if self._known.term and fresh.term != self._known.term:
            self._carried = self.view.nodes
            self._carry_until_s = self._clock.now_s() + CARRY_S
        self._known = fresh
        self._link.suggest(fresh.leader)
        self._publish()
        return True

    def _refuse(self, fresh: ClusterView) -> None:
        newest = self._terms.newest
        self.last_error = NotLeader(f"{fresh.leader} leads under term {fresh.term}, older than {newest}")
        if self._terms.refusals == 1:
            log.warning(
                Event.MASTER_TERM_OLDER,
                master_id=fresh.leader,
                term=fresh.term,
                newest_term=newest,
                patience_s=PATIENCE_S,
            )
        self._link.pass_over()

    def _expire_carried(self) -> None:
        if self._carried and self._clock.now_s() >= self._carry_until_s:
            self._carried = ()
            self._publish()

    def _publish(self) -> None:
        self.view = carry_over(self._known, self._carried)
        self._apply(self.view)
