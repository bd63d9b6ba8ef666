"""Each part is kept running by itself: ended, silent and hopeless ones, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mooncache.cluster import supervisor
from mooncache.cluster.memory_kills import killed_so_far
from mooncache.cluster.processes import Part, ServiceKind
from mooncache.cluster.supervisor import SERVICE_POLICY, PartNews, PartStage, Supervisor
from mooncache.runtime import log_files
from mooncache.runtime.clock import LoopClock
from mooncache.runtime.supervision import RunState
from mooncache.testing.virtual_time import VirtualTimeLoop


class FaultyPart(Part):
    """A part whose process is a fake: it ends, hangs or cannot be started when the test says so."""

    def __init__(self, name: str) -> None:
        super().__init__(name, ServiceKind.MASTER, {}, Path(f"{name}.log"))
        self.code: int | None = None
        self.starts_s: list[float] = []
        self.answers = True
        self.ends_at_once = False
        self.cannot_start = False
        self.spares_s: list[float] = []
        self.spare_ends = 0

    @property
    def exit_code(self) -> int | None:
        return self.code

    def start(self) -> None:
        self.starts_s.append(asyncio.get_running_loop().time())
        if self.cannot_start:
            raise OSError(28, "No space left on device")
        self.code = 3 if self.ends_at_once else None
        self.answers = True

    def send(self, number: signal.Signals) -> None:
        self.code = -number

    def prepare_spare(self) -> None:
        self.spares_s.append(asyncio.get_running_loop().time())
        if self.cannot_start:
            raise OSError(12, "Cannot allocate memory")

    def end_spare(self) -> None:
        self.spare_ends += 1


class World:
    """A supervisor over fake parts, and what it said."""

    def __init__(self, *names: str) -> None:
        self.parts = {name: FaultyPart(name) for name in names}
        self.news: list[tuple[str, str]] = []
        self.stages: list[PartStage] = []
        self.changes = 0
        self.memory_kills = 4
        self.stop = False
        self.supervisor = Supervisor(
            dict(self.parts),
            SERVICE_POLICY,
            self.probe,
            self.tell,
            self.changed,
            LoopClock(),
            random.Random(1),
            lambda: self.memory_kills,
        )

    async def probe(self, part: Part) -> bool:
        assert isinstance(part, FaultyPart)
        return part.answers and part.code is None

    def tell(self, name: str, news: PartNews) -> None:
        self.news.append((name, news.text))
        self.stages.append(news.stage)

    def changed(self) -> None:
        self.changes += 1

    def run(self, story: Any) -> None:
        async def play() -> None:
            keeping = asyncio.create_task(self.supervisor.run(lambda: self.stop))
            await story()
            self.stop = True
            await keeping

        loop = VirtualTimeLoop()
        try:
            loop.run_until_complete(play())
        finally:
            loop.close()


def test_an_ended_part_is_started_again_and_the_others_are_left_alone() -> None:
    world = World("master", "node-1")

    async def story() -> None:
        await asyncio.sleep(5)
        world.parts["node-1"].code = -9
        await asyncio.sleep(5)

    world.run(story)
    assert len(world.parts["node-1"].starts_s) == 1
    assert world.parts["master"].starts_s == []
    record = world.supervisor.records["node-1"]
    assert (record.state, record.restarts, record.reason) == (RunState.READY, 1, "")
    assert record.last_end == "signal SIGKILL"
    said = [what for name, what in world.news if name == "node-1"]
    assert said[0].startswith("ended with signal SIGKILL; restarting in ")
    assert said[1:] == ["started again", "answers again"]
    assert world.stages == [PartStage.BUSY, PartStage.BUSY, PartStage.READY]
    assert world.changes == 2


def test_a_kill_beside_one_of_the_kernels_is_perhaps_for_memory() -> None:
    """The kernel's count grew as it ended. A kill a minute later, and an end of another kind, are what they are."""
    world = World("master", "node-1")

    async def story() -> None:
        for name, code, kills in (("node-1", -9, 5), ("master", 1, 6), ("node-1", -9, 6)):
            await asyncio.sleep(60)
            world.memory_kills = kills
            world.parts[name].code = code

        await asyncio.sleep(60)

    world.run(story)
    said = [what.partition(";")[0] for _, what in world.news if what.startswith("ended")]
    assert said == [
        "ended with signal SIGKILL, perhaps out of memory",
        "ended with exit code 1",
        "ended with signal SIGKILL",
    ]


def test_the_kernels_count_is_read(tmp_path: Path) -> None:
    counts = tmp_path / "vmstat"
    for text, count in (("pgfault 1\noom_kill 12\nx 3\n", 12), ("oom_kill x\n", 0), ("", 0)):
        counts.write_text(text)
        assert killed_so_far(counts) == count
    assert killed_so_far(tmp_path / "none") == 0
    assert killed_so_far() >= 0


def test_pauses_grow_until_a_part_is_given_up_and_the_rest_goes_on() -> None:
    world = World("master", "gateway")

    async def story() -> None:
        world.parts["gateway"].ends_at_once = True
        world.parts["gateway"].code = 3
        await asyncio.sleep(400)
        world.parts["master"].code = -9
        await asyncio.sleep(5)

    world.run(story)
    starts_s = world.parts["gateway"].starts_s
    assert len(starts_s) == SERVICE_POLICY.restart_count_max
    gaps_s = [later - sooner for sooner, later in itertools.pairwise(starts_s)]
    assert gaps_s[4] > 4 * gaps_s[0]
    assert max(gaps_s) < SERVICE_POLICY.backoff_max_s + 1
    assert world.supervisor.given_up == ["gateway"]
    assert "given up after 11 failures within 10 minutes" in world.supervisor.records["gateway"].reason
    assert any("its log is gateway.log" in what for _, what in world.news)
    assert world.supervisor.records["master"].restarts == 1, "the other part is still supervised"


