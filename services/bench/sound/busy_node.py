"""Small gets at a node whose one loop also sends bulk on 48 connections: how long do they wait?"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median, quantiles

from mooncache.auth import derive_tenant_key, keyed_hash
from mooncache.errors import NodeUnavailable, ProtocolError
from mooncache.reporting.rows import Row, bar_row

_BULK_CONNECTIONS = 48
_BULK_BYTES = 8 << 20
_SMALL_BYTES = 4 << 10
_SMALL_KEY, _BULK_KEY = b"small".ljust(32, b"\0"), b"bulk".ljust(32, b"\0")
_AT_MOST_MS = 5.0
_TIMEOUT_S = 30.0

_TENANT = "default"
_HEADER = struct.Struct("<IBBHQQII")
_MAGIC, _VERSION = 0x314B434D, 1
_HELLO, _AUTH, _PUT, _GET = 1, 2, 3, 4


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """p99 of a 4 KiB get with one request after the other, alone and beside the bulk; medians of the rounds.

    The receivers are one process that throws the bulk away unread, so the node has a core for itself.
    """
    gets, rounds = (500, 3) if quick else (2000, 7)
    context = get_context("spawn")
    secret = os.urandom(32)
    ours, theirs = context.Pipe()
    node = context.Process(target=_serve, args=(secret, theirs), name="busy-node")
    node.start()
    try:
        if not ours.poll(_TIMEOUT_S):
            raise NodeUnavailable("The store server did not start.")
        port = int(ours.recv())
        small = _RawPeer(port, secret)
        for key, size in ((_SMALL_KEY, _SMALL_BYTES), (_BULK_KEY, _BULK_BYTES)):
            small.put(key, os.urandom(size))
        alone, beside = [], []
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            alone.append(_p99_ms(small, gets))
            readers = context.Process(target=_read_bulk, args=(port, secret, theirs), name="bulk-readers")
            readers.start()
            try:
                if not ours.poll(_TIMEOUT_S) or ours.recv() != "reading":
                    raise NodeUnavailable("The bulk readers did not start.")
                beside.append(_p99_ms(small, gets))
            finally:
                readers.kill()
                readers.join()
    finally:
        node.kill()
        node.join()
    return [
        Row("4 KiB get at the node alone, p99", median(alone), "ms"),
        bar_row(
            f"4 KiB get at the node beside {_BULK_CONNECTIONS} bulk connections, p99",
            median(beside),
            "ms",
            at_most=_AT_MOST_MS,
        ),
    ]


def _serve(secret: bytes, progress: Connection) -> None:
    from mooncache import _native

    server = _native.StoreServer(
        {"secret": secret, "tcp_host": "127.0.0.1", "io_threads": 1, "capacity_bytes": 64 << 20}
    )
    server.start()
    progress.send(server.endpoints()["tcp_port"])
    while True:
        time.sleep(_TIMEOUT_S)


def _read_bulk(port: int, secret: bytes, progress: Connection) -> None:
    """Every connection asks again as soon as it has what it asked for."""
    peers = {peer.fileno(): peer for peer in (_RawPeer(port, secret) for _ in range(_BULK_CONNECTIONS))}
    ready = select.epoll()
    for number, peer in peers.items():
        ready.register(number, select.EPOLLIN)
        peer.ask(_BULK_KEY)
        peer.ask(_BULK_KEY)
    scratch = bytearray(1 << 20)
    answer_bytes = _BULK_BYTES + peer.overhead_bytes
    taken = dict.fromkeys(peers, 0)
    announced = False
    while True:
        for number, _ in ready.poll():
            got = peers[number].socket.recv_into(
                scratch, len(scratch), socket.MSG_TRUNC | socket.MSG_DONTWAIT
            )
            taken[number] += got
            while taken[number] >= answer_bytes:
                taken[number] -= answer_bytes
                peers[number].ask(_BULK_KEY)
        if not announced and all(taken.values()):
            announced = True
            progress.send("reading")


def _p99_ms(peer: _RawPeer, gets: int) -> float:
    times = []
    for _ in range(gets):
        started = time.perf_counter()
        peer.ask(_SMALL_KEY)
        payload = peer.answer()
        times.append(time.perf_counter() - started)
        if len(payload) != _SMALL_BYTES:
            raise ProtocolError("The node did not answer with the block.")
    return quantiles(times, n=100)[-1] * 1e3


class _RawPeer:
    """As little of the data plane's wire format as this needs, so that no client's work is measured."""

    # the head of an answer to GET with one key: the frame's header, a status without text, a count, one result
    overhead_bytes = _HEADER.size + 4 + 4 + 24

    def __init__(self, port: int, secret: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), _TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = os.urandom(16)
        name = struct.pack("<H", len(_TENANT)) + _TENANT.encode()
        self._send(_HELLO, struct.pack("<HHI", 0, 0, os.getpid()) + nonce + name + bytes(4))
        challenge = self._receive()[0][4:20]
        proof = b"mooncache hello c v1" + challenge + nonce + _TENANT.encode()
        self._send(_AUTH, keyed_hash(derive_tenant_key(secret, _TENANT), proof))
        self._receive()

    def fileno(self) -> int:
        return self.socket.fileno()

    def put(self, key: bytes, block: bytes) -> None:
        from mooncache import _native

        meta = struct.pack("<I", 1) + key + struct.pack("<QII", len(block), _native.crc32c(block), 0)
        self._send(_PUT, meta, block)
        self._receive()

    def ask(self, key: bytes) -> None:
        self._send(_GET, struct.pack("<I", 1) + key + struct.pack("<QQ", 0, 1 << 40))

    def answer(self) -> bytes:
        return self._receive()[1]

    def _send(self, opcode: int, meta: bytes, payload: bytes = b"") -> None:
        from mooncache import _native

        head = _HEADER.pack(_MAGIC, _VERSION, opcode, 0, 1, len(payload), len(meta), 0)[:28]
        check = _native.crc32c(meta, _native.crc32c(head))
        self.socket.sendall(head + struct.pack("<I", check) + meta + payload)

    def _receive(self) -> tuple[bytes, bytes]:
        """Meta and payload. Raises ProtocolError when the node refuses."""
        *_, payload_bytes, meta_bytes, _ = _HEADER.unpack(self._take(_HEADER.size))
        meta = self._take(meta_bytes)
        if meta[:2] != bytes(2):
            raise ProtocolError(f"The node answered {meta!r}.")
        return meta, self._take(payload_bytes)

    def _take(self, size: int) -> bytes:
        taken = bytearray()
        while len(taken) < size:
            part = self.socket.recv(size - len(taken))
            if not part:
                raise ProtocolError("The node closed the connection.")
            taken += part
        return bytes(taken)
