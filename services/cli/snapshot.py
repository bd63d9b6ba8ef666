"""A snapshot of a running cluster: master, conductor, gateway and every service's metrics, asked at the same time.

A part that does not answer is missing from it, with the reason; a snapshot never fails because of one part.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from mooncache.cli.common import Where
from mooncache.cli.conductor_view import conductor_row
from mooncache.cli.core.samples import MetricSamples, parse
from mooncache.cli.instances import instance_row
from mooncache.cli.member_rows import WELL, member_rows, with_local_facts
from mooncache.client.conductor_link import ConductorLink
from mooncache.client.host import host_id
from mooncache.client.master_link import MasterLink
from mooncache.client.members import ClockComparison, compare_clocks
from mooncache.client.options import ClientOptions
from mooncache.client.state_dir import ClusterFile, PartView, read_cluster_file
from mooncache.cluster.http_get import http_get
from mooncache.cluster.watch import reason_of
from mooncache.conductor.core.members import MemberKind
from mooncache.config import load
from mooncache.errors import MooncacheError, NodeUnavailable
from mooncache.proto.v1 import conductor_pb2, master_pb2
from mooncache.runtime.bind import is_loopback
from mooncache.runtime.channel import Response
from mooncache.runtime.clock import SystemClock
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import STORE_NODE_SERVICE
from mooncache.runtime.tls import channel_credentials, http_client_context

GATEWAYS_MAX = 32
"""Gateways on other machines whose figures are read at one look."""


@dataclass
class ClusterSnapshot:
    """What the parts answered. `*_error` is a sentence when the part did not answer.

    members: the processes of the whole cluster, None when no conductor has listed them; members_error: why not.
    pool_reason: why the conductor knows nothing new of masters and nodes. `*_clock`: our clock minus theirs.
    """

    taken_s: float
    status: master_pb2.GetStatusResponse | None = None
    master_error: MooncacheError | None = None
    instances: list[dict[str, object]] | None = None
    conductor: dict[str, object] | None = None
    conductor_error: str = ""
    metrics: dict[str, MetricSamples] = field(default_factory=dict)
    gateway_reason: str | None = None
    members: list[dict[str, Any]] | None = None
    members_error: str = ""
    pool_reason: str = ""
    conductor_clock: ClockComparison | None = None
    master_clock: ClockComparison | None = None
    parts: tuple[PartView, ...] = ()


def part_problems(parts: Iterable[PartView]) -> list[str]:
    """What the supervisor of this machine had to do, a sentence for each part that is not as it was started."""
    found = []
    for part in parts:
        if part.reason:
            found.append(f"{part.name}: {part.reason}")
        elif part.restarts:
            times = "once" if part.restarts == 1 else f"{part.restarts} times"
            found.append(f"{part.name} was started again {times}; it last ended with {part.last_end}")
    return found


class ClusterPoller:
    """Takes snapshots over the same connections, inside one event loop. `close` it."""

    def __init__(self, where: Where) -> None:
        self._timeout_s = min(where.timeout_s, 10.0)
        options = ClientOptions.gather(**where.settings())
        self._link = MasterLink(options.targets, options.master_channel, SystemClock(), random.Random())
        self._token, self._tls = options.token, options.tls
        self.config = config = load(overrides={"cluster.state_dir": where.state_dir})
        self._folder = None if where.master else config.cluster.state_dir
        self.host_id = config.client.host_id or host_id()
        self.cluster = self._read()
        self.conductor_target = where.conductor_target()
        self._conductor = where.conductor_channel() if self.conductor_target else None

    @property
    def conductor_channel(self) -> ConductorLink | None:
        """The line to the conductor; None where none is configured."""
        return self._conductor

    def node_channel(self, target: str) -> GrpcChannel:
        """A line to the control port of a node. Close it."""
        return GrpcChannel(
            target,
            STORE_NODE_SERVICE,
            token=self._token,
            credentials=channel_credentials(self._tls),
            unavailable_error=NodeUnavailable,
            server_name=self._tls.server_name,
        )

    @property
    def gateway_url(self) -> str:
        """http://host:port of the gateway on this machine; empty when there is none."""
        return self.cluster.gateway_url if self.cluster is not None else ""

    def _read(self) -> ClusterFile | None:
        return read_cluster_file(self._folder) if self._folder is not None else None

    async def close(self) -> None:
        """Close every connection."""
        await self._link.close()
        if self._conductor is not None:
            await self._conductor.close()

    async def poll(self, *, with_metrics: bool = True, with_latencies: bool = False) -> ClusterSnapshot:
        """Ask all parts at once. with_latencies: also for what nodes found of the ways to each other."""
        self.cluster = self._read()  # process ids and restarts change while `top` runs
        found = ClusterSnapshot(
            time.monotonic(), parts=self.cluster.parts if self.cluster is not None else ()
        )
        known = dict(self.cluster.metrics) if self.cluster is not None else {}
        addresses = known if with_metrics else {}
        await self._members(found)
        remote = self._gateways_elsewhere(found) if with_metrics else []
        await asyncio.gather(
            *(self._gateway_metrics(found, url) for url in remote),
            self._master(found, with_latencies=with_latencies),
            self._instances(found),
            self._conductor_status(found),
            self._gateway(found, known.get("gateway", "")),
            *(self._metrics(found, name, address) for name, address in addresses.items()),
        )
        return found

    async def ask_master(self, method: str, request: Message, response_class: type[Response]) -> Response:
        """One call to the leading master. Raises MooncacheError."""
        return await self._link.call(
            method, request, response_class, self._timeout_s, attempt_s=min(2.0, self._timeout_s)
        )

    async def _master(self, found: ClusterSnapshot, *, with_latencies: bool) -> None:
        began_s, wall_s = time.monotonic(), time.time()
        try:
            found.status = await self.ask_master(
                "GetStatus",
                master_pb2.GetStatusRequest(with_latencies=with_latencies),
                master_pb2.GetStatusResponse,
            )
            if found.status.wall_ms:
                found.master_clock = compare_clocks(found.status.wall_ms, wall_s, time.monotonic() - began_s)
        except MooncacheError as error:
            found.master_error = error

    async def _instances(self, found: ClusterSnapshot) -> None:
        if self._conductor is None:
            return
        request = conductor_pb2.ListInstancesRequest()
        try:
            answer = await self._conductor.call(
                "ListInstances", request, conductor_pb2.ListInstancesResponse, min(2.0, self._timeout_s)
            )
        except MooncacheError as error:
            found.conductor_error = error.message
            return
        found.instances = [instance_row(view) for view in answer.instances]

    async def _members(self, found: ClusterSnapshot) -> None:
        if self._conductor is None:
            found.members_error = "no conductor is known here"
            return
        began_s, wall_s = time.monotonic(), time.time()
        try:
            answer = await self._conductor.call(
                "ListMembers",
                conductor_pb2.ListMembersRequest(),
                conductor_pb2.ListMembersResponse,
                min(2.0, self._timeout_s),
            )
        except MooncacheError as error:
            found.members_error = error.message
            return
        found.conductor_clock = compare_clocks(answer.wall_ms, wall_s, time.monotonic() - began_s)
        found.members = with_local_facts(member_rows(answer), self.cluster, self.host_id)
        found.pool_reason = answer.pool_reason

    def _gateways_elsewhere(self, found: ClusterSnapshot) -> list[str]:
        """URLs of gateways whose figures the state folder of this machine does not name; at most so many."""
        rows = [row for row in found.members or () if row["kind"] == MemberKind.GATEWAY]
        urls = [row["address"] for row in rows if row["state"] in WELL and row["address"] != self.gateway_url]
        return urls[:GATEWAYS_MAX]

    async def _gateway_metrics(self, found: ClusterSnapshot, url: str) -> None:
        scheme, _, address = url.partition("://")
        if scheme != "https" and not (
            is_loopback(address.rpartition(":")[0].strip("[]")) or self.config.tls.insecure
        ):
            return  # the token is not shown to a network without TLS
        context = http_client_context(self._tls) if scheme == "https" else None
        status, body = await http_get(
            address, "/metrics", token=self._token, timeout_s=min(2.0, self._timeout_s), tls=context
        )
        if status == 200:
            found.metrics[url] = parse(body.decode("utf-8", "replace"))

    async def _conductor_status(self, found: ClusterSnapshot) -> None:
        if self._conductor is None:
            return
        request = conductor_pb2.GetConductorStatusRequest()
        # A conductor of an earlier version has no such call; its instances say what is wrong with it.
        with contextlib.suppress(MooncacheError):
            answer = await self._conductor.call(
                "GetConductorStatus",
                request,
                conductor_pb2.GetConductorStatusResponse,
                min(2.0, self._timeout_s),
            )
            found.conductor = conductor_row(answer)

    async def _gateway(self, found: ClusterSnapshot, address: str) -> None:
        if not address:
            return
        status, body = await http_get(
            address, "/ready", token=self._token, timeout_s=min(2.0, self._timeout_s)
        )
        if status == 200:
            found.gateway_reason = ""
        else:
            found.gateway_reason = reason_of(body) or "does not answer"

    async def _metrics(self, found: ClusterSnapshot, name: str, address: str) -> None:
        status, body = await http_get(
            address, "/metrics", token=self._token, timeout_s=min(2.0, self._timeout_s)
        )
        if status == 200:
            found.metrics[name] = parse(body.decode("utf-8", "replace"))
