"""Embedded coordination: always leads, terms only grow, one master for each state folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mooncache import config as configuration
from mooncache.coordination import EmbeddedCoordinator, MasterRecord, make_coordinator
from mooncache.errors import Closed, ConfigInvalid
from mooncache.runtime.clock import ManualClock

ME = MasterRecord("m", "127.0.0.1:7700")


async def lead_once(path: Path | None, wall_s: float) -> int:
    coordinator = EmbeddedCoordinator(path, ManualClock(wall_s))
    await coordinator.start(ME)
    leadership = await coordinator.campaign()
    assert await coordinator.leader() == ME
    assert await coordinator.masters() == [ME]
    await coordinator.close()
    assert leadership.lost.is_set()
    return leadership.term


async def test_terms_grow_even_when_the_clock_or_the_file_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "s" / "master.term"
    terms = [await lead_once(path, wall_s) for wall_s in (100.0, 50.0, 50.0, 200.0)]
    path.write_text("nonsense")
    terms.append(await lead_once(path, 300.0))
    path.unlink()
    terms.append(await lead_once(path, 400.0))
    assert terms == [100_000, 100_001, 100_002, 200_000, 300_000, 400_000]
    assert await lead_once(None, 7.0) == 7000


async def test_a_second_campaign_waits_for_the_first(tmp_path: Path) -> None:
    coordinator = EmbeddedCoordinator(tmp_path / "t", ManualClock(1.0))
    with pytest.raises(Closed):
        await coordinator.campaign()
    await coordinator.start(ME)
    first = await coordinator.campaign()
    waiting = asyncio.ensure_future(coordinator.campaign())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await coordinator.resign()
    assert (await waiting).term > first.term
    await coordinator.close()


async def test_two_masters_on_one_folder_are_refused(tmp_path: Path) -> None:
    config = configuration.load(env={}, overrides={"cluster.state_dir": tmp_path})
    first, second = (make_coordinator(config, ManualClock(1.0)) for _ in range(2))
    await first.start(ME)
    with pytest.raises(ConfigInvalid, match="Another master"):
        await second.start(ME)
    await first.close()
    await second.start(ME)
    await second.close()


async def test_no_term_begins_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "master.term").symlink_to("/dev/full")
    coordinator = EmbeddedCoordinator(tmp_path / "master.term", ManualClock(1.0))
    await coordinator.start(ME)
    with pytest.raises(ConfigInvalid, match="No space left"):
        await coordinator.campaign()
    assert await coordinator.leader() is None
    await coordinator.close()
