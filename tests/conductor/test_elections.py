"""Conductors that etcd or a Lease elects: one leads whatever cuts them apart, and the others know what it knows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mooncache import errors
from mooncache.conductor.core.leadership import Standing
from tests.conditions import until
from tests.conductor.support import chain
from tests.conductor.test_standbys import Cluster
from tests.coordination.backends import Backend
from tests.master.processes import election_by

BACKENDS = pytest.mark.parametrize("backend", ["lease", "etcd"])
LEASE_S = 2


class Elected(Cluster):
    """Conductors with an election; `cut`: none reaches another one."""

    def __init__(self, folder: Path, count: int, *, cut: bool = False, **overrides: Any) -> None:
        super().__init__(folder, count, **overrides)
        self._cut = cut

    def config(self, at: int) -> Any:
        if self._cut:  # what the others are called leads nowhere
            self.target = ",".join(
                f"127.0.0.1:{port if place == at else 1}" for place, port in enumerate(self.ports)
            )
        return super().config(at)

    def leading(self) -> list[int]:
        return [at for at, one in self.running.items() if one.service.state.leads]

    async def refuses(self, at: int) -> bool:
        try:
            await self.running[at].schedule("r", chain("a", 4))
        except errors.NotLeader:
            return True
        except errors.MooncacheError:
            return False  # it leads, and has no instance
        return False

    def term(self, at: int) -> int:
        return self.running[at].service.state.leadership.term


def overrides_of(env: dict[str, str]) -> dict[str, str]:
    """Settings of masters as settings of conductors."""
    found = {
        name.removeprefix("MOONCACHE_").lower().replace("_", ".", 1): value for name, value in env.items()
    }
    found["conductor.election"] = found.pop("coordination.backend")
    return found


@pytest.mark.etcd
@BACKENDS
async def test_one_is_elected_and_the_next_one_when_it_ends(tmp_path: Path, backend: str) -> None:
    async with election_by(backend, tmp_path, LEASE_S) as env:
        cluster = Elected(tmp_path, 3, **overrides_of(env))
        try:
            await cluster.start(0, 1, 2)
            terms = []
            for _ in range(2):
                leader = await cluster.agreed()
                terms.append(cluster.term(leader))
                for at in cluster.running:
                    assert await cluster.refuses(at) is (at != leader)
                await cluster.caught_up()
                await cluster.stop(leader)
            terms.append(cluster.term(await cluster.agreed()))
            assert terms == sorted(set(terms))
        finally:
            await cluster.close()


@pytest.mark.etcd
@BACKENDS
async def test_conductors_that_do_not_reach_each_other_have_one_leader(tmp_path: Path, backend: str) -> None:
    """Without a third party each of them would lead."""
    async with election_by(backend, tmp_path, LEASE_S) as env:
        cluster = Elected(tmp_path, 2, cut=True, **overrides_of(env))
        try:
            await cluster.start(0, 1)
            await until(lambda: len(cluster.leading()) == 1)
            (leader,) = cluster.leading()
            for _ in range(40):  # longer than the lease
                assert cluster.leading() == [leader]
                assert cluster.standing(1 - leader) is Standing.SEEKING
                await asyncio.sleep(0.1)
            assert await cluster.refuses(1 - leader)
            before = cluster.term(leader)
            await cluster.stop(leader)
            await until(lambda: cluster.leading() == [1 - leader])
            assert cluster.term(1 - leader) > before
        finally:
            await cluster.close()


async def test_nobody_leads_while_the_api_server_is_away_and_one_does_when_it_is_back(
    tmp_path: Path, kubernetes: Any
) -> None:
    cluster = Elected(tmp_path, 2, **Backend("lease", kubernetes).settings(LEASE_S, "conductor.election"))
    try:
        await cluster.start(0, 1)
        leader = await cluster.agreed()
        before = cluster.term(leader)
        kubernetes.stop()
        await until(lambda: not cluster.leading())
        assert await cluster.refuses(0)
        assert await cluster.refuses(1)
        kubernetes.start()
        assert cluster.term(await cluster.agreed()) > before
    finally:
        await cluster.close()


async def test_a_leader_that_hears_of_a_newer_term_is_elected_anew_above_it(
    tmp_path: Path, kubernetes: Any
) -> None:
    """As after a change from conductors that elected each other, with a clock that went ahead."""
    cluster = Elected(tmp_path, 1, **Backend("lease", kubernetes).settings(LEASE_S, "conductor.election"))
    try:
        await cluster.start(0)
        await until(lambda: cluster.leading() == [0])
        far = cluster.term(0) + 1_000_000
        cluster.running[0].service.state.leadership.hear(far)
        assert cluster.leading() == []
        await until(lambda: cluster.leading() == [0])
        assert cluster.term(0) > far
        assert not await cluster.refuses(0)
    finally:
        await cluster.close()
