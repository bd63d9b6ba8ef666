"""The doctor's check of the ways between nodes: a node is far when all its ways are long, and no other's are."""

from __future__ import annotations

from mooncache.cli.doctor.core import network
from mooncache.cli.doctor.core.facts import PoolFacts
from mooncache.cli.doctor.core.result import Status
from tests.cli.test_doctor import node, pool_of, trouble


def with_ways(**ways_ms: dict[str, float]) -> PoolFacts:
    return pool_of(*(node(name, latencies_ms=took) for name, took in ways_ms.items()))


def test_a_node_that_is_far_from_all_others() -> None:
    found = trouble(
        network.far_nodes(
            with_ways(n1={"n2": 0.2, "n3": 9.0}, n2={"n1": 0.3, "n3": 9.5}, n3={"n1": 8.0, "n2": 9.0})
        )
    )
    assert [(one.subject, one.status) for one in found] == [("n3", Status.WARN)]
    assert "9.00 ms, between others 0.30 ms" in found[0].why
    for near_ms, far_ms in ((0.1, 0.9), (9.0, 9.0), (3.0, 9.0)):
        facts = with_ways(n1={"n2": near_ms, "n3": far_ms}, n2={"n1": near_ms}, n3={"n2": far_ms})
        assert not trouble(network.far_nodes(facts))
    (said,) = network.far_nodes(with_ways(n1={"n2": 0.1}, n2={}))
    assert said.status is Status.SKIPPED
