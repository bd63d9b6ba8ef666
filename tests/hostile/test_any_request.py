"""Whoever holds a token may send any request: it is answered, or refused by a code that is meant."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncache import errors
from mooncache.auth import Authenticator
from mooncache.conductor.core.decisions import PoolAnswer, PoolState
from mooncache.conductor.ops.table import conductor_table
from mooncache.conductor.state import ConductorState
from mooncache.master.ops.table import master_table
from mooncache.proto.v1 import conductor_pb2
from mooncache.runtime import logs
from mooncache.runtime.clock import LoopClock
from mooncache.runtime.metrics import Metrics
from mooncache.runtime.rpc import CONDUCTOR_SERVICE, MASTER_SERVICE, methods_of
from mooncache.runtime.run_op import OpRunner
from mooncache.testing import virtual_time
from tests.conductor.support import PASSPORT, chain, config_at, instance
from tests.hostile.any_message import any_message
from tests.master.simulation.world import CLUSTER, KNOWN_KEYS, World

KEYS = sorted(KNOWN_KEYS)[:3]
MASTER = {
    "node_id": ["a"],
    "keys": [b"".join(KEYS), KEYS[0]],
    "tenant": ["", "default"],
    "replica_count": [1, 2],
    "part_index": [0, 1],
    "ReportBlocksRequest.kind": [1, 2, 3, 4],
}
CONDUCTOR = {
    "instance_id": ["p", "d"],
    "incarnation": [1],
    "model": ["m"],
    "url": ["http://127.0.0.1:1"],
    "block_tokens": [16],
    "passport_json": [PASSPORT],
    "keys": [chain("a", 3)],
    "prompt_tokens": [60],
    "stored": [chain("a", 2)],
    "sequence": [1, 2],
}
Steps = list[tuple[str, Any]]


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    logs.setup("test", level="critical")
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def requests(service: Any, known: dict[str, list[Any]]) -> st.SearchStrategy[Steps]:
    """Some calls after each other: (RPC, request)."""
    calls = [
        any_message(method.request_class, known).map(lambda message, name=name: (name, message))
        for name, method in methods_of(service).items()
    ]
    return st.lists(st.one_of(calls), min_size=1, max_size=8)


def cluster_token() -> Any:
    return Authenticator(CLUSTER).identify(f"Bearer {CLUSTER.text}")


async def send(runner: OpRunner, steps: Steps, timeout_s: float = 2.0) -> None:
    for method, message in steps:
        try:
            await runner.run(
                method,
                message.SerializeToString(),
                identify=cluster_token,
                request_id="r",
                timeout_s=timeout_s,
            )
        except errors.Internal as error:
            error.add_note(f"{method}: {message}")
            raise
        except errors.MooncacheError:
            pass


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(requests(MASTER_SERVICE, {**MASTER, "incarnation": [1]}))
def test_a_master_answers_or_refuses(steps: Steps) -> None:
    async def run() -> None:
        world = World(1)
        node = world.add_node("a")
        for key in KEYS:
            node.put(key)
        await world.converge()
        for _, message in steps:
            if getattr(message, "node_id", "") == "a" and getattr(message, "incarnation", 0) == 1:
                message.incarnation = node.incarnation
        await send(OpRunner(master_table(world.master.state), world.clock), steps)
        world.master.state.check()
        await world.clock.sleep(1.0)
        world.master.state.check()
        await world.stop()

    virtual_time.run(run(), seed=1)


class NoPool:
    connected, node_count = False, 0

    async def match(self, keys: bytes, tenant: str = "") -> PoolAnswer:
        return PoolAnswer(PoolState.ABSENT)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(requests(CONDUCTOR_SERVICE, CONDUCTOR))
def test_a_conductor_answers_or_refuses(tmp_path: Path, steps: Steps) -> None:
    async def run() -> None:
        clock = LoopClock()
        state = ConductorState(
            config_at(tmp_path),
            clock=clock,
            pool=NoPool(),
            metrics=Metrics("conductor"),
            rng=random.Random(1),
        )
        first = [
            ("RegisterInstance", conductor_pb2.RegisterInstanceRequest(instance=instance("p"))),
            ("RegisterInstance", conductor_pb2.RegisterInstanceRequest(instance=instance("d"))),
        ]
        runner = OpRunner(conductor_table(state), clock)
        for step in [*first, *steps]:
            await send(runner, [step])
            state.check()

    virtual_time.run(run(), seed=1)
