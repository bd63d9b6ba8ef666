"""Election through a real etcd server: two candidates, and everything that can go wrong with leader or server."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from mooncache import config as configuration
from mooncache.config import CoordinationSection, TlsSection
from mooncache.coordination import MasterRecord, make_coordinator
from mooncache.coordination.embedded import EmbeddedCoordinator
from mooncache.coordination.etcd import EtcdCoordinator
from mooncache.errors import MasterUnavailable
from mooncache.runtime.clock import SystemClock
from tests.conditions import until

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


async def test_one_leads_and_the_other_follows_when_it_resigns(make: Make) -> None:
    first, second = await make(), await make()
    won = await within(first.campaign())
    standby = asyncio.ensure_future(second.campaign())
    await asyncio.sleep(1.5)
    assert not standby.done()
    assert await second.leader() == MasterRecord("a", "a:1")
    assert [record.master_id for record in await second.masters()] == ["a", "b"]
    await first.resign()
    assert won.lost.is_set()
    assert won.reason == "resigned"
    again = await within(standby)
    assert again.term > won.term
    assert await first.leader() == MasterRecord("b", "b:1")


async def test_the_leader_keeps_leading_beyond_its_first_lease(make: Make) -> None:
    leader = await make(lease_s=4)  # long enough for renewals beside other work
    won = await within(leader.campaign())
    await asyncio.sleep(5)
    assert not won.lost.is_set()
    assert (await leader.leader()).master_id == "a"


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


LEADER = """
import asyncio, sys
from mooncache.runtime.clock import SystemClock
from mooncache.config import CoordinationSection, TlsSection
from mooncache.coordination import MasterRecord
from mooncache.coordination.etcd import EtcdCoordinator

async def main():
    section = CoordinationSection(backend="etcd", etcd_endpoints=(sys.argv[1],), lease_s=2)
    coordinator = EtcdCoordinator(section, TlsSection(), SystemClock())
    await coordinator.start(MasterRecord("other", "other:1"))
    leadership = await coordinator.campaign()
    sys.stdout.write(f"{leadership.term}\\n")
    sys.stdout.flush()
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_killed_leader_is_replaced(make: Make, etcd: Any) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LEADER, etcd.endpoint, stdout=subprocess.PIPE, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        term = int(await within(process.stdout.readline()))
        standby = await make()
        campaign = asyncio.ensure_future(standby.campaign())
        await until(lambda: is_leader(standby, "other"))
        assert not campaign.done()
        process.kill()
        assert (await within(campaign)).term > term
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    await until(lambda: lists_only(standby, "a"))


async def is_leader(coordinator: EtcdCoordinator, name: str) -> bool:
    record = await coordinator.leader()
    return record is not None and record.master_id == name


async def lists_only(coordinator: EtcdCoordinator, name: str) -> bool:
    return [record.master_id for record in await coordinator.masters()] == [name]


async def test_a_stopped_etcd_ends_leadership_and_wedges_nothing(make: Make, etcd: Any) -> None:
    first, second = await make(), await make()
    won = await within(first.campaign())
    standby = asyncio.ensure_future(second.campaign())
    etcd.pause()
    try:
        await within(won.lost.wait())
        with pytest.raises(MasterUnavailable):
            await within(first.leader())
        await until(lambda: not first.reachable and not second.reachable)
        assert not standby.done()
        await within(first.resign())
    finally:
        etcd.resume()
    again = asyncio.ensure_future(first.campaign())
    done, pending = await within(asyncio.wait({standby, again}, return_when=asyncio.FIRST_COMPLETED))
    assert done.pop().result().term > won.term
    assert len(pending) == 1
    pending.pop().cancel()


async def test_an_etcd_that_comes_later_or_restarts(make: Make, etcd: Any) -> None:
    etcd.kill()
    coordinator = await make()
    campaign = asyncio.ensure_future(coordinator.campaign())
    await asyncio.sleep(1.0)
    assert not campaign.done()
    etcd.start()
    won = await within(campaign)
    etcd.kill()
    await within(won.lost.wait())
    etcd.start()
    assert (await within(coordinator.campaign())).term > won.term


async def test_closing_under_a_dead_etcd_comes_back(make: Make, etcd: Any) -> None:
    coordinator = await make()
    won = await within(coordinator.campaign())
    etcd.kill()
    await within(coordinator.close())
    assert won.lost.is_set()


async def test_closing_takes_the_record_back_at_once(make: Make) -> None:
    first, second = await make(lease_s=60), await make()
    await within(first.campaign())
    await first.close()
    await until(lambda: lists_only(second, "b"))
    assert await second.leader() is None


async def test_the_second_server_is_used_when_the_first_is_silent(make: Make, etcd: Any) -> None:
    coordinator = await make(etcd_endpoints=("127.0.0.1:1", etcd.endpoint))
    assert (await within(coordinator.campaign())).term > 0


async def test_foreign_bytes_under_our_keys_are_no_master(make: Make) -> None:
    from mooncache.proto.etcd import etcd_pb2 as pb

    coordinator = await make()
    await within(coordinator.campaign())
    for index, value in enumerate(
        (b"", b"\xff", b"[1]", b'{"master_id": 1, "grpc_target": "x"}', b"{" * 5000)
    ):
        key = coordinator._masters_prefix + b"foreign%d" % index
        await coordinator._api.put(pb.PutRequest(key=key, value=value), 5.0)
    await until(lambda: lists_only(coordinator, "a"))


async def test_configuration_chooses(etcd: Any, tmp_path: Path) -> None:
    overrides = {"coordination.backend": "etcd", "coordination.etcd_endpoints": etcd.endpoint}
    config = configuration.load(env={}, overrides=overrides | {"cluster.state_dir": tmp_path})
    coordinator = make_coordinator(config, SystemClock())
    assert isinstance(coordinator, EtcdCoordinator)
    await coordinator.start(MasterRecord("a", "a:1"))
    assert (await within(coordinator.campaign())).term > 0
    await coordinator.close()


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


async def test_resigning_frees_the_leadership_that_was_won_and_no_other(make: Make) -> None:
    first, second = await make(), await make()
    await within(first.campaign())
    await first.resign()
    assert await first.leader() is None
    await within(second.campaign())
    await first.resign()
    assert await first.leader() == MasterRecord("b", "b:1")
