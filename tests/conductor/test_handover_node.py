"""The store node of a hand-over: which one is named, and that both legs, the record and `why` hear of it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mooncache.client.results import MapNodeState, NodeView
from mooncache.conductor.core.decisions import Decision, PoolAnswer, PoolState, SchedulingRequest
from mooncache.conductor.core.handover_node import NodesByHost, by_host, handover_node
from mooncache.conductor.core.policy.types import Branch
from mooncache.conductor.core.progress import Phase, ProgressReport
from mooncache.conductor.core.registry import InstanceInfo, InstanceState
from mooncache.conductor.core.scheduler import Scheduler
from mooncache.kvcache.block_index import native_index
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conductor.support import DECODE, PREFILL, Conductor, chain, instance, scheduler_settings, serve

KEYS = chain("k", 8)


def node(name: str, host: str, **fields: Any) -> NodeView:
    index = int(name.strip("abcdefghijklmnopqrstuvwxyz") or 0)
    return replace(NodeView(index, name, host, 1, MapNodeState.ACTIVE, "127.0.0.1", 1, ""), **fields)


def test_a_node_on_the_decode_host_is_named() -> None:
    nodes = by_host([node("n1", "p-host"), node("n2", "d-host"), node("n3", "other")])
    assert handover_node(nodes, "d-host", KEYS) == "n2"
    assert handover_node(nodes, "p-host", KEYS) == "n1", "also where both legs are on one host"
    assert handover_node(nodes, "without", KEYS) == ""
    assert handover_node(nodes, "", KEYS) == "", "an instance that did not say where it is"
    assert handover_node(nodes, "d-host", b"") == "", "a prompt without keys"
    assert handover_node({}, "d-host", KEYS) == ""


@pytest.mark.parametrize(
    "change",
    [
        {"state": MapNodeState.DRAINING},
        {"state": MapNodeState.SUSPECT},
        {"state": MapNodeState.DEAD},
        {"weight": 0.0},
        {"arena": "gpu"},
        {"named": False},
    ],
)
def test_a_node_that_takes_no_new_blocks_is_not_named(change: dict[str, Any]) -> None:
    assert handover_node(by_host([node("n1", "h", **change)]), "h", KEYS) == ""
    assert handover_node(by_host([node("n1", "h", **change), node("n2", "h")]), "h", KEYS) == "n2"


def test_nodes_of_one_host_share_the_requests() -> None:
    nodes = by_host([node(f"n{number}", "h") for number in range(1, 5)])
    named = Counter(handover_node(nodes, "h", chain(f"k{number}", 4)) for number in range(400))
    assert set(named) == {"n1", "n2", "n3", "n4"} and min(named.values()) > 50
    assert len({handover_node(nodes, "h", KEYS) for _ in range(5)}) == 1, "one request, one node"


def test_the_decode_leg_that_waits_already_keeps_its_node() -> None:
    nodes = by_host([node(f"n{number}", "h") for number in range(1, 5)])
    for kept in ("n1", "n2", "n3", "n4"):
        assert handover_node(nodes, "h", KEYS, kept=kept) == kept
    assert handover_node(nodes, "h", KEYS, kept="gone") in {"n1", "n2", "n3", "n4"}


def test_two_requests_with_the_same_blocks_name_one_node_or_none() -> None:
    nodes = by_host([node(f"n{number}", "h") for number in range(1, 5)] + [node("n9", "elsewhere")])
    for theirs in ("n1", "n2", "n3", "n4"):
        assert handover_node(nodes, "h", KEYS, others=[theirs, theirs]) == theirs
    for theirs in (["n9"], [""], ["n1", "n2"], ["n1", ""]):
        assert handover_node(nodes, "h", KEYS, others=theirs) == "", theirs


class Fleet:
    """A scheduler with two prefill instances on one host and two decode instances on hosts of their own."""

    def __init__(self, nodes: NodesByHost) -> None:
        self.core = Scheduler(scheduler_settings(), random.Random(1), native_index)
        self.nodes, self.now_s, self.count = nodes, 0.0, 0
        for name, role, host in (
            ("p1", "prefill", "hp"),
            ("p2", "prefill", "hp"),
            ("d1", "decode", "h1"),
            ("d2", "decode", "h2"),
        ):
            info = InstanceInfo(
                name,
                1,
                role,
                "m",
                group=1,
                kv_bytes_per_token=1024,
                max_sequences=64,
                host_id=host,
                pool=True,
            )
            self.core.register(info, InstanceState.READY, 0.0)

    def schedule(self, keys: bytes, name: str = "", *, in_pool: int = 0, **fields: Any) -> Decision:
        self.count += 1
        request = SchedulingRequest(
            name or f"r{self.count}", "m", len(keys) // 32 * 16 + 5, "t", keys, group=1, **fields
        )
        pool = PoolAnswer(PoolState.OK, in_pool, nodes=self.nodes)
        return self.core.schedule(request, pool, self.now_s, 0.0)


ONE_EACH = by_host([node("n0", "hp"), node("n1", "h1"), node("n2", "h2")])
AT = {"d1": "n1", "d2": "n2"}


def test_the_plan_names_the_node_of_its_decode_instance() -> None:
    fleet = Fleet(ONE_EACH)
    for number in range(6):
        decision = fleet.schedule(chain(f"k{number}", 400))
        assert decision.prefill and decision.store_node == AT[decision.decode]
        record = decision.record.to_json(fleet.core.settings.rules)
        assert f'"store_node": "{decision.store_node}"' in record
    assert {AT[name] for name in AT} == {"n1", "n2"}
    assert fleet.schedule(chain("short", 2)).store_node == "", "decode computes it: nothing is handed over"
    fleet.core.check()


def test_a_second_plan_for_a_waiting_decode_leg_names_its_node_again() -> None:
    fleet = Fleet(
        by_host([*[node(f"n{n}", "h1") for n in (1, 2, 3)], *[node(f"m{n}", "h2") for n in (1, 2, 3)]])
    )
    first = fleet.schedule(chain("k", 400), "r")
    again = fleet.schedule(chain("k", 400), "r", attempt=2, exclude=frozenset({first.prefill}))
    assert again.prefill not in ("", first.prefill)
    assert (again.decode, again.store_node) == (first.decode, first.store_node)


def test_who_waits_for_another_request_waits_where_its_blocks_come() -> None:
    fleet = Fleet(ONE_EACH)
    long = chain("doc", 2000)
    maker = fleet.schedule(long)
    seen = set()
    for number in range(8):
        waiter = fleet.schedule(chain(f"q{number}", 2010, parent="doc", shared=2000))
        if waiter.choice.branch is Branch.WAIT:
            seen.add((waiter.decode, waiter.store_node))
    assert seen, "some request waits"
    assert {node for decode, node in seen if AT[decode] == maker.store_node} <= {maker.store_node}
    assert {node for decode, node in seen if AT[decode] != maker.store_node} <= {""}


def test_blocks_that_the_pool_has_already_bind_no_request_to_a_node() -> None:
    """Requests that share a prefix which is in the pool make different blocks: each has its own decode host's node."""
    fleet = Fleet(ONE_EACH)
    for number in range(8):
        keys = chain(f"q{number}", 400, parent="system", shared=100)
        decision = fleet.schedule(keys, in_pool=100)
        assert decision.store_node == AT[decision.decode]


def test_both_legs_and_why_hear_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(instance("p", PREFILL, host_id="hp"), instance("d", DECODE, host_id="hd"))
        nodes = by_host([node("n1", "hd")])

        async def match(keys: bytes, tenant: str = "") -> PoolAnswer:
            return PoolAnswer(PoolState.OK, 0, nodes=nodes)

        monkeypatch.setattr(c.service.state.pool, "match", match)
        plan = await c.schedule("r1", chain("a", 100))
        assert (plan.prefill.instance_id, plan.store_node) == ("p", "n1")
        assert (await c.record("r1"))["chosen"]["store_node"] == "n1"
        refused = await c.schedule("r2", b"", model="other")
        assert not refused.admitted and refused.store_node == ""
        await c.progress(plan.decision_id, pb.REQUEST_PHASE_FINISHED)

    serve(tmp_path, scenario)


def test_a_request_that_ended_well_leaves_nothing_to_be_given_up() -> None:
    fleet = Fleet(ONE_EACH)
    decision = fleet.schedule(chain("k", 400))
    fleet.core.report_progress(decision.decision_id, ProgressReport(Phase.FINISHED), 1.0)
    assert not fleet.core.take_give_ups(2.0)
    fleet.core.check()
