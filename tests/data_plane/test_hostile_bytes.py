"""Bytes that no honest client sends. Whatever comes: the node answers or closes, and goes on serving others."""

from __future__ import annotations

import random
import socket
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache import _native
from mooncache.errors import ChecksumMismatch, NoSpace, NotFound, ProtocolError, Unauthenticated, VersionSkew
from tests.conditions import wait_until
from tests.data_plane import wire
from tests.data_plane.conftest import Start
from tests.data_plane.wire import Peer, frame, key_of, put_frame


def assert_serves(server: Any, name: str = "alive") -> None:
    """A newcomer can still store and read."""
    with Peer(server) as peer:
        peer.login()
        block = name.encode() * 1000
        assert peer.put([(key_of(name), block)])[0] in {0, 201}
        assert peer.get(key_of(name)) == [(0, block)]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: node\r\n\r\n" * 2,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60),
        bytes(4096),
        b"\xff" * 4096,
        frame(wire.HELLO, bytes(4000)),
        frame(wire.HELLO, bytes(5000)),
        frame(wire.HELLO, b"", meta_bytes=0xFFFFFFFF),
        frame(wire.HELLO, b"", payload_bytes=(1 << 64) - 1),
        frame(wire.PUT, b"", payload_bytes=1 << 30),
        frame(wire.PING),
    ],
)
def test_strangers_are_refused(server: Any, request_bytes: bytes) -> None:
    with Peer(server) as peer:
        peer.send(request_bytes)
        reply = peer.reply()
        assert reply.code in {ProtocolError.code, Unauthenticated.code}
        assert peer.closed()
    assert_serves(server)


def test_version_skew_is_named(server: Any) -> None:
    with Peer(server) as peer:
        reply = peer.call(wire.HELLO, version=3, request_id=99)
        assert (reply.code, reply.request_id) == (VersionSkew.code, 99)
        assert "version 3" in reply.message
        assert "speaks 1" in reply.message
        assert peer.closed()


@pytest.mark.parametrize("opcode", range(1, 21))
def test_random_meta_for_every_opcode(server: Any, opcode: int) -> None:
    rng = random.Random(opcode)
    for size in (0, 1, 3, 4, 8, 40, 300, 70_000):
        with Peer(server) as peer:
            peer.login()
            peer.send(frame(opcode, rng.randbytes(size)))
            try:
                reply = peer.reply()
            except (EOFError, ConnectionError):
                continue
            assert reply.opcode == opcode | 0x80
    assert_serves(server)


