"""Roles follow the load, move back under hysteresis, and leave alone what an operator chose."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from mooncache.conductor.background import rebalance_roles
from mooncache.conductor.config import settings_of
from mooncache.conductor.core.decisions import PoolAnswer, SchedulingRequest
from mooncache.conductor.core.policy import roles
from mooncache.conductor.core.rebalance import RoleKeeper
from mooncache.conductor.core.records import DecisionState
from mooncache.conductor.core.registry import InstanceInfo, InstanceState
from mooncache.conductor.core.scheduler import Scheduler
from mooncache.conductor.state import native_index
from mooncache.config import load
from mooncache.kvcache.instance_load import InstanceLoad
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conductor.support import CALM, DECODE, PASSPORT, PREFILL, chain, config_at, instance, running

EVERY_S = 15.0
PROMPTS = 60


class World:
    """A scheduler under virtual time with instances that do what they are told at once."""

    def __init__(self, prefill: int, decode: int) -> None:
        section = load(env={}, overrides={"conductor.admission_enabled": False}).conductor
        self.core = Scheduler(settings_of(section), random.Random(1), native_index)
        self.keeper = RoleKeeper(0.1)
        self.now_s = 1000.0
        self.pinned: set[str] = set()
        self.moves: list[tuple[float, str, str]] = []
        self._next = 0
        names = [f"p{n}" for n in range(prefill)] + [f"d{n}" for n in range(decode)]
        for name in names:
            role = "prefill" if name.startswith("p") else "decode"
            info = InstanceInfo(
                name,
                1,
                role,
                "m",
                passport_json=PASSPORT,
                group=7,
                kv_bytes_per_token=1024,
                max_sequences=256,
                max_model_tokens=200_000,
                kv_capacity_tokens=2_000_000,
            )
            self.core.register(info, InstanceState.READY, self.now_s)

    def count(self, role: str) -> int:
        return sum(1 for one in self.core.registry if one.role == role)

    def pass_time(self, seconds: float, *, prompts_per_s: float) -> None:
        """Time passes; prompts of 20,000 tokens arrive and are computed as expected."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            for one in self.core.registry:
                self.core.report(one, InstanceState.READY, InstanceLoad(), "", self.now_s)
            for _ in range(int(prompts_per_s * EVERY_S)):
                self._next += 1
                request = SchedulingRequest(
                    f"r{self._next}", "m", 20_000, "t", keys=chain(f"r{self._next}", 4)
                )
                decision = self.core.schedule(request, PoolAnswer(), self.now_s, 0.0)
                assert decision.choice.admitted
                self.core.close(decision.decision_id, DecisionState.FINISHED, self.now_s + 1.0)
            self.now_s += EVERY_S
            model = self.core.models.known("m")
            assert model is not None
            for name, role in self.keeper.plan(model, self.core.registry, self.pinned, self.now_s):
                self.core.registry.set(name, role, None, self.now_s)
                self.moves.append((self.now_s, name, role))
            self.core.check()


def busy_rate(world: World) -> float:
    """Prompts per second that need about four prefill instances."""
    model = world.core.models.of("m")
    each_s = model.prefill(next(iter(world.core.registry)).info).cost.seconds(20_000, 0)
    return 4 * roles.PROMPT_USE / each_s


def test_roles_follow_the_load_and_come_back_late() -> None:
    world = World(2, 4)
    world.pass_time(300.0, prompts_per_s=busy_rate(world))
    assert world.count("prefill") > 2, "prompts queue and nobody helps"
    assert world.count("decode") >= 1
    assert {role for _, _, role in world.moves} == {"prefill"}, "roles went to and fro under an even load"
    first = world.moves[-1][0]
    settled = len(world.moves)
    world.pass_time(300.0, prompts_per_s=busy_rate(world))
    assert len(world.moves) == settled, "an even load still moves roles"
    assert world.keeper.needs("m")[0] > 0
    model = world.core.models.of("m")
    # Now answers are what there is to do: so many run that one instance would be beyond its time between tokens.
    for number in range(400):
        request = SchedulingRequest(
            f"long{number}", "m", 20_000, "t", max_output_tokens=5000, keys=chain(f"l{number}", 4)
        )
        decision = world.core.schedule(request, PoolAnswer(), world.now_s, 0.0)
        model.book.computed(decision.decision_id, world.now_s)
        model.book.first_token(decision.decision_id, world.now_s)
    world.pass_time(400.0, prompts_per_s=0.0)
    back = [at_s for at_s, _, role in world.moves if role == "decode"]
    assert back, "nobody came back to generate"
    assert min(back) - first >= roles.TURN_BACK * roles.SWITCH_S
    assert world.count("prefill") >= 1


