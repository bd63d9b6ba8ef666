"""The turns of paced copies: pure rules, and the copier that keeps to them with two real nodes."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mooncache
from mooncache import _native
from mooncache.auth import derive_tenant_key
from mooncache.client.keys import to_block_key
from mooncache.client.map_keeper import view_of_node
from mooncache.client.native_call import call_native
from mooncache.errors import OK, AlreadyExists, DeadlineExceeded
from mooncache.proto.v1 import common_pb2
from mooncache.store_node.copier import NativeCopier
from mooncache.store_node.core.copy_pace import PIECE_BYTES, CopyPace
from tests.client.test_native_nodes import SECRET, TOKEN, addresses, servers

LATE = DeadlineExceeded.code


@given(
    st.integers(1, 1 << 30),
    st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(1, 1 << 24)), min_size=1, max_size=50),
)
def test_pieces_never_overlap_and_the_pace_is_kept(rate: int, calls: list[tuple[float, int]]) -> None:
    pace, now_s, free_s = CopyPace(), 5.0, 0.0
    for pause_s, size in calls:
        now_s += pause_s
        wait_s = pace.take_turn(size, rate, now_s, 1e12)
        assert wait_s is not None
        begin_s = now_s + wait_s
        assert begin_s == pytest.approx(max(now_s, free_s), rel=1e-9), (
            "no earlier, and no later than it has to be"
        )
        free_s = begin_s + size / rate


def test_a_piece_that_would_wait_too_long_takes_no_turn() -> None:
    pace = CopyPace()
    assert pace.take_turn(100, 10, 1.0, 0.0) == 0.0
    assert pace.take_turn(100, 10, 2.0, 8.9) is None
    assert pace.take_turn(100, 10, 2.0, 9.0) == 9.0
    assert pace.take_turn(1 << 30, 0, 2.0, 0.0) == 0.0, "without a rate nothing waits"
    assert pace.take_turn(1, 10, 2.0, 100.0) == 19.0, "nor does it make others wait"


def node_info(number: int, endpoints: dict[str, object]) -> common_pb2.NodeInfo:
    own = common_pb2.Endpoints(tcp_host="127.0.0.1", tcp_port=endpoints["tcp_port"])  # type: ignore[arg-type]
    return common_pb2.NodeInfo(
        node_id=f"n{number}", host_id=f"h{number}", incarnation=number + 1, endpoints=own
    )


def client_for(tenant: str) -> _native.Client:
    return call_native(_native.Client, {"key": derive_tenant_key(SECRET, tenant), "tenant": tenant})


def test_a_step_comes_piece_by_piece_and_what_would_be_late_is_left() -> None:
    names = ["one", "two", "three"]
    keys = b"".join(to_block_key(name) for name in names)
    data = bytes(PIECE_BYTES * 2 // 3)  # two of them are more than a piece
    with servers(2) as running:
        with mooncache.connect(nodes=addresses(running[:1]), token=TOKEN, shm=False) as pool:
            pool.put_many(names, [data] * 3).raise_for_errors()
        source, own = (node_info(number, server.endpoints()) for number, server in enumerate(running))
        copier = NativeCopier(view_of_node(own), client_for, concurrency=1)
        try:
            first = asyncio.run(copier.copy("default", keys, source, 20.0, 1))
            second = asyncio.run(copier.copy("default", keys, source, 20.0, 1))
            rest = asyncio.run(copier.copy("default", keys, source, 20.0, 0))
        finally:
            copier.close()
    assert first == ([OK, LATE, LATE], len(data)), "at a byte a second the second piece has its turn in days"
    assert second == ([AlreadyExists.code, LATE, LATE], 0), "other calls have their turns after it"
    assert rest == ([AlreadyExists.code, OK, OK], 2 * len(data)), "without a rate there are no turns"
