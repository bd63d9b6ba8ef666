"""The store node as a process: the native server, its control calls, its duties, its end.

The native server serves bytes from its own threads; this service only talks to the master, exports metrics and ends
gracefully. Losing the master never stops the node: it serves, and registers again when it can.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mooncache.auth import derive_tenant_key
from mooncache.client.map_keeper import view_of_node
from mooncache.client.master_link import MasterLink, parse_targets
from mooncache.client.native_call import call_native
from mooncache.config import Config
from mooncache.errors import MasterUnavailable, MooncacheError, NodeUnavailable
from mooncache.proto.v1 import common_pb2, process_pb2
from mooncache.runtime.channel import Channel
from mooncache.runtime.duties import Duty
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import MASTER_SERVICE, STORE_NODE_SERVICE, Handler, RpcTable
from mooncache.runtime.service import Service
from mooncache.runtime.tls import channel_credentials
from mooncache.store_node.background import (
    follow_map,
    keep_membership,
    keep_quarantine,
    keep_writers,
    relay_native_log,
    release_spares,
    report_blocks,
    tend_kept,
    tend_tenants,
    try_peers,
)
from mooncache.store_node.copier import NativeCopier
from mooncache.store_node.core.report_planner import RECORD_BYTES, ReportPlanner
from mooncache.store_node.core.spare_copies import SpareCopies
from mooncache.store_node.host_memory import memory_left_bytes
from mooncache.store_node.metrics import NodeCollector
from mooncache.store_node.native_settings import check_arena, formats_of, segment_of, ssd_paths
from mooncache.store_node.opening import ServerOpening, tenants_file
from mooncache.store_node.ops import (
    copy_blocks,
    diagnose,
    drop_blocks,
    get_node_status,
    get_tenants,
    get_writers,
    pin_blocks,
    purge_tenant,
    recall_writers,
    set_draining,
    set_quarantine,
    set_tenants,
    unpin_blocks,
)
from mooncache.store_node.prefault import describe, describe_kept, describe_start, prefault
from mooncache.store_node.quarantine import NodeQuarantine
from mooncache.store_node.state import StoreNodeState
from mooncache.store_node.surroundings import HostSurroundings
from mooncache.store_node.tenants import NodeTenants
from mooncache.store_node.writers import NodeWriters
from mooncache.topology.core.host_facts import ArenaFacts, HostFacts
from mooncache.topology.examine import examine

if TYPE_CHECKING:
    import grpc

    from mooncache._native import Client as NativeClient
    from mooncache._native import StoreServer

HANDLERS: dict[str, Handler] = {
    "CopyBlocks": copy_blocks.handle,
    "DropBlocks": drop_blocks.handle,
    "PinBlocks": pin_blocks.handle,
    "UnpinBlocks": unpin_blocks.handle,
    "SetDraining": set_draining.handle,
    "SetTenants": set_tenants.handle,
    "SetQuarantine": set_quarantine.handle,
    "GetTenants": get_tenants.handle,
    "PurgeTenant": purge_tenant.handle,
    "GetWriters": get_writers.handle,
    "RecallWriters": recall_writers.handle,
    "GetNodeStatus": get_node_status.handle,
    "Diagnose": diagnose.handle,
}
_MESSAGE_RECORDS_MAX = 65_536
_COPIES_AT_ONCE = 2
_STOP_NATIVE_S = 2.0
_GOODBYE_S = 1.0

_CALL_COUNT_MAX = 1024
_DRAIN_TIMEOUT_S = 5.0  # control calls are short


class StoreNodeService(Service):
    """The store node as a service.

    Args:
        config: the whole configuration.
        opening: its native server, where that was begun already.
    """

    def __init__(self, config: Config, opening: ServerOpening | None = None) -> None:
        node = config.store_node
        super().__init__(
            "store_node",
            config,
            host=node.host,
            port=node.port,
            metrics_port=node.metrics_port,
            call_count_max=_CALL_COUNT_MAX,
            drain_timeout_s=_DRAIN_TIMEOUT_S,
            advertise_host=node.advertise_host,
        )
        self._server: StoreServer | None = None
        self._state: StoreNodeState | None = None
        self._credentials: grpc.ChannelCredentials | None = None
        self._opening = opening

    @property
    def state(self) -> StoreNodeState:
        assert self._state is not None, "build has not run"
        return self._state

    async def build(self) -> RpcTable:
        """Open the native server (its data port begins to serve here) and make the state."""
        node = self.config.store_node
        if self._opening is None:
            self._opening = await asyncio.to_thread(ServerOpening, self.config, self.token.key)
        opening, identity = self._opening, self._opening.identity
        imported_s = self.clock.now_s()
        self._server = server = await asyncio.to_thread(opening.take)
        if opening.keeping is not None:
            describe_kept(server.kept(), opening.why_not_kept)
        check_arena(server.arena())
        describe(server)
        if node.prefault:
            await prefault(server, self.clock, is_adopted=server.kept()["adopted"])
        call_native(server.set_secrets, [token.key for token in self.tokens.tokens])
        call_native(server.start)
        describe_start({**opening.phases_s, "imported": imported_s, "open": self.clock.now_s()})
        self._credentials = channel_credentials(self.config.tls)
        clock, rng = self.clock, random.Random(identity.incarnation)
        targets = parse_targets(self.config.cluster.master_targets)
        self._state = StoreNodeState(
            identity=identity,
            core=server,
            endpoints=self._endpoints(server),
            segments=[segment_of(server.arena())],
            clock=clock,
            rng=rng,
            link=MasterLink(targets, self._master_channel, clock, rng),
            planner=ReportPlanner(_MESSAGE_RECORDS_MAX * RECORD_BYTES),
            spares=SpareCopies(node.spare_idle_s),
            tenants=self._tenants(server, opening),
            writers=self._writers(server, identity.node_id),
            quarantine=await asyncio.to_thread(self._quarantine, server, identity.node_id),
            channel_for=self._node_channel,
            started_s=clock.now_s(),
            formats=formats_of(node),
        )
        if opening.objects is not None:
            self._state.counters = opening.objects.counters
        self.metrics.registry.register(NodeCollector(self._state, server))
        return RpcTable(STORE_NODE_SERVICE, self._state, HANDLERS, admin_only=tuple(HANDLERS))

    def _tenants(self, server: StoreServer, opening: ServerOpening) -> NodeTenants:
        """The tenants, with the limits that are in the file now."""
        tenants = NodeTenants(
            server, tenants_file(self.config), lambda: round(self.clock.wall_s() * 1e3), opening.keys
        )
        tenants.read_file()
        return tenants

    def _writers(self, server: StoreServer, node_id: str) -> NodeWriters:
        """The writers, with the names that they had before."""
        name = quote(node_id, safe="")
        writers = NodeWriters(server, self.config.cluster.state_dir / f"writers-{name}.json")
        writers.read_names()
        return writers

    def _quarantine(self, server: StoreServer, node_id: str) -> NodeQuarantine:
        """Whose blocks are refused, as the node knew it before."""
        name = quote(node_id, safe="")
        quarantine = NodeQuarantine(server, self.config.cluster.state_dir / f"quarantine-{name}.json")
        quarantine.read_file()
        return quarantine

    def binds(self) -> Sequence[tuple[str, str]]:
        """The data port, too."""
        return [*super().binds(), ("store_node.data_host", self.config.store_node.data_host)]

    async def listening(self) -> None:
        """Now the control port is known: the node can say where it is, and copy from others."""
        state = self.state
        state.endpoints.grpc_target = self.grpc_target
        own = view_of_node(
            common_pb2.NodeInfo(
                node_id=state.identity.node_id,
                host_id=state.identity.host_id,
                incarnation=state.identity.incarnation,
                endpoints=state.endpoints,
                state=common_pb2.NODE_STATE_ACTIVE,
            )
        )
        state.copier = NativeCopier(own, self._tenant_client, _COPIES_AT_ONCE)
        state.surroundings = HostSurroundings(self._describe, self._tenant_client, self._node_channel)

    def duties(self) -> Sequence[Duty]:
        state, server = self.state, self._server
        assert server is not None and self._opening is not None, "build has not run"  # noqa: PT018
        keeping = self._opening.keeping
        kept = (
            (Duty("tend_kept", lambda: tend_kept.run(server, keeping, self.clock)),)
            if keeping is not None
            else ()
        )
        tenants, writers = state.require_tenants(), state.require_writers()
        quarantine = state.require_quarantine()
        return (
            *kept,
            Duty("keep_writers", lambda: keep_writers.run(writers, self.clock)),
            Duty("keep_quarantine", lambda: keep_quarantine.run(quarantine, self.clock)),
            Duty("tend_tenants", lambda: tend_tenants.run(tenants, self.clock)),
            Duty("keep_membership", lambda: keep_membership.run(state)),
            Duty("follow_map", lambda: follow_map.run(state, server.set_cluster_map)),
            Duty("report_blocks", lambda: report_blocks.run(state)),
            Duty("try_peers", lambda: try_peers.run(state.trials, state.require_surroundings())),
            Duty("release_spares", lambda: release_spares.run(state)),
            Duty("relay_native_log", lambda: relay_native_log.run(server, self.clock)),
        )

    def readiness(self) -> str:
        """A node is ready when its ports are open: it serves known blocks with or without a master."""
        return ""

    def serving(self) -> str:
        """Work of the cluster comes from a master, to a node that takes new blocks."""
        member = self.state.membership
        if self.state.draining:
            return "draining"
        if not member.registered:
            return "not registered with a master"
        silent_s = self.clock.now_s() - member.heard_s
        return f"no master has answered for {silent_s:.0f} s" if silent_s > member.lease_s else ""

    async def drain(self) -> None:
        """Refuse new blocks and tell the master, while reads go on."""
        state = self.state
        state.set_draining(True)
        if not state.membership.registered:
            return
        with contextlib.suppress(
            MooncacheError, TimeoutError
        ):  # a goodbye; the lease tells the master anyway
            async with asyncio.timeout(_GOODBYE_S):
                await keep_membership.heartbeat(state)

    async def shutdown(self) -> None:
        if self._state is not None:
            if isinstance(self._state.copier, NativeCopier):
                self._state.copier.close()
            if isinstance(self._state.surroundings, HostSurroundings):
                self._state.surroundings.close()
            if self._state.link is not None:
                await self._state.link.close()
        if self._state is not None and self._state.writers is not None and self._server is not None:
            self._state.writers.keep_names()
        if self._server is not None:
            server, self._server = self._server, None
            relay_native_log.relay(server)
            server.stop(_STOP_NATIVE_S)
        if self._opening is not None:
            await asyncio.to_thread(self._opening.close)

    def _endpoints(self, server: StoreServer) -> common_pb2.Endpoints:
        found = server.endpoints()
        host = self.config.store_node.advertise_host or found["tcp_host"]
        return common_pb2.Endpoints(
            tcp_host=host, tcp_port=found["tcp_port"], unix_path=found["unix_path"], tls=found["tls"]
        )

    def _master_channel(self, target: str) -> Channel:
        return GrpcChannel(
            target,
            MASTER_SERVICE,
            token=self.tokens,
            credentials=self._credentials,
            unavailable_error=MasterUnavailable,
            server_name=self.config.tls.server_name,
        )

    def _node_channel(self, target: str) -> Channel:
        return GrpcChannel(
            target,
            STORE_NODE_SERVICE,
            token=self.tokens,
            credentials=self._credentials,
            unavailable_error=NodeUnavailable,
            server_name=self.config.tls.server_name,
        )

    def _describe(self) -> HostFacts:
        """This host, with the memory that the native server has."""
        assert self._server is not None, "build has not run"
        node, held = self.config.store_node, self._server.arena()
        node_id = self.state.identity.node_id
        arena = ArenaFacts(
            held["size_bytes"], held["kind"], held["page_bytes"], held["why_not_huge"], node.numa_node
        )
        return examine(
            self.config,
            arena=arena,
            ssd_paths=ssd_paths(self.config, node_id) if node.ssd_bytes else (),
            memory_left_bytes=memory_left_bytes(),
            node_id=node_id,
        )

    async def tokens_changed(self) -> None:
        """Peers may prove these from now on; copies go over to the one that signs."""
        server = self._server
        assert server is not None, "build has not run"
        call_native(server.set_secrets, [token.key for token in self.tokens.tokens])
        if isinstance(self.state.copier, NativeCopier):
            self.state.copier.set_keys(lambda tenant: derive_tenant_key(self.token.key, tenant))

    def token_uses(self) -> list[process_pb2.TokenUse]:
        """On the data port, too."""
        assert self._server is not None, "build has not run"
        return [
            process_pb2.TokenUse(
                fingerprint=token.fingerprint,
                used_age_ms=self.tokens.used_age_ms(token, proven_unix_s),
                connections=connections,
            )
            for token, (connections, proven_unix_s) in zip(
                self.tokens.tokens, self._server.secret_uses(), strict=False
            )
        ]

    def _tenant_client(self, tenant: str) -> NativeClient:
        """A native client that proves a tenant's key: the node holds the secret that all of them come from."""
        from mooncache import _native

        tls = self.config.tls
        settings: dict[str, Any] = {
            "key": derive_tenant_key(self.token.key, tenant),
            "tenant": tenant,
            "host_id": self.state.identity.host_id,
            "client_name": f"copy-{self.state.identity.node_id}",
            "lanes_per_node": 1,
        }
        if tls.enabled:
            settings |= {
                "tls": True,
                "tls_ca": str(tls.ca_file or ""),
                "tls_cert": str(tls.cert_file or ""),
                "tls_key": str(tls.key_file or ""),
                "tls_server_name": tls.server_name,
            }
        return call_native(_native.Client, settings)
