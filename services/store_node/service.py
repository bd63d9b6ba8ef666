"""The store node as a process: the native server, its control calls, its duties, its end.

The native server serves bytes from its own threads; this service only talks to the master, exports metrics and ends
gracefully. Losing the master never stops the node: it serves, and registers again when it can.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncache._version import __version__
from mooncache.auth import derive_tenant_key
from mooncache.client.host import host_id
from mooncache.client.map_keeper import view_of_node
from mooncache.client.master_link import MasterLink, parse_targets
from mooncache.client.native_call import call_native
from mooncache.config import Config
from mooncache.config.pool import StoreNodeSection
from mooncache.errors import ConfigInvalid, MasterUnavailable, MooncacheError
from mooncache.proto.v1 import common_pb2
from mooncache.runtime.channel import Channel
from mooncache.runtime.duties import Duty
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.ports import UNIX_PATH_MAX
from mooncache.runtime.rpc import MASTER_SERVICE, STORE_NODE_SERVICE, Handler, RpcTable
from mooncache.runtime.service import Service
from mooncache.runtime.tls import channel_credentials
from mooncache.store_node.background import (
    keep_membership,
    relay_native_log,
    release_spares,
    report_blocks,
    tend_kept,
    tend_tenants,
)
from mooncache.store_node.copier import NativeCopier
from mooncache.store_node.core.report_planner import RECORD_BYTES, ReportPlanner
from mooncache.store_node.core.spare_copies import SpareCopies
from mooncache.store_node.keeping import HeldMemory, close_all, keeping_of, leave_with_holder
from mooncache.store_node.metrics import NodeCollector
from mooncache.store_node.ops import (
    copy_blocks,
    drop_blocks,
    get_node_status,
    get_tenants,
    pin_blocks,
    purge_tenant,
    set_draining,
    set_tenants,
    unpin_blocks,
)
from mooncache.store_node.prefault import describe, memory_left_bytes, prefault
from mooncache.store_node.state import ArenaKind, NodeIdentity, StoreNodeState
from mooncache.store_node.tenants import NodeTenants
from mooncache.store_node.write_budget import write_bytes_per_s

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
    "GetTenants": get_tenants.handle,
    "PurgeTenant": purge_tenant.handle,
    "GetNodeStatus": get_node_status.handle,
}
_TENANTS_FILE = "tenants.json"
_NODE_ID_FILE = "node.id"
_MESSAGE_RECORDS_MAX = 65_536
_COPIES_AT_ONCE = 2
_HANDSHAKE_TIMEOUT_MS = 5_000
_IDLE_TIMEOUT_MS = 300_000
_GRANT_TIMEOUT_MS = 30_000  # clients that hold reservations or pins send a PING every 5 s
_BLOCK_BYTES_MAX = 1 << 30
_INDEX_SHARDS = 64  # locked apart
_EVENTS_KEPT = 1 << 18  # more changes in one go lead to a full report
_MIN_CAPACITY_BYTES = 1 << 20
_STOP_NATIVE_S = 2.0
_GOODBYE_S = 1.0

_CALL_COUNT_MAX = 1024
_DRAIN_TIMEOUT_S = 5.0  # control calls are short


class StoreNodeService(Service):
    """The store node as a service."""

    def __init__(self, config: Config) -> None:
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
        self._keeping: HeldMemory | None = None

    @property
    def state(self) -> StoreNodeState:
        assert self._state is not None, "build has not run"
        return self._state

    async def build(self) -> RpcTable:
        """Open the native server (its data port begins to serve here) and make the state."""
        node = self.config.store_node
        identity = NodeIdentity(
            node_id=node.node_id or kept_node_id(self.config.cluster.state_dir),
            host_id=node.host_id or host_id(),
            incarnation=secrets.randbits(63) | 1,
            software_version=__version__,
            started_wall_ms=int(self.clock.wall_s() * 1000),
        )
        settings = server_settings(self.config, identity, wanted_bytes(node), self.token.key)
        self._keeping = keeping_of(self.config, identity.node_id)
        self._server = server = await self._open(settings)
        check_arena(server.arena())
        describe(server)
        if node.prefault:
            await prefault(server, self.clock, is_adopted=server.kept()["adopted"])
        call_native(server.start)
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
            tenants=self._tenants(server),
            started_s=clock.now_s(),
        )
        self.metrics.registry.register(NodeCollector(self._state, server))
        return RpcTable(STORE_NODE_SERVICE, self._state, HANDLERS, admin_only=tuple(HANDLERS))

    def _tenants(self, server: StoreServer) -> NodeTenants:
        """The tenants, with the limits that are in the file now."""
        path = self.config.store_node.tenants_file or self.config.cluster.state_dir / _TENANTS_FILE
        tenants = NodeTenants(server, path, lambda: round(self.clock.wall_s() * 1e3))
        tenants.read_file()
        return tenants

    async def _open(self, settings: dict[str, Any]) -> StoreServer:
        """The native server, with the memory that a former process left where this node keeps its own."""
        from mooncache import _native

        if self._keeping is None:
            return call_native(_native.StoreServer, settings)
        files = await asyncio.to_thread(self._keeping.take)
        try:
            server = call_native(_native.StoreServer, {**settings, "keep_memory": True, "kept_fds": files})
        finally:
            close_all(files)
        await asyncio.to_thread(leave_with_holder, server, self._keeping)
        return server

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

    def duties(self) -> Sequence[Duty]:
        state, server = self.state, self._server
        assert server is not None, "build has not run"
        keeping = self._keeping
        kept = (
            (Duty("tend_kept", lambda: tend_kept.run(server, keeping, self.clock)),)
            if keeping is not None
            else ()
        )
        tenants = state.require_tenants()
        return (
            *kept,
            Duty("tend_tenants", lambda: tend_tenants.run(tenants, self.clock)),
            Duty("keep_membership", lambda: keep_membership.run(state)),
            Duty("report_blocks", lambda: report_blocks.run(state)),
            Duty("release_spares", lambda: release_spares.run(state)),
            Duty("relay_native_log", lambda: relay_native_log.run(server, self.clock)),
        )

    def readiness(self) -> str:
        """A node is ready when its ports are open: it serves known blocks with or without a master."""
        return ""

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
            if self._state.link is not None:
                await self._state.link.close()
        if self._server is not None:
            server, self._server = self._server, None
            relay_native_log.relay(server)
            server.stop(_STOP_NATIVE_S)

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
            token=self.token.text,
            credentials=self._credentials,
            unavailable_error=MasterUnavailable,
            server_name=self.config.tls.server_name,
        )

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


def wanted_bytes(node: StoreNodeSection) -> int:
    """The capacity to ask the native server for; 0 means all of `arena_path`.

    Raises:
        ConfigInvalid: it is too small, or nothing says how large a file in a folder shall be.
    """
    if node.arena_device and (node.arena_path is not None or not node.capacity_bytes):
        raise ConfigInvalid(
            "store_node.arena_device needs store_node.capacity_bytes (how much of the GPU's memory) and no arena_path."
        )
    if node.arena_path is not None and not node.capacity_bytes:
        if node.arena_path.is_dir():
            raise ConfigInvalid(
                f"store_node.arena_path is the folder {node.arena_path}. Set store_node.capacity_bytes too."
            )
        return 0
    wanted = node.capacity_bytes or quarter_of_memory_bytes()
    if wanted < _MIN_CAPACITY_BYTES:
        raise ConfigInvalid(f"store_node.capacity_bytes must be at least 1 MiB; it is {wanted}.")
    return wanted


def check_arena(arena: dict[str, Any]) -> None:
    """Only the native server knows how large a file or a device is, rounded down to the pages of its mapping.

    Raises:
        ConfigInvalid: too small to be of use.
    """
    if arena["size_bytes"] < _MIN_CAPACITY_BYTES:
        raise ConfigInvalid(
            f"The arena {arena['description']} has {arena['size_bytes']} bytes; it must have at least 1 MiB. "
            "Make the file larger (fallocate -l 64GiB), or set store_node.capacity_bytes."
        )


def segment_of(arena: dict[str, Any]) -> common_pb2.Segment:
    """What the native server says of its arena, as it is reported to the master."""
    tier = common_pb2.TIER_HBM if arena["kind"] == ArenaKind.GPU else common_pb2.TIER_DRAM
    return common_pb2.Segment(id=0, tier=tier, capacity_bytes=arena["size_bytes"], kind=arena["kind"])


def server_settings(
    config: Config, identity: NodeIdentity, capacity_bytes: int, secret: bytes
) -> dict[str, object]:
    """The native server's configuration."""
    node = config.store_node
    settings: dict[str, Any] = {
        "node_id": identity.node_id,
        "host_id": identity.host_id,
        "secret": secret,
        "incarnation": identity.incarnation,
        "capacity_bytes": capacity_bytes,
        "tcp_host": node.data_host,
        "tcp_port": node.data_port,
        "unix_path": unix_path(config, identity.node_id),
        "io_threads": node.io_threads,
        "idle_timeout_ms": _IDLE_TIMEOUT_MS,
        "grant_timeout_ms": _GRANT_TIMEOUT_MS,
        "handshake_timeout_ms": _HANDSHAKE_TIMEOUT_MS,
        "shards": _INDEX_SHARDS,
        "huge_pages": node.huge_pages,
        "numa_node": node.numa_node,
        "max_block_bytes": _BLOCK_BYTES_MAX,
        "expected_block_bytes": node.expected_block_bytes,
        "event_log_capacity": _EVENTS_KEPT,
        **config.rdma.native(),
    }
    if node.arena_device:
        settings["arena_gpu"] = int(node.arena_device.partition(":")[2])
    if node.ssd_bytes:
        settings["ssd_paths"] = ssd_paths(config, identity.node_id)
        settings["ssd_bytes"] = node.ssd_bytes
        settings["ssd_write_bytes_per_s"] = write_bytes_per_s(node, settings["ssd_paths"])
    if node.arena_path is not None:
        settings["arena_path"] = str(node.arena_path)
    if node.eviction:
        settings["eviction"] = node.eviction
    if config.tls.enabled:
        settings["tls_cert"] = str(config.tls.cert_file or "")
        settings["tls_key"] = str(config.tls.key_file or "")
        if config.tls.require_client_cert:
            settings["tls_client_ca"] = str(config.tls.ca_file or "")
    return settings


