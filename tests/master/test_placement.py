"""Placement.

The choice equals the golden vectors that the native client is held to; weights follow their rules.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache import _native
from mooncache.master.core.placement import (
    Candidate,
    NodeSpace,
    choose_nodes,
    node_weight,
    rank_nodes,
    slow_start_factor,
)
from tests.master.rules import placement_rules

VECTORS = Path(__file__).parent / "placement_vectors.json"
GIB = 1 << 30
RULES = placement_rules()


def space(*, free: int = GIB, used: int = 0, age_s: float = 1e9, placeable: bool = True) -> NodeSpace:
    return NodeSpace(placeable, free + used, free, used, age_s)


def make_vectors() -> list[dict[str, object]]:
    """How the file was made.

    `python -m tests.master.test_placement > tests/master/placement_vectors.json`.
    """
    rng = random.Random(20)
    cases = []
    for number in range(40):
        nodes = [
            {
                "node_id": f"node-{n}" if number % 4 else f"n\u00f6de-{n}",
                "host_id": f"host-{n // (1 + number % 3)}",
                "weight": rng.choice([0.0, 0.125, 1.0, rng.random() * 64]),
            }
            for n in range(1 + number % 9)
        ]
        key = bytes(32) if number == 0 else rng.randbytes(32)
        local = rng.choice(["", "host-0", "host-1", "host-nowhere"])
        replicas = 1 + number % 4
        candidates = [Candidate(str(n["node_id"]), str(n["host_id"]), float(str(n["weight"]))) for n in nodes]
        cases.append(
            {
                "key": key.hex(),
                "nodes": nodes,
                "ranking": [node.node_id for node in rank_nodes(key, candidates)],
                "local_host_id": local,
                "replicas": replicas,
                "chosen": [node.node_id for node in choose_nodes(key, candidates, replicas, local)],
            }
        )
    return cases


@pytest.mark.parametrize("case", json.loads(VECTORS.read_text(encoding="utf-8")))
def test_golden_vectors(case: dict) -> None:
    key = bytes.fromhex(case["key"])
    nodes = [Candidate(**node) for node in case["nodes"]]
    assert [node.node_id for node in rank_nodes(key, nodes)] == case["ranking"]
    chosen = choose_nodes(key, nodes, case["replicas"], case["local_host_id"])
    assert [node.node_id for node in chosen] == case["chosen"]


def native_choice(key: bytes, nodes: list[Candidate], replicas: int, local_host_id: str) -> list[str]:
    described = [
        {
            "index": index,
            "node_id": node.node_id,
            "host_id": node.host_id,
            "incarnation": 1,
            "tcp_host": "127.0.0.1",
            "tcp_port": 1,
            "unix_path": "",
            "free_bytes": GIB,
            "weight": node.weight,
            "state": "active",
            "arena": "memory" if node.takes_from_its_host else "gpu",
        }
        for index, node in enumerate(nodes)
    ]
    return [nodes[position].node_id for position in _native.place(key, described, local_host_id, replicas)]


@pytest.mark.parametrize("case", json.loads(VECTORS.read_text(encoding="utf-8")))
def test_the_native_client_makes_the_same_choice(case: dict) -> None:
    nodes = [Candidate(**node) for node in case["nodes"]]
    chosen = native_choice(bytes.fromhex(case["key"]), nodes, case["replicas"], case["local_host_id"])
    assert chosen == case["chosen"]


POOLS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.5, 1.0, 40.0]), st.booleans()), max_size=8
)


@given(st.binary(min_size=32, max_size=32), POOLS, st.integers(1, 4), st.sampled_from(["", "a", "nowhere"]))
def test_gpu_memory_is_nobodys_first_choice_for_its_host(
    key: bytes, pool: list[tuple[str, float, bool]], replicas: int, local: str
) -> None:
    nodes = [Candidate(f"n{n}", host, weight, n, near) for n, (host, weight, near) in enumerate(pool)]
    chosen = choose_nodes(key, nodes, replicas, local)
    assert [node.node_id for node in chosen] == native_choice(key, nodes, replicas, local)
    ranked = rank_nodes(key, nodes)
    near = [node for node in ranked if node.host_id == local and node.takes_from_its_host]
    assert chosen[:1] == (near or ranked)[:1]
    assert len(chosen) == min(replicas, len(ranked))


def test_shares_follow_weights() -> None:
    rng = random.Random(1)
    nodes = [Candidate("a", "a", 1.0), Candidate("b", "b", 3.0)]
    first = Counter(rank_nodes(rng.randbytes(32), nodes)[0].node_id for _ in range(8000))
    assert 0.70 < first["b"] / 8000 < 0.80


def test_a_changed_weight_moves_only_that_nodes_keys() -> None:
    rng = random.Random(2)
    before = [Candidate(name, name, 1.0) for name in "abcd"]
    after = [Candidate("a", "a", 0.5), *before[1:]]
    for _ in range(500):
        key = rng.randbytes(32)
        old, new = rank_nodes(key, before)[0].node_id, rank_nodes(key, after)[0].node_id
        assert old in {new, "a"}


def test_local_first_then_distinct_hosts() -> None:
    nodes = [Candidate(f"n{n}", f"h{n // 2}", 1.0) for n in range(6)]
    for number in range(50):
        chosen = choose_nodes(bytes([number]) * 32, nodes, 3, "h1")
        assert chosen[0].host_id == "h1"
        assert len({node.host_id for node in chosen}) == 3
    assert len(choose_nodes(b"k" * 32, nodes, 9)) == 6
    assert choose_nodes(b"k" * 32, [], 2) == []


def test_nodes_that_must_not_receive_have_weight_zero_and_are_not_chosen() -> None:
    assert node_weight(space(placeable=False), RULES) == 0.0
    assert node_weight(space(free=0, used=0), RULES) == 0.0
    assert rank_nodes(b"k" * 32, [Candidate("a", "a", 0.0)]) == []


def test_a_full_node_keeps_a_small_weight_and_small_moves_keep_weights() -> None:
    assert node_weight(space(free=0, used=16 * GIB), RULES) == pytest.approx(1.0)
    assert node_weight(space(free=16 * GIB), RULES) == pytest.approx(16.0)
    one = node_weight(space(free=10 * GIB + GIB // 2, used=5 * GIB + GIB // 2), RULES)
    assert node_weight(space(free=10 * GIB + GIB // 2 - 1000, used=5 * GIB + GIB // 2 + 1000), RULES) == one


def test_slow_start_ramps_by_time_or_bytes() -> None:
    rules = placement_rules(slow_start_s=32.0, slow_start_floor=0.25, slow_start_fill=0.5)
    assert slow_start_factor(space(age_s=0.0), rules) == pytest.approx(0.25)
    assert slow_start_factor(space(age_s=16.0), rules) == pytest.approx(0.625)
    assert slow_start_factor(space(age_s=32.0), rules) == pytest.approx(1.0)
    assert slow_start_factor(space(free=GIB, used=GIB, age_s=0.0), rules) == pytest.approx(1.0)
    assert slow_start_factor(space(age_s=0.0), placement_rules(slow_start_s=0.0)) == pytest.approx(1.0)


if __name__ == "__main__":
    import sys

    sys.stdout.write(json.dumps(make_vectors(), indent=1) + "\n")
