"""Election through a real etcd server: what it alone can do, beside tests/coordination/test_elections.py."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from mooncache.config import CoordinationSection, TlsSection
from mooncache.coordination import MasterRecord
from mooncache.coordination.embedded import EmbeddedCoordinator
from mooncache.coordination.etcd import EtcdCoordinator
from mooncache.coordination.etcd_api import EtcdApi
from mooncache.errors import MasterUnavailable
from mooncache.proto.etcd import etcd_pb2 as pb
from mooncache.runtime.clock import SystemClock
from tests.conditions import until
from tests.coordination.conftest import EtcdServer

pytestmark = pytest.mark.etcd
WAIT_S = 90.0
Make = Callable[..., Any]


@pytest.fixture
async def make(etcd: Any) -> AsyncIterator[Make]:
    """Makes started coordinators, named a, b, c …"""
    made: list[EtcdCoordinator] = []
    names = itertools.count()

    async def one(**changes: Any) -> EtcdCoordinator:
        settings = {"etcd_endpoints": (etcd.endpoint,), "lease_s": 2} | changes
        coordinator = EtcdCoordinator(
            CoordinationSection(backend="etcd", **settings), TlsSection(), SystemClock()
        )
        name = "abcdef"[next(names)]
        await coordinator.start(MasterRecord(name, f"{name}:1"))
        made.append(coordinator)
        return coordinator

    yield one
    for coordinator in made:
        await coordinator.close()


async def within(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, WAIT_S)


async def test_a_leader_that_stops_renewing_is_replaced_only_after_it_knows(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await make(), await make()
    won = await within(first.campaign())

    async def silence(_lease: int, timeout_s: float) -> int:
        await asyncio.sleep(timeout_s)
        raise MasterUnavailable("dropped on purpose")

    monkeypatch.setattr(first._api, "lease_keep_alive", silence)
    again = await within(second.campaign())
    assert won.lost.is_set()
    assert again.term > won.term


async def test_a_lease_that_etcd_ends_ends_leadership_and_can_be_won_again(make: Make) -> None:
    leader = await make()
    won = await within(leader.campaign())
    await leader._api.lease_revoke(leader._lease, 5.0)
    await within(won.lost.wait())
    again = await within(leader.campaign())
    assert again.term > won.term
    assert [record.master_id for record in await leader.masters()] == ["a"]


async def test_the_second_server_is_used_when_the_first_is_silent(make: Make, etcd: Any) -> None:
    coordinator = await make(etcd_endpoints=("127.0.0.1:1", etcd.endpoint))
    assert (await within(coordinator.campaign())).term > 0


async def test_the_next_server_is_used_when_one_has_no_majority(make: Make, etcd: Any) -> None:
    """A member that is cut off from the others answers, when its own deadline comes before the caller's."""

    async def no_majority(_request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.UNKNOWN, "context deadline exceeded")
        return b""

    class Handler(grpc.GenericRpcHandler):
        def service(self, _details: Any) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(no_majority)

    cut_off = grpc.aio.server(handlers=[Handler()])
    port = cut_off.add_insecure_port("127.0.0.1:0")
    await cut_off.start()
    coordinator = await make(etcd_endpoints=(f"127.0.0.1:{port}", etcd.endpoint))
    assert (await within(coordinator.campaign())).term > 0
    await cut_off.stop(None)


async def test_foreign_bytes_under_our_keys_are_no_master(make: Make) -> None:
    from mooncache.proto.etcd import etcd_pb2 as pb

    coordinator = await make()
    await within(coordinator.campaign())
    for index, value in enumerate(
        (b"", b"\xff", b"[1]", b'{"master_id": 1, "grpc_target": "x"}', b"{" * 5000)
    ):
        key = coordinator._masters_prefix + b"foreign%d" % index
        await coordinator._api.put(pb.PutRequest(key=key, value=value), 5.0)
    await until(lambda: only_a_is_listed(coordinator))


async def only_a_is_listed(coordinator: EtcdCoordinator) -> bool:
    return [record.master_id for record in await coordinator.masters()] == ["a"]


async def test_terms_grow_when_the_store_is_lost_and_when_clocks_go_back(
    make: Make, etcd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = EmbeddedCoordinator(None, SystemClock())
    await before.start(MasterRecord("m", "m:1"))
    terms = [(await before.campaign()).term]  # a master without etcd led until now
    first = await make()
    terms.append((await within(first.campaign())).term)
    await first.close()
    etcd.kill()
    shutil.rmtree(etcd.folder / "data")
    etcd.start()
    second = await make()
    terms.append((await within(second.campaign())).term)
    await second.resign()
    monkeypatch.setattr(SystemClock, "wall_s", lambda _: 1.0)
    terms.append((await within(second.campaign())).term)
    assert terms == sorted(set(terms))


async def test_an_etcd_restored_from_a_backup_gives_no_term_twice(
    make: Make, etcd: Any, tmp_path: Path
) -> None:
    """The backup was made while somebody led; the elections since then are not in it."""
    first = await make()
    terms = [(await within(first.campaign())).term]
    etcd.kill()
    shutil.copytree(etcd.folder / "data", tmp_path / "backup")
    etcd.start()
    second = await make()
    await first.close()
    for _ in range(3):
        terms.append((await within(second.campaign())).term)
        await second.resign()
    leading = await within(second.campaign())
    terms.append(leading.term)
    etcd.kill()
    await within(leading.lost.wait())
    shutil.rmtree(etcd.folder / "data")
    shutil.copytree(tmp_path / "backup", etcd.folder / "data")
    etcd.start()
    terms.append((await within(second.campaign())).term)
    assert terms == sorted(set(terms))


async def test_a_call_under_way_on_a_connection_that_another_call_gives_up_fails() -> None:
    """It was cancelled with its task, which held a master's lease: that master never led again."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [silent.getsockname()[1] for silent in (one, other)]
        api = EtcdApi([f"127.0.0.1:{port}" for port in ports])
        try:
            waiting = asyncio.ensure_future(api.lease_grant(2, WAIT_S))
            with pytest.raises(MasterUnavailable):
                await api.range(pb.RangeRequest(key=b"k"), 0.2)
            with pytest.raises(MasterUnavailable, match="given up"):
                await within(waiting)
            assert api.endpoint.endswith(str(ports[1])), "one step on, not two"
        finally:
            await api.close()


async def test_a_majority_that_is_lost_ends_leadership_and_one_that_is_back_begins_it(
    make: Make, etcd_members: list[EtcdServer]
) -> None:
    """The member that is left answers, and takes no write; which of the three it is does not matter."""
    endpoints = tuple(each.endpoint for each in etcd_members)
    first, second = await make(etcd_endpoints=endpoints), await make(etcd_endpoints=endpoints)
    won = await within(first.campaign())
    standby = asyncio.ensure_future(second.campaign())
    for member in etcd_members[:2]:
        member.kill()
    await within(won.lost.wait())
    with pytest.raises(MasterUnavailable):
        await within(first.leader())
    await until(lambda: not first.reachable and not second.reachable)
    assert not standby.done()
    etcd_members[0].begin()
    again = asyncio.ensure_future(first.campaign())
    done, pending = await within(asyncio.wait({standby, again}, return_when=asyncio.FIRST_COMPLETED))
    assert done.pop().result().term > won.term
    pending.pop().cancel()
