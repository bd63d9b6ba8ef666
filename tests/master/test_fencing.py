"""A leader whose time is over: what it still sends is carried out by nobody."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import mooncache
from mooncache import errors
from mooncache.auth import DEFAULT_TENANT, create_cluster_token, load_cluster_token, tenant_id
from mooncache.config import load
from mooncache.master.core.placement import rank_nodes
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import STORE_NODE_SERVICE, methods_of
from mooncache.store_node.service import StoreNodeService
from mooncache.testing import virtual_time
from tests.conditions import until
from tests.master.processes import ETCD, channel_to, etcd, eventually, master
from tests.master.simulation.world import CLUSTER, KNOWN_KEYS, SimNode, World
from tests.ports import own_port
from tests.processes import freeze
from tests.rpcs import answer_of

KEYS = sorted(KNOWN_KEYS)[:10]
WAIT_S = 120.0


def test_a_stale_leader_cannot_finish_its_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is away while copies are confirmed. Another master leads by then and drops what the old one meant to keep."""
    real = SimNode._copy_blocks
    worlds: list[World] = []

    async def away(self: SimNode, state: object, request: Any, context: object) -> object:
        answer = await real(self, state, request, context)
        if worlds:
            world = worlds.pop()
            kept = [rank_nodes(key, world.master.state.candidates())[0].node_id for key in KEYS]
            await (
                world.master.duties.stop()
            )  # a process that is stopped does not notice that nodes are silent
            world.start_master()
            await world.converge()
            for key, node_id in zip(KEYS, kept, strict=True):  # the new leader decides by a view of its own
                world.nodes[node_id].drop(key)
        return answer

    monkeypatch.setattr(SimNode, "_copy_blocks", away)

    async def scenario() -> None:
        world = World(5)
        for number in range(2):
            node = world.add_node(f"node-{number}")
            for key in KEYS:
                node.put(key)
        await world.converge()
        stale = world.master
        worlds.append(world)
        channel = world.network.channel("operator", stale.name, token=CLUSTER.text)
        done = await channel.call(
            "TrimBlocks",
            master_pb2.TrimBlocksRequest(keys=b"".join(KEYS), replica_count=1),
            master_pb2.TrimBlocksResponse,
            50.0,
        )
        assert stale.state.leading, "it does not know yet"
        assert done.dropped_count == 0
        assert set(done.codes) == {errors.NotLeader.code}
        await world.converge()
        assert {key for _, key in world.truth()} == set(KEYS)
        await stale.kill()
        await world.stop()

    virtual_time.run(scenario(), seed=1)


