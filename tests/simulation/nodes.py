"""Store nodes of a simulated cluster: real state, duties and operations over a model of the native store."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mooncache import errors
from mooncache.auth import tenant_id
from mooncache.client.keys import split_keys
from mooncache.client.master_link import MasterLink
from mooncache.errors import MooncacheError
from mooncache.proto.v1 import common_pb2, master_pb2, store_node_pb2
from mooncache.runtime.duties import Duty, DutyRunner
from mooncache.runtime.rpc import MASTER_SERVICE, STORE_NODE_SERVICE, CallContext, Handler, RpcTable
from mooncache.runtime.run_op import OpRunner
from mooncache.store_node.background import keep_membership, release_spares, report_blocks
from mooncache.store_node.core.report_planner import RECORD_BYTES, ReportPlanner
from mooncache.store_node.core.spare_copies import SpareCopies
from mooncache.store_node.identity import NodeIdentity
from mooncache.store_node.service import HANDLERS
from mooncache.store_node.state import StoreNodeState
from tests.simulation.model_store import BLOCK_BYTES, BlockName, Bytes, ModelStore
from tests.simulation.network import call_id

if TYPE_CHECKING:
    from tests.simulation.world import World

_MESSAGE_RECORDS = 8
_SPARE_IDLE_S = 6.0
_COMMANDS = ("CopyBlocks", "DropBlocks", "PinBlocks", "UnpinBlocks", "SetDraining")


class SimNode:
    """A place for a store node, and the present life of its process. Its disk outlives the process."""

    def __init__(self, world: World, node_id: str, labels: dict[str, str]) -> None:
        self.world, self.node_id, self.labels = world, node_id, labels
        self.disk: dict[BlockName, Bytes] = {}
        self.lies = False
        self.core: ModelStore
        self.state: StoreNodeState
        self.start()

    @property
    def alive(self) -> bool:
        return not self.process.dead

    def start(self) -> None:
        """A new process. What a disk kept comes back, where the node has one."""
        world = self.world
        self.process = world.begin(self.node_id)
        self.rng = random.Random(world.rng.random())
        self.process.run(self._build)
        disk, self.disk = self.disk, {}
        for name, data in disk.items():
            self.core.adopt(name, data)
        self.process.spawn(self._run())

    def _build(self) -> None:
        world, shape = self.world, self.world.shape
        clock = world.clock_of(self.process)
        self.core = ModelStore(
            shape.extents,
            shape.log_events,
            clock.now_s,
            lambda name, reason: world.ledger.copy_lost(self.node_id, name, reason, call_id()),
            shape.quotas,
        )
        channel_to = world.network.channel_for(MASTER_SERVICE, errors.MasterUnavailable)
        self.state = StoreNodeState(
            identity=NodeIdentity(
                node_id=self.node_id,
                host_id=f"host-{self.node_id}",
                incarnation=self.rng.getrandbits(62) | 1,
                software_version="0",
                started_wall_ms=int(clock.wall_s() * 1e3),
                labels=self.labels,
            ),
            core=self.core,
            endpoints=common_pb2.Endpoints(grpc_target=self.node_id, tcp_host="sim", tcp_port=1),
            segments=[common_pb2.Segment(id=0, tier=1, capacity_bytes=shape.extents * BLOCK_BYTES)],
            clock=clock,
            rng=self.rng,
            link=_NodeLink(world.masters_targets, channel_to, clock, self.rng),
            copier=_Copier(self),
            planner=ReportPlanner(_MESSAGE_RECORDS * RECORD_BYTES),
            spares=SpareCopies(_SPARE_IDLE_S),
            started_s=clock.now_s(),
            call_timeout_s=1.5,
        )
        handlers = {name: self._watched(name, handle) for name, handle in HANDLERS.items()}
        runner = OpRunner(
            RpcTable(STORE_NODE_SERVICE, self.state, handlers), clock, world.observer(self.node_id)
        )
        world.network.listen(self.node_id, self.process, runner)
        self._clock = clock

    async def _run(self) -> None:
        state = self.state
        DutyRunner(self._clock, self.world.duty_failed(self.node_id)).start(
            [
                Duty("keep_membership", lambda: keep_membership.run(state)),
                Duty("report_blocks", lambda: report_blocks.run(state)),
                Duty("release_spares", lambda: release_spares.run(state)),
            ]
        )

    def _watched(self, method: str, handle: Handler) -> Handler:
        """A command that is carried out is noted, for the invariant that leaders do not act side by side."""
        if method not in _COMMANDS:
            return handle

        async def watched(state: Any, request: Any, context: CallContext) -> Any:
            newest = self.state.terms.newest
            answer = await handle(state, request, context)
            if request.HasField("fence") and request.fence.term:
                self.world.ledger.obeyed(
                    self.node_id, self.state.identity.incarnation, request.fence, newest, method
                )
            if method in ("PinBlocks", "UnpinBlocks"):
                self._note_pins(request, answer.codes)
            return answer

        return watched

    def _note_pins(self, request: Any, codes: Iterable[int]) -> None:
        """A node has pinned blocks, or taken pins back."""
        pins = self.world.ledger.pins
        for key, code in zip(split_keys(request.keys), codes, strict=True):
            if code != errors.OK:
                continue
            if isinstance(request, store_node_pb2.NodePinBlocksRequest):
                pins.taken(self.node_id, (request.tenant_id, key), request.ttl_ms)
            else:
                pins.released(self.node_id, (request.tenant_id, key))

    def check(self) -> None:
        """Raise AssertionError when an invariant of the model is broken; look at what counts as reported."""
        self.core.check()
        planner, link = self.state.planner, self.state.link
        assert isinstance(link, _NodeLink)
        if planner.full_reports_finished > link.fulls_ended:
            self.world.ledger.counted_unheard(self.node_id, "a full report")
        if planner.acked_seq > link.acked_seq:
            self.world.ledger.counted_unheard(self.node_id, f"changes up to {planner.acked_seq}")

    def power_off(self, keeps: bool) -> None:
        """The process dies. keeps: its blocks are on a disk; a disk that lies has lost or mixed up some of them."""
        self.disk = {}
        if keeps:
            self.disk = {name: self.core.arena[held.extent] for name, held in self.core.held.items()}
            if self.lies:
                self._damage()
        self.world.end(self.process)

    def _damage(self) -> None:
        names = list(self.disk)
        for name in names:
            dice = self.rng.random()
            if dice < 0.2:
                del self.disk[name]
            elif dice < 0.4:
                self.disk[name] = self.disk.get(self.rng.choice(names))


class _NodeLink(MasterLink):
    """The node's line to the masters; it notes what they acknowledged of its reports."""

    acked_seq = fulls_ended = 0

    async def call_once(self, method: str, request: Any, response_class: Any, timeout_s: float) -> Any:
        response = await super().call_once(method, request, response_class, timeout_s)
        kinds = (master_pb2.REPORT_KIND_DELTA, master_pb2.REPORT_KIND_FULL_END)
        if method == "ReportBlocks" and request.kind in kinds and not response.need_full:
            self.acked_seq = max(self.acked_seq, request.last_seq)
            self.fulls_ended += request.kind == master_pb2.REPORT_KIND_FULL_END
        return response


