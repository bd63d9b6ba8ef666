"""Elections by a Lease in virtual time: late and lost calls, cuts, deaths, deleted Leases, clocks that drift.

At no moment do two candidates hold the leadership, and each win has a larger term than all before it. When calls get
through again, one leads. A failing seed is in the name of the test.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path

import pytest

from mooncache.config import CoordinationSection
from mooncache.coordination import Leadership, MasterRecord
from mooncache.coordination.lease import LeaseCoordinator
from mooncache.runtime.clock import LoopClock
from mooncache.testing import virtual_time
from tests.coordination.memory_lease import LeaseLine, MemoryLease, Travel

NAME = "mooncache-masters"
LEASE_S = 3.0
FAULTS_S, CALM_S = 60.0, 40.0


class DriftingClock(LoopClock):
    """A clock that runs up to 1 % too fast or too slow, and whose wall clock is wrong by `wrong_s` at most."""

    def __init__(self, rng: random.Random, wrong_s: float) -> None:
        super().__init__(wall_start_s=1e9 + rng.uniform(-wrong_s, wrong_s))
        self._rate = rng.uniform(0.99, 1.01)

    def now_s(self) -> float:
        return super().now_s() * self._rate

    def wall_s(self) -> float:
        return self._wall_start_s + super().now_s()


class World:
    """Three candidates, whose leaderships are watched."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        # A deleted Lease takes the terms with it, and right clocks bring them back: not both are taken away.
        self.deletes = bool(seed % 2)
        self.wrong_s = 0.0 if self.deletes else 300.0
        self.store, self.calm = MemoryLease(NAME), False
        self.won: list[tuple[Leadership, DriftingClock]] = []
        self.cut: set[str] = set()
        self.lives: dict[str, asyncio.Task[None]] = {}
        self.coordinators: dict[str, LeaseCoordinator] = {}

    def travel(self, name: str) -> Travel:
        """The way of one call of a candidate."""
        if self.calm:
            return Travel(0.01, 0.01, lost=False)
        late = self.rng.random() < 0.2
        there_s, back_s = (self.rng.uniform(0, 4 if late else 0.05) for _ in range(2))
        return Travel(there_s, back_s, lost=name in self.cut or self.rng.random() < 0.05)

    async def begin(self, name: str, folder: Path) -> None:
        """A process starts."""
        section = CoordinationSection(
            backend="lease",
            lease_s=LEASE_S,
            lease_namespace="models",
            kubernetes_api="https://x",
            kubernetes_account=folder,
        )
        clock = DriftingClock(self.rng, self.wrong_s)
        coordinator = LeaseCoordinator(section, "masters", clock)
        coordinator._api = LeaseLine(self.store, partial(self.travel, name))  # type: ignore[assignment]
        await coordinator.start(MasterRecord(name, f"{name}:1"))
        self.coordinators[name] = coordinator
        self.lives[name] = asyncio.ensure_future(self._live(coordinator, clock))

    async def _live(self, coordinator: LeaseCoordinator, clock: DriftingClock) -> None:
        while True:
            leadership = await coordinator.campaign()
            self.won.append((leadership, clock))
            await leadership.lost.wait()

    def kill(self, name: str) -> None:
        """The process ends at once; what it sent arrives."""
        coordinator = self.coordinators.pop(name)
        assert coordinator._keeper is not None
        coordinator._keeper.cancel()
        self.lives.pop(name).cancel()
        self.won = [
            (one, clock) for one, clock in self.won if clock is not coordinator._clock or one.lost.is_set()
        ]

    def leading(self) -> list[int]:
        return [one.term for one, clock in self.won if one.holds(clock.now_s())]


@pytest.mark.parametrize("seed", range(24))
def test_at_most_one_leads_whatever_is_late_lost_cut_killed_or_deleted(seed: int, tmp_path: Path) -> None:
    terms: list[int] = []

    async def scenario() -> None:
        world, rng = World(seed), random.Random(seed + 1)
        for name in "abc":
            await world.begin(name, tmp_path)
        loop = asyncio.get_running_loop()
        next_fault_s, seen = 3.0, 0
        while loop.time() < FAULTS_S + CALM_S:
            await asyncio.sleep(0.02)
            assert len(world.leading()) <= 1, (
                f"seed {seed}: terms {world.leading()} lead at {loop.time():.2f} s"
            )
            for one, _ in world.won[seen:]:
                terms.append(one.term)
            seen = len(world.won)
            if loop.time() > FAULTS_S and not world.calm:
                world.calm = True
                world.cut.clear()
            if not world.calm and loop.time() > next_fault_s:
                next_fault_s += rng.uniform(0.5, 6)
                name = rng.choice("abc")
                match rng.randrange(4):
                    case 0:
                        world.cut ^= {name}
                    case 1:
                        world.kill(name)
                        seen = len(world.won)
                        await world.begin(name, tmp_path)
                    case 2 if world.deletes and loop.time() > world.store.created_s + LEASE_S + 1:
                        world.store.made = None
                    case 3:
                        await world.coordinators[name].resign()
        assert len(world.leading()) == 1, f"seed {seed}: in calm one leads"
        assert terms == sorted(set(terms)), f"seed {seed}: terms {terms}"
        assert terms

    virtual_time.run(scenario(), seed)