def test_a_stale_leader_cannot_finish_its_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is away while blocks are copied off the node. Those copies go under the next leader: the node has the last."""
    real = SimNode._copy_blocks
    worlds: list[World] = []

    async def away(self: SimNode, state: object, request: Any, context: object) -> object:
        answer = await real(self, state, request, context)
        if worlds:
            world = worlds.pop()
            await world.master.duties.stop()
            world.start_master()
            await world.converge()
            for key in KEYS:
                self.drop(key)
        return answer

    monkeypatch.setattr(SimNode, "_copy_blocks", away)

    async def scenario() -> None:
        world = World(7)
        full, empty = world.add_node("node-0"), world.add_node("node-1")
        for key in KEYS:
            full.put(key)
        await world.converge()
        stale = world.master
        channel = world.network.channel("operator", stale.name, token=CLUSTER.text)
        worlds.append(world)
        await channel.call(
            "DrainNode",
            master_pb2.DrainNodeRequest(node_id="node-0", move_blocks=True),
            master_pb2.DrainNodeResponse,
            50.0,
        )
        async with asyncio.timeout(60):
            while "DropBlocksRequest" not in full.refused:
                assert stale.state.leading, "it does not know yet"
                await stale.tasks.run_once()  # what its duty would do now that it goes on
                await world.clock.sleep(0.2)
        assert not empty.held and set(full.held) == set(KEYS)
        await world.converge()
        await stale.kill()
        await world.stop()

    virtual_time.run(scenario(), seed=1)


READ_ONLY = {"Diagnose", "GetNodeStatus", "GetTenants", "GetWriters"}


async def test_every_command_of_an_older_term_is_refused(tmp_path: Path) -> None:
    """Whatever a master may ask of a node, by the service's own list, so that a new command cannot be forgotten."""
    create_cluster_token(tmp_path / "cluster.token")
    token = load_cluster_token(tmp_path / "cluster.token").text
    async with master(tmp_path, port := own_port()):
        targets = [f"127.0.0.1:{port}"]
        async with node(tmp_path, 0, targets) as (service, catcher):
            catcher.released.set()  # it holds nothing back here
            await until(lambda: service.state.membership.registered, "the node has a master")
            await asyncio.to_thread(put_once, targets, tmp_path)
            control = GrpcChannel(service.grpc_target, STORE_NODE_SERVICE, token=token)
            newest = service.state.terms.newest
            assert newest > 1 and blocks(service) == 1
            commands = {name: m.request_class for name, m in methods_of(STORE_NODE_SERVICE).items()}
            fenced = {name for name, kind in commands.items() if "fence" in kind.DESCRIPTOR.fields_by_name}
            assert set(commands) - fenced == READ_ONLY, "a command without a fence is carried out for anybody"
            for name in sorted(fenced):
                for term in (newest - 1, 0):
                    with pytest.raises(errors.NotLeader):
                        await control.call(
                            name,
                            command(commands[name], service, term),
                            answer_of(STORE_NODE_SERVICE, name),
                            5.0,
                        )
            assert blocks(service) == 1 and not service.state.draining
            assert service.state.core.stats()["store_pinned_bytes"] == 0
            for name in sorted(fenced - {"CopyBlocks"}):  # a second node would be needed to copy from
                await control.call(
                    name, command(commands[name], service, newest), answer_of(STORE_NODE_SERVICE, name), 5.0
                )
            assert blocks(service) == 0 and service.state.draining, (
                "under the present term they are carried out"
            )
            await control.close()


def command(kind: Any, service: StoreNodeService, term: int) -> Any:
    """A request that makes sense: fields that a kind does not have are left out."""
    values = {
        "tenant_id": tenant_id(DEFAULT_TENANT),
        "tenant": DEFAULT_TENANT,
        "writer_ids": [1],
        "keys": KEYS[0],
        "ttl_ms": 60_000,
        "draining": True,
    }
    request = kind(
        **{name: value for name, value in values.items() if name in kind.DESCRIPTOR.fields_by_name}
    )
    request.fence.term, request.fence.incarnation = term, service.state.identity.incarnation
    return request


def put_once(targets: list[str], folder: Path) -> None:
    with mooncache.connect(",".join(targets), state_dir=str(folder)) as client:
        client.put(KEYS[0], b"x" * 4096)


def test_a_stale_leader_hears_from_nodes_that_another_one_leads() -> None:
    async def scenario() -> None:
        world = World(6)
        world.add_node("node-0")
        await world.converge()
        request = master_pb2.HeartbeatRequest(
            node_id="node-0", incarnation=world.nodes["node-0"].incarnation, master_term=world.term + 1
        )
        with pytest.raises(errors.NotLeader, match="has registered under term"):
            await world.call("Heartbeat", request)
        await world.stop()

    virtual_time.run(scenario(), seed=1)


class Catcher:
    """Passes bytes on to a node's control port, and holds back a DropBlocks and all that follows it."""

    def __init__(self, host: str, target_port: int) -> None:
        self._host, self._port = host, target_port
        self.caught, self.released = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connection, self._host, self._port)

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        for source, sink, hold in ((reader, back, True), (there, writer, False)):
            task = asyncio.create_task(self._pass(source, sink, hold=hold))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, hold: bool) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(1 << 16):
                if hold and b"DropBlocks" in data:
                    self.caught.set()
                    await self.released.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def node(
    folder: Path, number: int, targets: list[str]
) -> AsyncIterator[tuple[StoreNodeService, Catcher]]:
    """A store node whose control port masters reach through a catcher."""
    host = f"127.0.0.{10 + number}"
    config = load(
        env={},
        overrides={
            "cluster.state_dir": str(folder),
            "cluster.master_targets": tuple(targets),
            "store_node.node_id": f"node-{number}",
            "store_node.advertise_host": host,
            "store_node.unix_path": str(folder / f"{number}.sock"),
            "store_node.capacity_bytes": 16 << 20,
            "metrics.enabled": False,
        },
    )
    service = StoreNodeService(config)
    await service.start()
    catcher = Catcher(host, int(service.grpc_target.rpartition(":")[2]))
    await catcher.start()
    try:
        yield service, catcher
    finally:
        catcher.stop()
        await service.stop()