def test_counts_that_are_larger_than_the_message(server: Any) -> None:
    for opcode in range(3, 19):
        for count in (1, 4096, 4097, 1 << 31, 0xFFFFFFFF):
            with Peer(server) as peer:
                peer.login()
                peer.send(frame(opcode, struct.pack("<I", count) * 2))
                try:
                    peer.reply()
                except (EOFError, ConnectionError):
                    continue
    assert_serves(server)
    assert server.stats()["store_blocks"] == 1


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_flipped_bit_is_never_stored_or_served(shared_server: Any, data: st.DataObject) -> None:
    block = random.Random(1).randbytes(3000)
    key = key_of(data.draw(st.integers(0, 1 << 60)))
    message = bytearray(put_frame([(key, block)]))
    bit = data.draw(st.integers(0, len(message) * 8 - 1))
    message[bit // 8] ^= 1 << bit % 8
    with Peer(shared_server) as peer:
        peer.login()
        peer.send(bytes(message))
        # A longer length makes the node wait for more: an end of the stream must not make it store what came.
        peer.socket.shutdown(socket.SHUT_WR)
        try:
            reply = peer.reply()
            if reply.code == 0:
                assert wire.codes(reply) == [ChecksumMismatch.code]
            else:
                assert reply.code in {ProtocolError.code, VersionSkew.code}
        except (EOFError, ConnectionError):
            pass
    with Peer(shared_server) as reader:
        assert reader.login().get(key) == [(NotFound.code, b"")]


@pytest.fixture(scope="module")
def shared_server() -> Any:
    server = _native.StoreServer({"secret": wire.SECRET, "capacity_bytes": 16 << 20})
    server.start()
    yield server
    server.stop(1.0)
    assert server.check() == ""


def test_a_recorded_login_opens_nothing(server: Any) -> None:
    with Peer(server) as honest:
        challenge = honest.hello()
        proof = honest.proof(challenge.body[:16])
        assert honest.call(wire.AUTH, proof).code == 0
        nonce = honest.nonce
    with Peer(server) as thief:
        thief.hello(nonce=nonce)
        assert thief.call(wire.AUTH, proof).code == Unauthenticated.code
        assert thief.closed()


def test_tenants_do_not_see_each_other(server: Any) -> None:
    with Peer(server) as one, Peer(server) as two:
        one.login("one")
        two.login("two")
        key = key_of("same name")
        assert one.put([(key, b"one's")]) == [0]
        assert two.get(key) == [(NotFound.code, b"")]
        assert two.put([(key, b"two's")]) == [0]
        assert wire.codes(two.call(wire.REMOVE, wire.keys_meta(key))) == [0]
        assert one.get(key) == [(0, b"one's")]
        # another tenant's token
        challenge = Peer.hello(stranger := Peer(server), "two")
        wrong = stranger.proof(challenge.body[:16], "two", wire.tenant_key("one"))
        assert stranger.call(wire.AUTH, wrong).code == Unauthenticated.code
        stranger.close()
    assert sorted(server.tenants().values()) == ["one", "two"]


def test_a_writers_hello_is_hostile_too(server: Any) -> None:
    def said(number: int, instance: bytes, build: bytes = b"b", started: int = 1) -> bytes:
        texts = b"".join(struct.pack("<H", len(part)) + part for part in (instance, build))
        return struct.pack("<QQ", number, started) + texts

    for refused in (b"", said(7, b"x" * 65), said(7, b"x", b"y" * 999), said(7, b"x")[:-1]):
        with Peer(server) as peer:
            assert peer.hello(writer=refused).code == ProtocolError.code
            assert peer.closed()
    with Peer(server) as stranger:
        assert stranger.hello(writer=said(6, b"never proved")).code == 0
    with Peer(server) as one, Peer(server) as thief, Peer(server) as former, Peer(server) as nobody:
        one.login(writer=said(7, b"\xff\x00\n engine", started=2**64 - 1))
        thief.login("two", writer=said(7, b"renamed"))
        nobody.login(writer=said(0, b"no number"))
        assert former.login().put([(key_of("former"), b"abc")]) == [0]
        assert one.put([(key_of("one"), b"abcd")]) == [0]
        assert nobody.put([(key_of("nobody"), b"abcde")]) == [0]
        assert thief.put([(key_of("two"), b"abcdef")]) == [0]
    found = {row["id"]: row for row in server.writers()}
    assert set(found) == {0, 7}, "strangers take no place, and who has no number is unknown"
    assert found[7]["instance"] == "??? engine", "the first name counts, and it can be printed"
    assert found[7]["bytes"] == 4 + 6
    assert found[0]["bytes"] == 3 + 5


def test_a_client_that_dies_in_mid_put_leaves_nothing(server: Any) -> None:
    block = bytes(8 << 20)
    for cut in (10, 40, 200, 5000, 4 << 20):
        peer = Peer(server).login()
        peer.send(put_frame([(key_of(cut), block)])[:cut])
        peer.close()
    wait_until(lambda: server.stats()["connections_open"] == 0)
    stats = server.stats()
    assert stats["store_blocks"] == stats["store_used_bytes"] == stats["store_reservations"] == 0


def test_waiting_for_space_and_giving_up(start: Start) -> None:
    server = start(capacity_bytes=1 << 20)
    with Peer(server) as holder, Peer(server) as waiter:
        holder.login()
        waiter.login()
        meta = struct.pack("<II", 1, 0) + key_of("held") + struct.pack("<Q", 900_000)
        reply = holder.call(wire.RESERVE, meta)
        grant = reply.body[12:20]
        block = bytes(500_000)
        assert waiter.put([(key_of(1), block)], wait_ms=100) == [NoSpace.code]
        waiter.send(put_frame([(key_of(1), block)], wait_ms=20_000))
        wait_until(lambda: server.stats()["parked_now"] == 1)
        assert wire.codes(holder.call(wire.ABORT, struct.pack("<I", 1) + grant)) == [0]
        assert wire.codes(waiter.reply()) == [0]
        assert waiter.get(key_of(1)) == [(0, block)]


def test_corrupt_block_is_a_miss(server: Any) -> None:
    with Peer(server) as peer:
        peer.login()
        block = random.Random(3).randbytes(10_000)
        assert peer.put([(key_of(1), block)]) == [0]
        assert server.corrupt(_native.tenant_id_of("default"), key_of(1), 4321) == 0
        part = struct.pack("<I", 1) + key_of(1) + struct.pack("<QQ", 0, 100)
        assert struct.unpack_from("<H", peer.call(wire.GET, part).body, 4)[0] == ChecksumMismatch.code
        assert peer.get(key_of(1)) == [(NotFound.code, b"")]
    first, last, overflow, records = server.drain_events(100)
    assert (first, last, overflow) == (1, 2, False)
    assert [records[0], records[56], records[58]] == [1, 2, 3]  # added; removed, corrupt
    assert ("block_corrupt") in [event for _, event, _ in server.drain_log(100)]
