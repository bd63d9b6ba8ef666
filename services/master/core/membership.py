"""Who is in the cluster: node states out of registrations, heartbeats and the passing of time.

Nodes own the truth, so membership is derived like everything else here: a master that starts empty learns it
again from the nodes' registrations. Pure: `now_s` is passed in, transitions come back as data.

Invariants (`check`): one index per node id, dense from 0, never shared, stable while the node is known; every
change that a client must see makes `epoch` grow; epochs of a later term are greater than all epochs of an
earlier one; a DEAD node has weight 0 and keeps its index until it is forgotten.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from mooncache import errors
from mooncache.master.core.placement import Domains, NodeSpace, PlacementRules, node_weight

# Terms are at least the wall clock in milliseconds (41 bits); epochs have to fit 63 bits with them.
TERM_SHIFT = 20
_RETIRED_MAX = 16
_DRAIN_REPORTS = 2


class NodeState(enum.Enum):
    """JOINING: registered, its full report is not in yet (it serves already).

    The rest as in the cluster map.
    """

    JOINING = "joining"
    ACTIVE = "active"
    SUSPECT = "suspect"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class MembershipRules:
    """Limits of membership; times in seconds.

    The configuration has the defaults and the order of `suspect_after_s` and `dead_after_s`.
    """

    suspect_after_s: float  # silence after which a node gets no new blocks
    dead_after_s: float  # silence after which a node leaves the directory
    forget_after_s: float = 3600.0  # silence after which a dead node's index may be given to another node
    nodes_max: int = 4096  # upper bound of known nodes (indices fit 16 bits)
    refresh_interval_s: float = 1.0  # changes of free bytes and weights are published at most this often
    free_change_share: float = 0.05  # share of capacity by which free bytes must move to be worth a new map

    def __post_init__(self) -> None:
        if not self.dead_after_s <= self.forget_after_s:
            raise ValueError("need dead_after_s <= forget_after_s")
        if not 0 < self.nodes_max < 65536:
            raise ValueError("nodes_max must be in 1..65535")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a node listens. Empty string or 0: not offered."""

    grpc_target: str = ""
    tcp_host: str = ""
    tcp_port: int = 0
    unix_path: str = ""
    tls: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that a node contributes."""

    segment_id: int
    tier: int
    capacity_bytes: int
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Rail:
    """An RDMA port that a node answers on. The counters do not make a new map, health and addresses do."""

    device: str
    port: int
    address: str = ""
    link_layer: str = ""
    numa_node: int = -1
    megabits_per_s: int = 0
    mtu_bytes: int = 0
    up: bool = True
    connections: int = field(default=0, compare=False)
    grants: int = field(default=0, compare=False)
    granted_bytes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """A node's process, for people."""

    started_ms: int = 0  # milliseconds since the Unix epoch by its own clock
    host_name: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Registration:
    """What a node says of itself when it starts or meets a new master."""

    node_id: str
    incarnation: int
    host_id: str
    endpoints: Endpoints = Endpoints()
    software_version: str = ""
    protocol_minor: int = 0
    segments: tuple[Segment, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()  # sorted by name
    process: NodeProcess = NodeProcess()

    @property
    def domains(self) -> Domains:
        """What the node fails together with."""
        named = dict(self.labels)
        return Domains(named.get("zone", ""), named.get("rack", ""), self.host_id)


@dataclass(frozen=True, slots=True)
class SpaceUsage:
    """What a heartbeat says of a node's space."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    pinned_bytes: int = 0
    block_count: int = 0


@dataclass(slots=True)
class Node:
    """One known node. Owned by `Membership`; others only read it."""

    index: int
    info: Registration
    state: NodeState
    registered_s: float
    heard_s: float
    usage: SpaceUsage = SpaceUsage()
    rails: tuple[Rail, ...] = ()
    drain_wanted: bool = False
    undrain_pending: bool = False
    own_drain_reports: int = 0
    says_draining: bool = False
    arena_gone: bool = False
    complete: bool = False
    last_seq: int = 0
    weight: float = 0.0
    published_free_bytes: int = 0
    retired: deque[int] = field(default_factory=lambda: deque(maxlen=_RETIRED_MAX))

    @property
    def node_id(self) -> str:
        return self.info.node_id

    @property
    def incarnation(self) -> int:
        return self.info.incarnation

    @property
    def alive(self) -> bool:
        return self.state is not NodeState.DEAD

    @property
    def free_bytes(self) -> int:
        return max(0, self.usage.capacity_bytes - self.usage.used_bytes)


@dataclass(frozen=True, slots=True)
class Transition:
    """A node changed state. `contents_lost`: what the directory knows of it must go."""

    index: int
    node_id: str
    before: NodeState | None
    after: NodeState | None
    contents_lost: bool = False


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a node says of itself."""

    node_id: str
    incarnation: int
    usage: SpaceUsage
    last_seq: int = 0  # of its last event
    rails: tuple[Rail, ...] = ()
    draining: bool = False
    arena_gone: bool = False  # the memory of its blocks does not answer


@dataclass(slots=True)
class Membership:
    """Nodes by id and index, and the epoch of the map made from them."""

    rules: MembershipRules
    placement: PlacementRules
    term: int = 0
    epoch: int = 0
    nodes: dict[str, Node] = field(default_factory=dict)
    _by_index: dict[int, Node] = field(default_factory=dict)
    _refreshed_s: float = float("-inf")

    def reset(self, term: int) -> None:
        """Begin a term with nothing known. Epochs of the term start above every epoch of earlier terms."""
        self.term = term
        self.nodes.clear()
        self._by_index.clear()
        self._refreshed_s = float("-inf")
        self.epoch = max(self.epoch + 1, (term << TERM_SHIFT) + 1)

    def by_index(self, index: int) -> Node | None:
        """The node that holds `index`, or None."""
        return self._by_index.get(index)

    def require(self, node_id: str) -> Node:
        """A known node. Raises UnknownNode."""
        node = self.nodes.get(node_id)
        if node is None:
            raise errors.UnknownNode(f"node {node_id!r} is not known here; it must register first")
        return node

    def register(self, info: Registration, now_s: float) -> tuple[Node, list[Transition]]:
        """Take a node in, or again. Repeats of the same registration change nothing that clients see.

        A new incarnation of a known node means that its memory is gone: the transition says `contents_lost`.
        Raises StaleIncarnation for an incarnation that was replaced by one that still lives, LimitExceeded
        when the cluster is full.
        """
        node = self.nodes.get(info.node_id)
        if node is None:
            return self._add(info, now_s)
        restarted = info.incarnation != node.incarnation
        if restarted:
            self._refuse_replaced(node, info.incarnation, now_s)
        elif node.alive:
            node.heard_s = now_s
            if node.info != info:
                node.info = info
                self._bump()
            return node, self._recover(node)
        before = node.state
        if restarted:
            node.retired.append(node.incarnation)
            node.usage, node.drain_wanted, node.undrain_pending = _usage_of(info), False, False
        node.info, node.registered_s, node.heard_s = info, now_s, now_s
        node.complete, node.last_seq = False, 0
        node.own_drain_reports, node.says_draining, node.arena_gone = 0, False, False
        node.state = NodeState.DRAINING if node.drain_wanted else NodeState.JOINING
        self._changed(node, now_s)
        return node, [Transition(node.index, node.node_id, before, node.state, contents_lost=True)]

    def heartbeat(self, beat: Heartbeat, now_s: float) -> tuple[Node, list[Transition]]:
        """Note that a node lives, and what it says of itself.

        Raises UnknownNode (it must register), StaleIncarnation (it has been replaced).
        """
        node = self.fence(beat.node_id, beat.incarnation, now_s)
        node.heard_s, node.usage = now_s, beat.usage
        node.last_seq = max(node.last_seq, beat.last_seq)
        transitions = self._recover(node)
        self.note_rails(node, beat.rails)
        transitions += self.note_own_drain(node, beat.draining, now_s)
        transitions += self.note_arena(node, beat.arena_gone, now_s)
        return node, transitions

    def note_rails(self, node: Node, rails: tuple[Rail, ...]) -> None:
        """Note a node's RDMA ports; a port that came, went or changed its state makes a new map."""
        changed = rails != node.rails
        node.rails = rails
        if changed:
            self._bump()

    def fence(self, node_id: str, incarnation: int, now_s: float) -> Node:
        """The living node that this message is from.

        Raises UnknownNode when it is not known, dead, or new (it must register); StaleIncarnation when
        another incarnation has replaced it.
        """
        node = self.require(node_id)
        if incarnation != node.incarnation:
            self._refuse_replaced(node, incarnation, now_s)
        if not node.alive or incarnation != node.incarnation:
            raise errors.UnknownNode(f"incarnation {incarnation} of node {node_id!r} is not registered here")
        return node

    def set_drain(self, node_id: str, wanted: bool, now_s: float) -> list[Transition]:
        """Start or end a node's draining. Raises UnknownNode."""
        node = self.require(node_id)
        node.own_drain_reports = 0
        if node.drain_wanted == wanted:
            return []
        node.drain_wanted, node.undrain_pending = wanted, not wanted
        if not node.alive:
            return []
        before = node.state
        if before is not NodeState.SUSPECT:
            node.state = _awake_state(node)
        self._changed(node, now_s)
        return [Transition(node.index, node_id, before, node.state)]

    def note_own_drain(self, node: Node, draining: bool, now_s: float) -> list[Transition]:
        """Note what the node itself says. A drain that the node began is adopted: nodes own the truth.

        It has to say so twice, so that one heartbeat that was late does not drain a node; and not while it
        has yet to hear that its drain was called off.
        """
        node.says_draining = draining
        if not draining:
            node.undrain_pending, node.own_drain_reports = False, 0
            return []
        node.own_drain_reports += 1
        if node.drain_wanted or node.undrain_pending or node.own_drain_reports < _DRAIN_REPORTS:
            return []
        return self.set_drain(node.node_id, True, now_s)

    def note_arena(self, node: Node, gone: bool, now_s: float) -> list[Transition]:
        """Note whether the memory of the node's blocks answers. While it does not, the node takes no new blocks.

        Unlike a drain this begins and ends with what the node says, and the node is not emptied meanwhile.
        """
        if node.arena_gone == gone:
            return []
        node.arena_gone = gone
        before = node.state
        if before not in (NodeState.SUSPECT, NodeState.DEAD):
            node.state = _awake_state(node)
        if node.state is before:
            return []
        self._changed(node, now_s)
        return [Transition(node.index, node.node_id, before, node.state)]

    def set_complete(self, node: Node, complete: bool, now_s: float) -> list[Transition]:
        """Note whether the directory holds all of a node's contents; JOINING ends when it does."""
        node.complete = complete
        if not complete or node.state is not NodeState.JOINING:
            return []
        node.state = NodeState.ACTIVE
        self._changed(node, now_s)
        return [Transition(node.index, node.node_id, NodeState.JOINING, node.state)]

    def expire(self, now_s: float) -> list[Transition]:
        """Move silent nodes to SUSPECT, DEAD and out. Returns what changed."""
        changed: list[Transition] = []
        for node in list(self.nodes.values()):
            silent_s = now_s - node.heard_s
            if node.state is NodeState.DEAD:
                if silent_s >= self.rules.forget_after_s:
                    del self.nodes[node.node_id], self._by_index[node.index]
                    self._bump()
                    changed.append(Transition(node.index, node.node_id, NodeState.DEAD, None))
            elif silent_s >= self.rules.dead_after_s:
                before, node.state = node.state, NodeState.DEAD
                node.complete = False
                self._changed(node, now_s)
                changed.append(
                    Transition(node.index, node.node_id, before, NodeState.DEAD, contents_lost=True)
                )
            elif silent_s >= self.rules.suspect_after_s and node.state is not NodeState.SUSPECT:
                before, node.state = node.state, NodeState.SUSPECT
                self._changed(node, now_s)
                changed.append(Transition(node.index, node.node_id, before, NodeState.SUSPECT))
        return changed

    def refresh(self, now_s: float) -> bool:
        """Publish moved weights and free bytes when due; returns whether the epoch grew.

        Many small movements become one new map: at most one per `refresh_interval_s`, none when nothing moved
        enough.
        """
        if now_s - self._refreshed_s < self.rules.refresh_interval_s:
            return False
        moved = False
        for node in self.nodes.values():
            if not node.alive:
                continue
            threshold = self.rules.free_change_share * node.usage.capacity_bytes
            if (
                self._weight(node, now_s) != node.weight
                or abs(node.free_bytes - node.published_free_bytes) > threshold
            ):
                self._publish(node, now_s)
                moved = True
        if moved:
            self._refreshed_s = now_s
            self._bump()
        return moved

    def completeness(self) -> float:
        """The share (0..1) of living nodes whose full report has been taken in; 0.0 without nodes."""
        living = [node for node in self.nodes.values() if node.alive]
        return sum(node.complete for node in living) / len(living) if living else 0.0

    def count_by_state(self) -> dict[NodeState, int]:
        """The number of nodes in each state (all states present)."""
        counts = dict.fromkeys(NodeState, 0)
        for node in self.nodes.values():
            counts[node.state] += 1
        return counts

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert len(self.nodes) == len(self._by_index) <= self.rules.nodes_max
        for index, node in self._by_index.items():
            assert node.index == index
            assert self.nodes[node.node_id] is node
            assert node.alive or (node.weight == 0.0 and not node.complete)
            assert node.state is not NodeState.JOINING or not node.complete
            assert node.weight == 0.0 or node.state in (NodeState.JOINING, NodeState.ACTIVE)
        assert self.epoch >> TERM_SHIFT >= self.term

    def _add(self, info: Registration, now_s: float) -> tuple[Node, list[Transition]]:
        if len(self.nodes) >= self.rules.nodes_max:
            raise errors.LimitExceeded(f"the cluster already has nodes_max = {self.rules.nodes_max} nodes")
        index = next(index for index in range(len(self._by_index) + 1) if index not in self._by_index)
        node = Node(index, info, NodeState.JOINING, now_s, now_s, usage=_usage_of(info))
        self.nodes[info.node_id] = node
        self._by_index[index] = node
        self._changed(node, now_s)
        return node, [Transition(index, info.node_id, None, NodeState.JOINING)]

    def _refuse_replaced(self, node: Node, incarnation: int, now_s: float) -> None:
        # Incarnations are random, so "older" means "was here and was replaced". A registration that was on
        # its way for very long can replace the true one; then the replacement stays silent, and the true one
        # is let in again after a while.
        silent = not node.alive or now_s - node.heard_s >= self.rules.suspect_after_s
        if incarnation in node.retired and not silent:
            raise errors.StaleIncarnation(
                f"incarnation {incarnation} of node {node.node_id!r} was replaced by {node.incarnation}"
            )

    def _recover(self, node: Node) -> list[Transition]:
        if node.state is not NodeState.SUSPECT:
            return []
        node.state = _awake_state(node)
        self._changed(node, node.heard_s)
        return [Transition(node.index, node.node_id, NodeState.SUSPECT, node.state)]

    def _weight(self, node: Node, now_s: float) -> float:
        placeable = node.state in (NodeState.JOINING, NodeState.ACTIVE)
        age_s = now_s - node.registered_s
        usage = node.usage
        space = NodeSpace(placeable, usage.capacity_bytes, node.free_bytes, usage.used_bytes, age_s)
        return node_weight(space, self.placement)

    def _publish(self, node: Node, now_s: float) -> None:
        node.weight = self._weight(node, now_s)
        node.published_free_bytes = node.free_bytes

    def _changed(self, node: Node, now_s: float) -> None:
        self._publish(node, now_s)
        self._bump()

    def _bump(self) -> None:
        self.epoch += 1


def _awake_state(node: Node) -> NodeState:
    if node.drain_wanted or node.arena_gone:
        return NodeState.DRAINING
    return NodeState.ACTIVE if node.complete else NodeState.JOINING


def _usage_of(info: Registration) -> SpaceUsage:
    return SpaceUsage(capacity_bytes=sum(segment.capacity_bytes for segment in info.segments))