def blocks(service: StoreNodeService) -> int:
    return int(service.state.core.stats()["store_blocks"])


async def leads(channel: GrpcChannel, nodes: int) -> master_pb2.GetStatusResponse:
    """Wait until the master leads and as many nodes have reported in full."""

    async def probe() -> master_pb2.GetStatusResponse | None:
        status = await channel.call(
            "GetStatus", master_pb2.GetStatusRequest(), master_pb2.GetStatusResponse, 2.0
        )
        whole = status.directory_complete and len(status.nodes) == nodes
        return status if status.leading and whole else None

    return await eventually(probe)


def put_twice(targets: list[str], folder: Path) -> None:
    with mooncache.connect(",".join(targets), state_dir=str(folder)) as client:
        client.put(KEYS[0], b"x" * 4096, replicas=2)


@pytest.mark.etcd
@pytest.mark.skipif(ETCD is None, reason="no etcd here; install the Debian package etcd-server")
async def test_what_a_stopped_leader_had_sent_is_refused_when_it_arrives(tmp_path: Path) -> None:
    create_cluster_token(tmp_path / "cluster.token")
    token = load_cluster_token(tmp_path / "cluster.token").text
    targets = [f"127.0.0.1:{own_port()}" for _ in range(2)]
    async with etcd(tmp_path) as address, contextlib.AsyncExitStack() as stack:
        settings = {
            "MOONCACHE_COORDINATION_BACKEND": "etcd",
            "MOONCACHE_COORDINATION_ETCD_ENDPOINTS": address,
            "MOONCACHE_COORDINATION_LEASE_S": "2",
        }

        def start(number: int) -> Any:
            port = int(targets[number].rpartition(":")[2])
            return stack.enter_async_context(
                master(tmp_path, port, MOONCACHE_MASTER_MASTER_ID=f"m{number}", **settings)
            )

        old, new = [await stack.enter_async_context(channel_to(target, token)) for target in targets]
        first = await start(0)
        nodes = [await stack.enter_async_context(node(tmp_path, number, targets)) for number in range(2)]
        before = await leads(old, 2)
        await start(1)
        await asyncio.to_thread(put_twice, targets, tmp_path)
        await until(lambda: [blocks(service) for service, _ in nodes] == [1, 1], "a copy on each node")

        async def both_known() -> bool | None:
            status = await old.call(
                "GetStatus", master_pb2.GetStatusRequest(), master_pb2.GetStatusResponse, 2.0
            )
            return [node.directory_block_count for node in status.nodes] == [1, 1] or None

        await eventually(both_known)
        request = master_pb2.TrimBlocksRequest(keys=KEYS[0], replica_count=1)
        trim = asyncio.create_task(old.call("TrimBlocks", request, master_pb2.TrimBlocksResponse, 60.0))
        await until(
            lambda: trim.done() or any(catcher.caught.is_set() for _, catcher in nodes),
            "the drop is on its way",
        )
        assert not trim.done(), trim
        await asyncio.to_thread(freeze, first.pid)
        after = await leads(new, 2)
        assert after.term > before.term
        await until(
            lambda: all(s.state.membership.term == after.term for s, _ in nodes), "all follow the new one"
        )
        for _, catcher in nodes:
            catcher.released.set()
        first.send_signal(signal.SIGCONT)
        with contextlib.suppress(errors.MooncacheError):
            done = await trim
            assert done.dropped_count == 0
            assert errors.OK not in done.codes
        assert [blocks(service) for service, _ in nodes] == [1, 1]
