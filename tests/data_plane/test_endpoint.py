"""ENDPOINT and exposures, as a peer without any RDMA device may send them: queue pairs that cannot be, and none.

Over the fake libibverbs of the native tests where it is built (make native-test); what a node without
RDMA answers is tested everywhere.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncache.errors import InvalidArgument, ProtocolError, Unauthenticated
from mooncache.store_node.state import StoreNodeState
from tests.data_plane import wire
from tests.data_plane.conftest import Start
from tests.data_plane.wire import ENDPOINT, EXPOSE, Peer, frame, key_of, keys_meta

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("MOONCACHE_TEST_NATIVE_BUILD", ROOT / "build" / "release"))
FAKE = BUILD / "libfake_ibverbs.so"
ADDRESS = struct.Struct("<HHBBBBII16s")
EXPOSURE = struct.Struct("<HHIQ8I")
TRANSPORT_UNAVAILABLE = 404


def address(layer: int = 2, mtu: int = 3, reads: int = 4, queue_pair: int = 5) -> bytes:
    return ADDRESS.pack(0, 0, layer, mtu, reads, 0, queue_pair, 1, bytes(10) + b"\xff\xff\x0a\x09\x00\x01")


def counted(*items: bytes) -> bytes:
    return struct.pack("<I", len(items)) + b"".join(items)


@pytest.fixture
def rdma_server(start: Start) -> Any:
    if not FAKE.exists():
        pytest.skip(f"{FAKE} is not built (make native-test)")
    server = start(rdma_library=str(FAKE), unix_path="")
    assert server.rails(), "the fake library has a device"
    return server


def test_without_rdma_the_answer_is_a_reason(start: Start) -> None:
    server = start(rdma_enabled=False, unix_path="")
    assert server.rails() == []
    with Peer(server) as peer:
        peer.login()
        answer = peer.call(ENDPOINT, counted(address()))
        assert answer.code == TRANSPORT_UNAVAILABLE and "RDMA unavailable, because" in answer.message
        assert peer.put([(key_of("after"), b"x" * 100)]) == [0]


def test_what_is_counted_of_a_rail_can_be_told_to_the_master(rdma_server: Any) -> None:
    (reported,) = StoreNodeState.rails(cast("StoreNodeState", SimpleNamespace(core=rdma_server)))
    assert reported.device == "fake0" and reported.up and reported.mtu_bytes == 4096


def test_strangers_get_no_queue_pair(rdma_server: Any) -> None:
    with Peer(rdma_server) as peer:
        assert peer.call(ENDPOINT, counted(address())).code == Unauthenticated.code
        assert peer.closed()


def test_a_queue_pair_and_an_exposure(rdma_server: Any) -> None:
    with Peer(rdma_server) as peer:
        peer.login()
        answer = peer.call(ENDPOINT, counted(address()))
        assert answer.code == 0
        assert ADDRESS.unpack_from(answer.body, 4)[0] == 0
        assert [rail["connections"] for rail in rdma_server.rails()] == [1]
        peer.put([(key_of("block"), b"x" * 5000)])
        found = peer.call(wire.LOOKUP, keys_meta(key_of("block"), key_of("nothing")), flags=EXPOSE)
        exposures = found.body[4 + 2 * 56 + 4 :]
        first, second = EXPOSURE.unpack_from(exposures), EXPOSURE.unpack_from(exposures, EXPOSURE.size)
        assert first[0] == 0 and first[4] != 0 and first[3] < 4096  # an offset in a page, no pointer
        assert second[0] == TRANSPORT_UNAVAILABLE and not any(second[4:])
        assert rdma_server.rails()[0]["granted_bytes"] == 5000


@pytest.mark.parametrize(
    "wrong",
    [
        *(address(layer=0), address(layer=1), address(layer=9), address(mtu=0), address(mtu=6)),
        address(reads=0),
    ],
)
def test_a_queue_pair_that_cannot_be_is_refused_alone(rdma_server: Any, wrong: bytes) -> None:
    with Peer(rdma_server) as peer:
        peer.login()
        answer = peer.call(ENDPOINT, counted(wrong))
        assert answer.code == 0 and ADDRESS.unpack_from(answer.body, 4)[0] != 0
        assert ADDRESS.unpack_from(peer.call(ENDPOINT, counted(address())).body, 4)[0] == 0


def test_their_number_is_bounded(rdma_server: Any) -> None:
    with Peer(rdma_server) as peer:
        peer.login()
        assert peer.call(ENDPOINT, counted()).code == InvalidArgument.code
        assert peer.call(ENDPOINT, counted(*[address()] * 9)).code == InvalidArgument.code
        assert peer.call(ENDPOINT, counted(*[address()] * 8)).code == 0


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=400),
        st.lists(st.binary(min_size=32, max_size=32), max_size=9).map(lambda a: counted(*a)),
    )
)
def test_any_bytes_leave_the_node_serving(rdma_server: Any, meta: bytes) -> None:
    with Peer(rdma_server) as peer:
        peer.login()
        peer.send(frame(ENDPOINT, meta))
        answer = peer.reply()
        if answer.code == ProtocolError.code:
            assert peer.closed()
        else:
            found = peer.call(wire.LOOKUP, keys_meta(key_of("none")), flags=EXPOSE)
            assert found.code == 0