class _Copier:
    """Copies over the modelled data plane, block after block."""

    def __init__(self, node: SimNode) -> None:
        self._node = node

    async def copy(
        self, tenant: str, keys: bytes, source: common_pb2.NodeInfo, timeout_s: float, bytes_per_s: int
    ) -> tuple[list[int], int]:
        node, codes, copied = self._node, [], 0
        until_s = node.state.clock.now_s() + timeout_s
        for key in split_keys(keys):
            name = tenant_id(tenant), key
            try:
                if name in node.core.held:
                    node.world.ledger.confirmed(node.node_id, name, call_id())
                    raise errors.AlreadyExists("It is here.")
                left_s = until_s - node.state.clock.now_s()
                if left_s <= 0:
                    raise errors.DeadlineExceeded("The time for the copies is over.")
                data = await node.world.read_block(
                    node.node_id, source.node_id, name, left_s, source.incarnation
                )
                if not node.core.reserve("copier", name):
                    node.world.ledger.confirmed(node.node_id, name, call_id())
                    raise errors.AlreadyExists("It is here by now.")
                node.core.write("copier", name, data)
                node.core.commit("copier", name)
                node.world.ledger.copy_made(node.node_id, name)
                node.world.ledger.confirmed(node.node_id, name, call_id())
                codes.append(errors.OK)
                copied += BLOCK_BYTES
            except MooncacheError as error:
                codes.append(error.code)
        return codes, copied

    async def reads(self, tenant: str, keys: bytes, timeout_s: float) -> list[int | None]:
        held = self._node.core.held
        return [0 if (tenant_id(tenant), key) in held else None for key in split_keys(keys)]
