"""The yardstick of the TCP rows: the same bytes over one plain socket, with nothing around them.

The child accepts one connection on loopback. "put" streams the blocks to it and waits for one byte at the end;
"get" asks with one byte and reads the blocks into place. No framing, no check, no index.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Any

from mooncache.bench.worker import Worker, serve


class RawSocket:
    """Parent's side. Times in seconds for one pass over all blocks.

    `receive_bytes` is asked of the kernel at a time: a block, as plain code does, or less, which is quicker here.
    """

    def __init__(self, block_bytes: int, count: int, receive_bytes: int) -> None:
        self._total = block_bytes * count
        self._block = block_bytes
        self._receive_bytes = receive_bytes
        numbers = [str(block_bytes), str(count), str(receive_bytes)]
        self._worker = Worker("mooncache.bench.store.raw_socket", numbers)
        self._socket = socket.create_connection(("127.0.0.1", self._worker.hello["port"]), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put_s(self, source: memoryview) -> float:
        started = time.perf_counter()
        self._socket.sendall(b"p")
        for offset in range(0, self._total, self._block):
            self._socket.sendall(source[offset : offset + self._block])
        self._socket.recv(1)
        return time.perf_counter() - started

    def get_s(self, destination: memoryview) -> float:
        started = time.perf_counter()
        self._socket.sendall(b"g")
        receive_exactly(self._socket, destination, self._receive_bytes)
        return time.perf_counter() - started

    def close(self) -> None:
        self._socket.close()
        self._worker.close()


def receive_exactly(connection: socket.socket, destination: memoryview, step_bytes: int) -> None:
    at = 0
    while at < len(destination):
        received = connection.recv_into(destination[at : at + step_bytes])
        if received == 0:
            raise ConnectionError("the other side closed the raw socket")
        at += received


def _serve_connection(listener: socket.socket, block_bytes: int, count: int, receive_bytes: int) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(b"\x01") * (block_bytes * count))
    while True:
        op = connection.recv(1)
        if op == b"p":
            receive_exactly(connection, memory, receive_bytes)
            connection.sendall(b"k")
        elif op == b"g":
            for offset in range(0, len(memory), block_bytes):
                connection.sendall(memory[offset : offset + block_bytes])
        else:
            return


def _child(block_bytes: int, count: int, receive_bytes: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    numbers = (listener, block_bytes, count, receive_bytes)
    thread = threading.Thread(target=_serve_connection, args=numbers, daemon=True)
    thread.start()
    handlers: dict[str, Any] = {}
    serve({"port": listener.getsockname()[1]}, handlers)


if __name__ == "__main__":
    _child(*(int(number) for number in sys.argv[1:4]))
