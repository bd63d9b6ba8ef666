"""The other end of the transfer benchmark: a store node's data plane alone, without a master.

As a child process of the benchmark it answers questions on stdin; `serve_forever` is the same for another host.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from mooncache import _native
from mooncache.bench.worker import Worker, serve
from mooncache.client.native_call import call_native


def start_server(
    host: str, port: int, unix_path: str, secret: bytes, arena_bytes: int
) -> _native.StoreServer:
    """A running native server. Raises MooncacheError when it cannot listen or has no memory."""
    settings = {
        "secret": secret,
        "node_id": "bench",
        "tcp_host": host,
        "tcp_port": port,
        "unix_path": unix_path,
        "capacity_bytes": arena_bytes,
        "max_block_bytes": arena_bytes // 2,
        "incarnation": 1,
    }
    server = call_native(_native.StoreServer, settings)
    call_native(server.start)
    return server


class TransferNode:
    """Parent's side: a node in a process of its own, and what it takes to reach it."""

    def __init__(self, arena_bytes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mooncache-bench-")
        self._secret = secrets.token_bytes(32)
        path = str(Path(self._folder.name) / "node" / "n.sock")
        args = [path, str(arena_bytes)]
        # by the environment, not the command line: other users can read that
        env = {"MOONCACHE_BENCH_SECRET": self._secret.hex()}
        try:
            self._worker = Worker("mooncache.bench.transfer.node", args, env=env)
        except BaseException:
            self._folder.cleanup()
            raise
        self.peer: dict[str, Any] = {
            "tcp_host": "127.0.0.1",
            "tcp_port": self._worker.hello["port"],
            "unix_path": path,
            "token": f"mcc1.{self._secret.hex()}",
        }

    def cpu_seconds(self) -> float:
        """Processor time of the node's process so far."""
        return float(self._worker.ask("cpu")["seconds"])

    def stats(self) -> dict[str, int]:
        """The counters of the node's native server."""
        return {name: int(value) for name, value in self._worker.ask("stats").items() if name != "ok"}

    def close(self) -> None:
        self._worker.close()
        self._folder.cleanup()


def serve_forever(host: str, port: int, secret: bytes, arena_bytes: int, stop: threading.Event) -> int:
    """Serve until `stop` is set, and print the address, which `--connect` on the other host wants."""
    server = start_server(host, port, "", secret, arena_bytes)
    print(f"listening on {server.endpoints()['tcp_host']} port {server.endpoints()['tcp_port']}", flush=True)
    try:
        while not stop.wait(1.0):
            server.drain_log(1024)
            server.drain_events(65_536)
    finally:
        server.stop(1.0)
    return 0


def _child(unix_path: str, arena_bytes: int) -> None:
    server = start_server(
        "127.0.0.1", 0, unix_path, bytes.fromhex(os.environ["MOONCACHE_BENCH_SECRET"]), arena_bytes
    )
    try:
        serve(
            {"port": server.endpoints()["tcp_port"]},
            {"cpu": lambda: {"seconds": time.process_time()}, "stats": server.stats},
        )
    finally:
        server.stop(1.0)


if __name__ == "__main__":
    _child(sys.argv[1], int(sys.argv[2]))
