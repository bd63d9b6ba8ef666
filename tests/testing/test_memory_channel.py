"""The in-memory network under virtual time: same table, same wrapper, every fault drawn from the seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mooncache import errors
from mooncache.proto.v1 import master_pb2 as pb
from mooncache.runtime.clock import LoopClock
from mooncache.runtime.run_op import OpRunner
from mooncache.testing import virtual_time
from mooncache.testing.memory_channel import MemoryNetwork, NetworkFaults
from tests.runtime.service.support import PlainAuthenticator, table

World = tuple[MemoryNetwork, dict[str, Any]]


def simulate(
    main: Callable[[MemoryNetwork, dict[str, Any]], Awaitable[Any]], seed: int = 1, **faults: float
) -> Any:
    async def world() -> Any:
        clock = LoopClock()
        network = MemoryNetwork(clock, random.Random(seed), NetworkFaults(**faults))
        state: dict[str, Any] = {}
        network.serve("master", OpRunner(table(state), clock), PlainAuthenticator())
        return await main(network, state)

    return virtual_time.run(world(), seed)


def test_calls_refusals_and_identity() -> None:
    async def main(network: MemoryNetwork, state: dict[str, Any]) -> None:
        link = network.channel("a", "master", token="tenant")
        answer = await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 1.0)
        assert (answer.master_id, answer.leading) == ("t", False)
        with pytest.raises(errors.PermissionDenied):
            await link.call("ReportBlocks", pb.ReportBlocksRequest(), pb.ReportBlocksResponse, 1.0)
        with pytest.raises(errors.StaleIncarnation, match="newer"):
            await link.call("GetTask", pb.GetTaskRequest(task_id="stale"), pb.GetTaskResponse, 1.0)
        with pytest.raises(errors.Unauthenticated):
            await network.channel("a", "master").call(
                "GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 1.0
            )
        with pytest.raises(errors.Unsupported):
            await link.call("NoSuchMethod", pb.GetStatusRequest(), pb.GetStatusResponse, 1.0)
        nobody = network.channel("a", "nobody", unavailable_error=errors.NodeUnavailable)
        with pytest.raises(errors.NodeUnavailable):
            await nobody.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 1.0)
        await link.close()
        with pytest.raises(errors.Closed):
            await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 1.0)

    simulate(main)


def test_a_lost_message_costs_the_deadline_and_no_more() -> None:
    async def main(network: MemoryNetwork, state: dict[str, Any]) -> float:
        with pytest.raises(errors.DeadlineExceeded):
            await network.channel("a", "master", token="admin").call(
                "GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 2.0
            )
        return asyncio.get_running_loop().time()

    assert simulate(main, loss=1.0) == pytest.approx(2.0)


def test_partitions_and_healing() -> None:
    async def main(network: MemoryNetwork, state: dict[str, Any]) -> None:
        link = network.channel("a", "master", token="admin")
        network.partition({"a", "b"}, {"master"})
        with pytest.raises(errors.DeadlineExceeded):
            await link.call("Heartbeat", pb.HeartbeatRequest(last_seq=1), pb.HeartbeatResponse, 1.0)
        network.heal()
        network.block("master", "a", both_ways=False)  # carried out, but the answer never comes
        with pytest.raises(errors.DeadlineExceeded):
            await link.call("Heartbeat", pb.HeartbeatRequest(last_seq=2), pb.HeartbeatResponse, 1.0)
        network.heal()
        assert (
            await link.call("Heartbeat", pb.HeartbeatRequest(last_seq=3), pb.HeartbeatResponse, 1.0)
        ).epoch == 3
        assert state["heartbeats"] == [2, 3]

    simulate(main)


def test_killed_services_cut_their_calls_off() -> None:
    async def main(network: MemoryNetwork, state: dict[str, Any]) -> None:
        link = network.channel("a", "master", token="admin")
        call = asyncio.ensure_future(
            link.call("GetTask", pb.GetTaskRequest(task_id="wait"), pb.GetTaskResponse, 20.0)
        )
        await asyncio.sleep(1)
        network.stop("master")
        with pytest.raises(errors.MasterUnavailable, match="went away"):
            await call

    simulate(main)


def test_repeated_and_reordered_messages_reach_the_op() -> None:
    async def main(network: MemoryNetwork, state: dict[str, Any]) -> list[int]:
        link = network.channel("a", "master", token="admin")
        calls = [
            link.call("Heartbeat", pb.HeartbeatRequest(last_seq=i), pb.HeartbeatResponse, 30.0)
            for i in range(50)
        ]
        await asyncio.gather(*calls)
        await asyncio.sleep(30)
        return list(state["heartbeats"])

    seen = simulate(main, duplicate=0.5, delay_max_s=5.0)
    assert set(seen) == set(range(50))
    assert len(seen) > 55
    assert seen != sorted(seen)
    assert seen == simulate(main, duplicate=0.5, delay_max_s=5.0)
    assert seen != simulate(main, seed=2, duplicate=0.5, delay_max_s=5.0)


def test_what_was_drawn_is_counted() -> None:
    async def main(network: MemoryNetwork, state: dict[str, Any]) -> dict[str, int]:
        link = network.channel("a", "master", token="admin")
        calls = [
            link.call("Heartbeat", pb.HeartbeatRequest(last_seq=i), pb.HeartbeatResponse, 3.0)
            for i in range(100)
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        failed = sum(isinstance(outcome, errors.DeadlineExceeded) for outcome in outcomes)
        assert failed == network.counts["lost"]
        return dict(network.counts)

    counts = simulate(main, loss=0.2)
    assert 20 <= counts["lost"] <= 60
    assert counts["sent"] == 100 + counts["delivered"]
