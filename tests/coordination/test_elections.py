"""What every coordinator promises, through a real etcd server and through a Lease of Kubernetes."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mooncache import config as configuration
from mooncache.coordination import Coordinator, MasterRecord, make_coordinator
from mooncache.errors import MasterUnavailable
from mooncache.runtime.clock import SystemClock
from tests.conditions import until
from tests.coordination.backends import Backend

WAIT_S = 90.0
Make = Callable[..., Any]


@pytest.fixture(params=["etcd", "lease"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(
        request.param, request.getfixturevalue("etcd" if request.param == "etcd" else "kubernetes")
    )


@pytest.fixture
async def make(backend: Backend) -> AsyncIterator[Make]:
    """Makes started coordinators, named a, b, c …"""
    made: list[Coordinator] = []
    names = itertools.count()

    async def one(lease_s: float = 2) -> Coordinator:
        coordinator = make_coordinator(configuration.load(env=backend.env(lease_s)), SystemClock())
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
    await until(lambda: is_leader(second, "a"))
    await until(lambda: lists(second, "a", "b"))
    await first.resign()
    assert won.lost.is_set()
    assert won.reason == "resigned"
    again = await within(standby)
    assert again.term > won.term
    await until(lambda: is_leader(first, "b"))


async def test_the_leader_keeps_leading_beyond_its_first_lease(make: Make) -> None:
    leader = await make(lease_s=4)  # long enough for renewals beside other work
    won = await within(leader.campaign())
    await asyncio.sleep(5)
    assert not won.lost.is_set()
    assert (await leader.leader()).master_id == "a"


LEADER = """
import asyncio, sys
from mooncache import config
from mooncache.coordination import MasterRecord, make_coordinator
from mooncache.runtime.clock import SystemClock

async def main():
    coordinator = make_coordinator(config.load(), SystemClock())
    await coordinator.start(MasterRecord("other", "other:1"))
    leadership = await coordinator.campaign()
    sys.stdout.write(f"{leadership.term}\\n")
    sys.stdout.flush()
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_killed_leader_is_replaced(make: Make, backend: Backend) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LEADER, stdout=subprocess.PIPE, env=os.environ | backend.env(lease_s=2)
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
    await until(lambda: lists(standby, "a"))


async def is_leader(coordinator: Coordinator, name: str) -> bool:
    record = await coordinator.leader()
    return record is not None and record.master_id == name


async def nobody_leads(coordinator: Coordinator) -> bool:
    return await coordinator.leader() is None


async def lists(coordinator: Coordinator, *names: str) -> bool:
    return [record.master_id for record in await coordinator.masters()] == list(names)


async def test_a_stopped_server_ends_leadership_and_wedges_nothing(make: Make, backend: Backend) -> None:
    first, second = await make(), await make()
    won = await within(first.campaign())
    standby = asyncio.ensure_future(second.campaign())
    backend.server.pause()
    try:
        await within(won.lost.wait())
        with pytest.raises(MasterUnavailable):
            await within(first.leader())
        await until(lambda: not first.reachable and not second.reachable)
        assert not standby.done()
        await within(first.resign())
    finally:
        backend.server.resume()
    again = asyncio.ensure_future(first.campaign())
    done, pending = await within(asyncio.wait({standby, again}, return_when=asyncio.FIRST_COMPLETED))
    assert done.pop().result().term > won.term
    assert len(pending) == 1
    pending.pop().cancel()


async def test_a_server_that_comes_later_or_restarts(make: Make, backend: Backend) -> None:
    backend.stop()
    coordinator = await make()
    campaign = asyncio.ensure_future(coordinator.campaign())
    await asyncio.sleep(1.0)
    assert not campaign.done()
    backend.server.start()
    won = await within(campaign)
    backend.stop()
    await within(won.lost.wait())
    backend.server.start()
    assert (await within(coordinator.campaign())).term > won.term


async def test_closing_under_a_dead_server_comes_back(make: Make, backend: Backend) -> None:
    coordinator = await make()
    won = await within(coordinator.campaign())
    backend.stop()
    await within(coordinator.close())
    assert won.lost.is_set()


async def test_closing_takes_the_record_back_at_once(make: Make) -> None:
    first, second = await make(lease_s=60), await make()
    await within(first.campaign())
    await first.close()
    await until(lambda: lists(second, "b"))
    await until(lambda: nobody_leads(second))


async def test_resigning_frees_the_leadership_that_was_won_and_no_other(make: Make) -> None:
    first, second = await make(), await make()
    await within(first.campaign())
    await first.resign()
    assert await first.leader() is None
    await within(second.campaign())
    await first.resign()
    await until(lambda: is_leader(first, "b"))


async def test_terms_are_above_what_the_candidate_has_heard_of(make: Make) -> None:
    coordinator = await make()
    floor = 1 << 50
    assert (await within(coordinator.campaign(floor))).term == floor + 1
    await coordinator.resign()
    assert (await within(coordinator.campaign())).term == floor + 2


async def test_terms_grow_when_clocks_go_back(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of them write the same time again and again: a renewal is seen all the same."""
    coordinator, other = await make(), await make()
    first = await within(coordinator.campaign())
    await coordinator.resign()
    monkeypatch.setattr(SystemClock, "wall_s", lambda _: 1.0)
    second = await within(coordinator.campaign())
    assert second.term == first.term + 1
    standby = asyncio.ensure_future(other.campaign())
    await asyncio.sleep(3)
    assert not second.lost.is_set()
    assert not standby.done()
    standby.cancel()


async def test_a_candidacy_that_was_given_up_wins_nothing(make: Make) -> None:
    first, second = await make(), await make()
    won = await within(first.campaign())
    given_up = asyncio.ensure_future(second.campaign())
    await asyncio.sleep(0.5)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    await first.resign()
    await asyncio.sleep(1.5)
    assert await nobody_leads(first)
    assert (await within(second.campaign())).term > won.term