def ssd_paths(config: Config, node_id: str) -> list[str]:
    """Where the SSD tier lies. Only the folder that is the node's own is made here: a disk that is not mounted must
    not become a folder on the disk above it.

    Raises:
        ConfigInvalid: the folder cannot be made.
    """
    if config.store_node.ssd_paths:
        return [os.path.expanduser(path) for path in config.store_node.ssd_paths]
    folder = config.cluster.state_dir / "ssd" / node_id
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigInvalid(f"{folder} cannot be made: {error.strerror}.") from None
    return [str(folder)]


def unix_path(config: Config, node_id: str) -> str:
    """Path of the data socket; empty when it is switched off.

    Raises:
        ConfigInvalid: the path is longer than the kernel allows for a socket.
    """
    node = config.store_node
    if not node.unix_enabled:
        return ""
    path = node.unix_path or config.cluster.state_dir / "run" / f"{node_id}.sock"
    if len(os.fsencode(path)) > UNIX_PATH_MAX:
        raise ConfigInvalid(
            f"The data socket's path is longer than {UNIX_PATH_MAX} bytes: {path}. "
            "Set store_node.unix_path to a shorter one, or store_node.unix_enabled to false."
        )
    return str(path)


def kept_node_id(folder: Path) -> str:
    """The node's name from the state folder, made up at the first start."""
    path = folder / _NODE_ID_FILE
    try:
        found = path.read_text(encoding="utf-8").strip()
        if found and len(found) <= 128:
            return found
        raise ConfigInvalid(f"{path} does not hold a node's name. Delete it to get a new one.")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigInvalid(f"{path} cannot be read: {error.strerror}.") from None
    name = f"node-{secrets.token_hex(4)}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(name + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigInvalid(f"{path} cannot be written: {error.strerror}.") from None
    return name


def quarter_of_memory_bytes() -> int:
    """A quarter of the memory that is left to this process now, in whole MiB."""
    return memory_left_bytes() // 4 >> 20 << 20
