"""Everything one master knows, and the few moves that touch several parts of it at once.

Ops and background duties work on this object; it does no I/O itself. All of it except the configuration is derived and
belongs to one term: `begin_term` starts with nothing known and the nodes report again.

Invariant: what the membership says is gone is gone from the directory, from the reports and from the tasks too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from mooncache import errors
from mooncache.auth import tenant_id
from mooncache.coordination import MasterRecord
from mooncache.kvcache.block_index import BlockIndex, native_index
from mooncache.master import messages
from mooncache.master.core.accusations import Accusations
from mooncache.master.core.directory import Directory
from mooncache.master.core.membership import Membership, Node, NodeState, Transition
from mooncache.master.core.peer_latency import PeerLatencies
from mooncache.master.core.placement import Candidate, Domains
from mooncache.master.core.rebalance import RebalanceBook
from mooncache.master.core.rebalance_types import NodeFill
from mooncache.master.core.repair import RepairBook
from mooncache.master.core.repair_types import AuditAsk, AuditPage, RepairState, Targets
from mooncache.master.core.reports import NodeReports, ReportCounters
from mooncache.master.core.tasks import TaskBook
from mooncache.master.core.usage import TenantLedger
from mooncache.master.limits import MasterLimits
from mooncache.master.shell.instruments import MasterMetrics
from mooncache.master.shell.node_calls import NodeCalls
from mooncache.proto.v1 import common_pb2
from mooncache.runtime.clock import Clock
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.metrics import Metrics
from mooncache.runtime.quarantine import QuarantineTable
from mooncache.runtime.tasks import wait_for_event
from mooncache.runtime.tenant_limits import TenantTable

log = get_logger(__name__)


class MasterState:
    """The state of one master, shared by its ops and duties. `make_index` gives an empty block index for each term."""

    def __init__(
        self,
        limits: MasterLimits,
        *,
        master_id: str,
        grpc_target: str,
        clock: Clock,
        nodes: NodeCalls,
        metrics: Metrics,
        make_index: Callable[[], BlockIndex] = native_index,
    ) -> None:
        self.limits = limits
        self.master_id = master_id
        self.grpc_target = grpc_target
        self.clock = clock
        self.nodes = nodes
        self.instruments = MasterMetrics(metrics)
        self.started_s = clock.now_s()
        self.leading = False
        self.leader_target = ""
        self.leader_id = ""
        self.masters: tuple[MasterRecord, ...] = ()
        self.record: MasterRecord | None = None  # what this master published of itself
        self.conductor_term = 0  # the newest that ordered anything
        self.watchers = 0
        self.trimming = asyncio.Lock()
        self.membership = Membership(limits.membership, limits.placement)
        self.ledger = TenantLedger(tenant_id, limits.tenant_quotas_bytes)
        self.tenants = TenantTable()  # the newest that is known; nodes keep it
        self.quarantine = QuarantineTable()  # joined from the nodes', who keep it
        self.accusations = Accusations(limits.quarantine_alone_max)
        self._targets_of: TenantTable | None = None  # the table that the next line was made from
        self._targets = Targets()
        self._make_index = make_index
        self._map: common_pb2.ClusterMap | None = None
        self._map_changed = asyncio.Event()
        self._map_epoch = 0
        self._clear(0)

    # --- leadership --------------------------------------------------------------------------------------

    def begin_term(self, term: int) -> None:
        """Lead from now on, with nothing known: every node has to register and report again."""
        self._clear(term)
        self.leading = True
        self.leader_id, self.leader_target = self.master_id, self.grpc_target
        self.announce()

    def end_term(self) -> None:
        """Lead no more. What was known is dropped: the next leader will know better."""
        self.leading = False
        if self.leader_id == self.master_id:
            self.leader_id = self.leader_target = ""
        self._clear(self.membership.term)
        self.announce()

    def follow(self, leader_id: str, leader_target: str) -> None:
        """Note who leads, so that callers can be redirected."""
        if not self.leading:
            self.leader_id, self.leader_target = leader_id, leader_target

    def require_leading(self) -> None:
        """Raise NotLeader, naming the leader when it is known."""
        if not self.leading:
            where = f"leader={self.leader_target}" if self.leader_target else "no leader is known yet"
            raise errors.NotLeader(f"master {self.master_id!r} is a standby; {where}")

    def obey_conductor(self, term: int) -> None:
        """An order of a conductor, 0 when none gives it. Raises ConductorSuperseded: a newer one has followed it."""
        if term and term < self.conductor_term:
            raise errors.ConductorSuperseded(
                f"The order is of a conductor of term {term}; one of term {self.conductor_term} leads now."
            )
        self.conductor_term = max(self.conductor_term, term)

    # --- nodes -------------------------------------------------------------------------------------------

    def reports_of(self, node: Node) -> NodeReports:
        """The report logic of the node's incarnation."""
        known = self._reports.get(node.index)
        if known is None or known[0] != (node.node_id, node.incarnation):
            reports = NodeReports(node.index, self.directory, self.limits.reports, self.report_counters)
            self._reports[node.index] = known = ((node.node_id, node.incarnation), reports)
        return known[1]

    def wants_full_report(self, node: Node) -> bool:
        """Whether the node should be asked for all its blocks now."""
        reports = self.reports_of(node)
        return reports.want_full or (self.directory.wanted(node.index) and not reports.full_under_way)

    def next_peer(self, node_id: str, now_s: float) -> str:
        """Whom a node is to try now; "": no try is due."""
        members = self.membership
        if self.latencies.epoch != members.epoch:
            living = sorted(
                (node for node in members.nodes.values() if node.alive), key=lambda node: node.index
            )
            self.latencies.follow(members.epoch, [node.node_id for node in living])
        return self.latencies.next_peer(node_id, now_s)

    def after_report(self, node: Node, now_s: float) -> None:
        """Bring membership and tasks up to date after a report was taken in."""
        reports = self.reports_of(node)
        if reports.complete != node.complete:
            self.apply(self.membership.set_complete(node, reports.complete, now_s))
        if reports.complete:
            contents = self.directory.heard(node.index)
            if contents is not None:
                self.tasks.on_contents(node.index, contents, self)

    def expire_reports(self, now_s: float) -> None:
        """Give up full reports that stopped coming; their nodes will be asked again."""
        for _, reports in self._reports.values():
            reports.tick(now_s)

    def apply(self, transitions: Sequence[Transition]) -> None:
        """Carry a membership change over to everything that depends on it."""
        now_s = self.clock.now_s()
        for change in transitions:
            log.info(
                Event.NODE_STATE_CHANGED,
                node_id=change.node_id,
                before=change.before.value if change.before else "",
                after=change.after.value if change.after else "forgotten",
            )
            if change.contents_lost:
                self.directory.drop_holder(change.index)
                self.directory.stop_listening(change.index)
                if change.index in self._reports:
                    self._reports[change.index][1].lose()
                self.tasks.on_node_gone(change.index, now_s)
            self._tell_repair(change, now_s)
            self._tell_rebalance(change, now_s)
            if change.after is NodeState.DEAD:
                self.instruments.node_deaths.inc()
            if change.after is None:
                self._reports.pop(change.index, None)
        self.announce()

    def _tell_repair(self, change: Transition, now_s: float) -> None:
        if change.contents_lost or change.after is NodeState.JOINING:
            self.repair.on_lost(change.index, now_s)
        elif change.after is NodeState.ACTIVE:
            self.repair.on_back(change.index)
        elif change.after is NodeState.DRAINING:
            self.repair.on_leaving()

    def _tell_rebalance(self, change: Transition, now_s: float) -> None:
        if change.contents_lost:
            self.rebalance.on_lost(change.index, now_s)
        elif change.after is NodeState.ACTIVE and change.before is not NodeState.SUSPECT:
            self.rebalance.on_changed(change.index, now_s)

    def completeness(self) -> float:
        """The share of living nodes whose full report has been taken in."""
        return self.membership.completeness()

    # --- the map -----------------------------------------------------------------------------------------

    def announce(self) -> None:
        """Wake the watchers when the map has a new epoch."""
        if self.membership.epoch != self._map_epoch:
            self._map_epoch = self.membership.epoch
            self._map = None
            self._map_changed.set()
            self._map_changed = asyncio.Event()

    def cluster_map(self) -> common_pb2.ClusterMap:
        """The current map (made once for each epoch; do not change it)."""
        if self._map is None or self._map.epoch != self.membership.epoch:
            members = self.membership
            self._map = messages.cluster_map(
                members.nodes.values(), members.term, members.epoch, self.leader_target
            )
        return self._map

    async def map_changed(self, timeout_s: float) -> None:
        """Wait for the next epoch, `timeout_s` at most."""
        await wait_for_event(self._map_changed, timeout_s)

    # --- what planning asks (core.task_types.World) ------------------------------------------------------

    def holders(self, tenant: int, keys: Sequence[bytes]) -> list[list[int]]:
        """For each key the indices of nodes that hold it."""
        return self.directory.holders(tenant, keys)

    def readable(self, index: int) -> bool:
        """Whether a node can be copied from."""
        node = self.membership.by_index(index)
        return node is not None and node.alive and not node.arena_gone

    def lasting(self, index: int) -> bool:
        """Whether a copy on this node counts."""
        node = self.membership.by_index(index)
        return node is not None and node.alive and not node.drain_wanted and not node.arena_gone

    def draining(self, index: int) -> bool:
        """Whether the node itself says that it takes no new blocks."""
        node = self.membership.by_index(index)
        return node is not None and node.drain_wanted and node.says_draining

    def candidates(self) -> list[Candidate]:
        """Nodes that may receive blocks."""
        nodes = self.membership.nodes.values()
        return [
            Candidate(
                node.node_id,
                node.info.host_id,
                node.weight,
                node.index,
                _of_host_memory(node),
                node.info.domains,
                node.usage.capacity_bytes,
                node.free_bytes,
            )
            for node in nodes
            if node.weight > 0.0
        ]

    def sites(self) -> dict[int, Domains]:
        """Every known node and where it is."""
        return {node.index: node.info.domains for node in self.membership.nodes.values()}

    # --- what the repair asks beside that (core.repair_types.RepairView) ----------------------------------

    def targets(self) -> Targets:
        """How many copies blocks should have, by tenant."""
        if self._targets_of is not self.tenants:
            own = {name: limits.replicas for name, limits in self.tenants.tenants.items() if limits.replicas}
            for name in own:
                self.ledger.learn(tenant_id(name), name)
            numbers = {tenant_id(name): count for name, count in own.items()}
            self._targets_of, self._targets = self.tenants, Targets(self.limits.repair.replicas, numbers)
        return self._targets

    def may_copy(self, tenant: int) -> bool:
        """Whether copies can be ordered for a tenant: nodes need its name."""
        return tenant in self.ledger.names

    def audit(self, ask: AuditAsk, start: int, entries_max: int, found_max: int) -> AuditPage:
        """Look at a part of the directory for copies that are missing or too close."""
        return self.directory.audit(ask, start, entries_max, found_max)

    # --- what the rebalance asks beside that (core.rebalance_types.RebalanceView) ---------------------------

    def fills(self) -> dict[int, NodeFill]:
        """The nodes between which blocks may move: alive, not draining, of host memory."""
        return {
            node.index: NodeFill(
                node.usage.capacity_bytes, node.usage.used_bytes, node.weight > 0.0, node.info.domains
            )
            for node in self.membership.nodes.values()
            if self.lasting(node.index)
            and node.complete
            and node.usage.capacity_bytes
            and _of_host_memory(node)
        }

    def may_move(self, tenant: int) -> bool:
        """Whether a tenant's blocks may move to other nodes: copies can be ordered, and have no age to keep."""
        limits = self.tenants.tenants.get(self.ledger.names.get(tenant, ""))
        return self.may_copy(tenant) and not (limits and limits.ttl_ms)

    def calm(self) -> bool:
        """Whether neither a repair nor a task is under way. Blocks that are short for a moment, as new ones are, are no
        repair."""
        shown = self.repair.figures(self.clock.now_s())
        repairing = shown.state is RepairState.WAITING or shown.steps_in_flight > 0
        return not self.tasks.active_count and not repairing

    def next_change_ms(self, writer_id: int) -> int:
        """When a change of a writer's entry in the quarantine is said to be: now, and behind the one before."""
        known = self.quarantine.entries.get(writer_id)
        return max(round(self.clock.wall_s() * 1e3), known.changed_wall_ms + 1 if known else 1)

    # --- housekeeping ------------------------------------------------------------------------------------

    def learn_tenants(self, names: Mapping[int, str]) -> None:
        """Remember tenant names that a node tells; names that cannot be are ignored."""
        for number, name in names.items():
            if number in self.ledger.names:
                continue
            try:
                self.ledger.learn(number, name)
            except errors.InvalidArgument:
                continue

    def index_stat(self, name: str) -> float:
        """One of the index's own counters, 0 when it has no such counter."""
        return float(self.directory.stats().get(name, 0))

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        self.membership.check()
        self.tasks.check()
        self.repair.check()
        self.rebalance.check()
        for index, ((node_id, _), reports) in self._reports.items():
            node = self.membership.by_index(index)
            assert node is not None, "reports of a node that was forgotten"
            if node.node_id == node_id and node.alive:
                assert node.complete == reports.complete, "membership and reports disagree on completeness"

    def _clear(self, term: int) -> None:
        self.membership.reset(term)
        self.directory = Directory(self._make_index())
        self.latencies = PeerLatencies()
        self.report_counters = ReportCounters()
        self.tasks = TaskBook(self.limits.tasks, f"t{term}")
        self.repair = RepairBook(self.limits.repair, self.clock.now_s())
        self.rebalance = RebalanceBook(self.limits.rebalance, self.clock.now_s())
        self._reports: dict[int, tuple[tuple[str, int], NodeReports]] = {}


def _of_host_memory(node: Node) -> bool:
    return all(segment.tier != common_pb2.TIER_HBM for segment in node.info.segments)
