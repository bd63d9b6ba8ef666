"""The gateways that operators see: those that asked lately, wherever they run; and what one may ask of the pool."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from mooncache.conductor.core.decisions import PoolAnswer, PoolState
from mooncache.conductor.core.gateways import COUNT_MAX, LEASE_S, GatewayInfo, Gateways
from mooncache.conductor.messages import USES_MAX
from mooncache.errors import InvalidArgument, TooLarge
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import until
from tests.conductor.support import Conductor, chain, serve


def test_who_is_silent_is_forgotten() -> None:
    known = Gateways()
    known.heard(GatewayInfo("b", "http://b:1"), 0.0)
    known.heard(GatewayInfo("a", "http://a:1"), 1.0)
    known.heard(GatewayInfo("b", "http://b:1", draining=True), 5.0)
    assert known.listed(6.0) == [
        (GatewayInfo("a", "http://a:1"), 5.0),
        (GatewayInfo("b", "http://b:1", draining=True), 1.0),
    ]
    assert [info.gateway_id for info, _ in known.listed(LEASE_S + 2.0)] == ["b"]
    known.heard(GatewayInfo("b", "http://elsewhere:1"), LEASE_S + 2.0)  # hosts may have one name
    assert len(known.listed(LEASE_S + 2.0)) == 2


def test_there_is_a_limit() -> None:
    known = Gateways()
    for number in range(COUNT_MAX + 5):
        known.heard(GatewayInfo(f"g{number}", "http://g:1"), float(number) / COUNT_MAX)
    names = {info.gateway_id for info, _ in known.listed(2.0)}
    assert len(names) == COUNT_MAX and "g4" not in names and "g5" in names


def test_a_gateway_that_asks_for_instances_is_listed(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        me = pb.Gateway(gateway_id="host-8000", url="http://10.0.0.5:8000", software_version="1")
        await c.call("ListInstances", pb.ListInstancesRequest(gateway=me))
        await c.call("ListInstances", pb.ListInstancesRequest())  # an operator's question
        status = await c.call("GetConductorStatus", pb.GetConductorStatusRequest())
        assert [view.gateway for view in status.gateways] == [me]
        for wrong in ({"url": ""}, {"gateway_id": "x" * 300}, {"url": "http://x\n"}):
            fields = {"gateway_id": "g", "url": "http://g:1", "software_version": "1"} | wrong
            with pytest.raises(InvalidArgument):
                await c.call("ListInstances", pb.ListInstancesRequest(gateway=pb.Gateway(**fields)))

    serve(tmp_path, scenario)


def test_another_gateway_is_told_at_once_and_limits_are_leased(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        first, second = (
            pb.Gateway(gateway_id=name, url=f"http://{name}:1", software_version="1") for name in "ab"
        )
        listed = await c.call("ListInstances", pb.ListInstancesRequest(gateway=first))
        assert not listed.gateway_count, "others may not have found this conductor yet"
        waiting = asyncio.create_task(
            c.call(
                "ListInstances",
                pb.ListInstancesRequest(
                    gateway=first, known_version=listed.version, wait_ms=60_000, known_gateways=0
                ),
            )
        )
        await until(lambda: c.service.state.watchers == 1)
        await c.call("ListInstances", pb.ListInstancesRequest(gateway=second))
        assert (await waiting).gateway_count == 2

        def request(sequence: int, **use: Any) -> pb.LeaseLimitsRequest:
            fields = {"tenant": "t", "kind": pb.LIMIT_KIND_CONCURRENCY, "limit": 8, "wanted": 1} | use
            return pb.LeaseLimitsRequest(
                gateway_id="a", gateway_run=1, sequence=sequence, uses=[pb.LimitUse(**fields)]
            )

        answer = await c.call("LeaseLimits", request(1, slice=8, used=3))
        assert answer.gateway_count == 2 and answer.lease_ms and answer.run
        assert (answer.leases[0].slice, answer.leases[0].left) == (6, 5)
        wrongs: list[dict[str, Any]] = [
            {"limit": 0},
            {"limit": math.nan},
            {"used": math.inf},
            {"slice": -1},
            {"left": -math.inf},
            {"kind": 9},
            {"tenant": "../t"},
        ]
        for wrong in wrongs:
            with pytest.raises(InvalidArgument):
                await c.call("LeaseLimits", request(2, **wrong))
        with pytest.raises(InvalidArgument, match="later request"):
            await c.call("LeaseLimits", request(1))
        many = pb.LeaseLimitsRequest(gateway_id="a", sequence=3, uses=[pb.LimitUse()] * (USES_MAX + 1))
        with pytest.raises(TooLarge):
            await c.call("LeaseLimits", many)

    serve(tmp_path, scenario)


def test_which_blocks_the_pool_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(c: Conductor) -> None:
        asked: list[bytes] = []
        answers = [
            PoolAnswer(PoolState.OK, 3),
            PoolAnswer(PoolState.OK, 3, unreachable_nodes=1),
            PoolAnswer(PoolState.TIMEOUT),
        ]

        async def match(keys: bytes, tenant: str = "") -> PoolAnswer:
            asked.append(keys)
            return answers[len(asked) - 1]

        monkeypatch.setattr(c.service.state.pool, "match", match)
        request = pb.FindBlocksRequest(keys=chain("k", 5))
        found = [await c.call("FindBlocks", request) for _ in answers]
        assert [one.known for one in found] == [True, False, False]
        assert found[0].leading_blocks == 3 and asked[0] == chain("k", 5)
        with pytest.raises(InvalidArgument):
            await c.call("FindBlocks", pb.FindBlocksRequest(keys=b"cut"))

    serve(tmp_path, scenario)