def test_a_silent_part_is_killed_and_started_again() -> None:
    world = World("node-1")

    async def story() -> None:
        await asyncio.sleep(2)
        world.parts["node-1"].answers = False
        await asyncio.sleep(10)
        assert world.supervisor.records["node-1"].reason == "does not answer"
        assert world.parts["node-1"].starts_s == []
        await asyncio.sleep(30)

    world.run(story)
    assert len(world.parts["node-1"].starts_s) == 1
    assert ("node-1", "no answer for 30 s; killed") in world.news
    assert world.supervisor.records["node-1"].state == RunState.READY


def test_a_short_silence_is_forgiven() -> None:
    world = World("node-1")

    async def story() -> None:
        world.parts["node-1"].answers = False
        await asyncio.sleep(20)
        world.parts["node-1"].answers = True
        await asyncio.sleep(2)

    world.run(story)
    assert world.parts["node-1"].starts_s == []
    assert world.supervisor.records["node-1"].reason == ""


def test_a_start_that_the_machine_refuses_is_tried_again() -> None:
    world = World("node-1")

    async def story() -> None:
        world.parts["node-1"].cannot_start = True
        world.parts["node-1"].code = 1
        await asyncio.sleep(3)
        assert "No space left" in world.supervisor.records["node-1"].reason
        world.parts["node-1"].cannot_start = False
        await asyncio.sleep(10)

    world.run(story)
    assert world.supervisor.records["node-1"].state == RunState.READY
    assert world.supervisor.records["node-1"].restarts == 1


def test_a_spare_process_is_prepared_when_a_part_has_been_ready_for_a_while_and_after_each_crash_again() -> (
    None
):
    world = World("node-1", "master")
    node = world.parts["node-1"]
    node.keeps_spare = True

    async def story() -> None:
        await asyncio.sleep(10)
        node.code = -9
        await asyncio.sleep(10)

    world.run(story)
    assert [round(at_s) for at_s in node.spares_s] == [5, 15]
    assert (node.spare_ends, world.parts["master"].spares_s) == (1, [])


def test_without_memory_for_a_spare_process_all_goes_on() -> None:
    world = World("node-1")
    node = world.parts["node-1"]
    node.keeps_spare = node.cannot_start = True

    async def story() -> None:
        await asyncio.sleep(100)

    world.run(story)
    assert [round(at_s) for at_s in node.spares_s] == [5, 65]
    assert world.news == [("node-1", "no spare process: Cannot allocate memory")] * 2
    assert world.supervisor.records["node-1"].state == RunState.READY


def test_when_all_are_given_up_it_ends_by_itself() -> None:
    world = World("node-1")

    async def story() -> None:
        world.parts["node-1"].ends_at_once = True
        world.parts["node-1"].code = 3
        await asyncio.wait_for(world.supervisor.run(lambda: False), 600)

    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(story())
    finally:
        loop.close()
    assert world.supervisor.records["node-1"].state == RunState.GIVEN_UP


def test_no_log_of_a_service_grows_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "LOG_BYTES_MAX", 1000)
    monkeypatch.setattr(log_files, "LOG_KEPT_BYTES", 100)
    world = World("master")
    log = tmp_path / "master.log"
    world.parts["master"].log_path = log

    async def story() -> None:
        with log.open("ab") as written:  # as a service writes
            for number in range(50):
                written.write(b"%03d" % number * 100)
                written.flush()
                await asyncio.sleep(1.0)

    world.run(story)
    assert log.stat().st_size <= 1300
    assert 0 < (tmp_path / "master.log.1").stat().st_size <= 100
    assert world.news == []


class RealPart(Part):
    """A part whose process is real and does nothing."""

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def pidfds() -> int:
    """How many descriptors of processes this one has."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += "pidfd" in os.readlink(path)
    return found


async def test_the_kernel_says_that_a_part_ended_and_it_is_started_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "POLL_S", 600.0)  # whoever looks notices nothing in time
    part = RealPart("node-1", ServiceKind.STORE_NODE, {}, tmp_path / "node-1.log")
    part.start()

    async def answers(_part: Part) -> bool:
        return True

    again = asyncio.Event()

    def tell(_name: str, news: PartNews) -> None:
        if news.text == "started again":
            again.set()

    before = pidfds()
    keeper = Supervisor({part.name: part}, SERVICE_POLICY, answers, tell, lambda: None)
    running = asyncio.create_task(keeper.run(lambda: False))
    try:
        async with asyncio.timeout(60):
            while pidfds() == before:  # noqa: ASYNC110  (the kernel tells no event of it)
                await asyncio.sleep(0.01)
        former = part.pid
        os.kill(former, signal.SIGKILL)
        async with asyncio.timeout(60):
            await again.wait()
        assert part.pid != former
        assert part.exit_code is None
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        part.send(signal.SIGKILL)
        part.wait(10.0)