def test_an_operators_choice_and_instances_without_the_pool_are_left_alone() -> None:
    world = World(1, 3)
    world.pinned = {"d0", "d1"}
    world.pass_time(300.0, prompts_per_s=busy_rate(world))
    assert {name for _, name, _ in world.moves} <= {"d2"}


def test_the_last_of_a_side_stays() -> None:
    world = World(1, 1)
    world.pass_time(300.0, prompts_per_s=busy_rate(world))
    assert world.moves == []


def test_nobody_serves_the_model_any_more() -> None:
    world = World(1, 2)
    world.pass_time(30.0, prompts_per_s=1.0)
    assert world.keeper.models() == ["m"]
    world.keeper.forget(set())
    assert world.keeper.models() == []


class Hands:
    """A clock that a test moves by hand."""

    def __init__(self, now_s: float) -> None:
        self.at_s = now_s

    def now_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return self.at_s


def flood(name: str, number: int) -> dict[str, Any]:
    return {
        "request_id": f"{name}{number}",
        "keys": chain(f"{name}{number}", 64),
        "prompt_tokens": 8_000,
        "max_output_tokens": 8,
    }


def test_a_running_conductor_tells_the_worker_its_new_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncache.conductor.background.duties.REBALANCE_INTERVAL_S", 3600)

    async def scenario(*, enabled: bool) -> dict[str, int]:
        settings = {**CALM, "conductor.rebalance_roles": enabled, "conductor.admission_enabled": False}
        async with running(config_at(tmp_path / str(enabled), **settings)) as c:
            names = {"p": PREFILL, "d0": DECODE, "d1": DECODE, "d2": DECODE}
            await c.register(*(instance(name, role) for name, role in names.items()))
            await c.call("SetInstance", pb.SetInstanceRequest(instance_id="d0", role=DECODE))
            clock = Hands(c.service.state.clock.now_s())
            c.service.state.clock = clock  # type: ignore[assignment]
            await rebalance_roles.run_once(c.service.state)
            for number in range(PROMPTS):
                request = flood("r", number)
                await c.schedule(request.pop("request_id"), request.pop("keys"), **request)
            for _ in range(roles.LASTS_PLANS):
                clock.at_s += 12.0
                await rebalance_roles.run_once(c.service.state)
            reported = {name: (await c.report(name)).role for name in names}
            text = c.service.metrics.render().decode()
            assert ('role_switches_total{role="prefill"} 0.0' in text) is not enabled
            status = await c.call("GetConductorStatus", pb.GetConductorStatusRequest())
            assert bool(status.role_switches["prefill"]) is enabled
            return reported

    reported = asyncio.run(scenario(enabled=True))
    assert PREFILL in (reported["d1"], reported["d2"]), "the worker does not hear of its new role"
    assert reported["d0"] == DECODE, "an operator's choice was overruled"
    assert DECODE in reported.values()
    reported = asyncio.run(scenario(enabled=False))
    assert [reported[name] for name in ("p", "d0", "d1", "d2")] == [PREFILL, DECODE, DECODE, DECODE]


def test_prompts_that_decode_instances_compute_themselves_need_no_prefill_instances() -> None:
    world = World(2, 4)
    model = world.core.models.of("m")
    for _ in range(6):
        for one in world.core.registry:
            world.core.report(one, InstanceState.READY, InstanceLoad(), "", world.now_s)
        for number in range(100):
            request = SchedulingRequest(f"s{number}", "m", 100, "t", max_output_tokens=1, keys=chain("s", 4))
            decision = world.core.schedule(request, PoolAnswer("ok", 4), world.now_s, 0.0)
            assert decision.prefill == "", "short: computed where it is decoded"
            world.core.close(decision.decision_id, DecisionState.FINISHED, world.now_s)
        world.now_s += EVERY_S / 10
        assert world.keeper.plan(model, world.core.registry, world.pinned, world.now_s) == []
    assert world.keeper.needs("m")[0] < 0.1
