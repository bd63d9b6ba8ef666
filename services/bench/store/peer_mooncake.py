"""The original's store over TCP, driven through its own Python package (extra `[bench]`).

Its master and a client that lends memory run in processes of their own; this module is the third process, the
client that is measured. The connection pool is off in its default and on in its best setting.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from mooncache.bench.worker import Worker, WorkerError, find_tool, serve
from mooncache.cluster.ports import PortPicker

POOL_SETTING = "MC_TCP_ENABLE_CONNECTION_POOL"
_SEGMENT_BYTES = 1 << 30
_BUFFER_BYTES = 256 << 20


class _Process(StrEnum):
    """The processes that use the original's package."""

    HOLDER = "holder"  # lends memory
    CLIENT = "client"  # is measured


def unavailable_reason() -> str | None:
    """None when the original can be run here, else why not."""
    if find_tool("mooncake_master") is None:
        return (
            "the original is not installed: pip install 'mooncache[bench]' (its wheel also needs the Debian "
            "packages libibverbs1 librdmacm1 libnuma1 libcurl4 liburing2)"
        )
    return None


class PeerMooncake:
    """One running instance of the original: master, memory holder and measured client."""

    def __init__(self, *, pool: bool, block_bytes: int, count: int) -> None:
        self._env = {POOL_SETTING: "1" if pool else "0", "GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}
        self._folder = tempfile.TemporaryDirectory(prefix="mooncache-bench-")
        with PortPicker("127.0.0.1") as ports:
            port, metrics_port = ports.any(), ports.any()
        self._log = (Path(self._folder.name) / "master.log").open("wb")
        self._master = subprocess.Popen(
            [
                find_tool("mooncake_master") or "mooncake_master",
                f"--rpc_port={port}",
                "--rpc_address=127.0.0.1",
                f"--metrics_port={metrics_port}",
                "--metrics_host=127.0.0.1",
            ],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **self._env},
            cwd=self._folder.name,
        )
        self._workers: list[Worker] = []
        try:
            self._wait_for_master(port)
            module, target = "mooncache.bench.store.peer_mooncake", f"127.0.0.1:{port}"
            self._workers.append(Worker(module, [_Process.HOLDER, target], env=self._env))
            self.client = Worker(
                module, [_Process.CLIENT, target, str(block_bytes), str(count)], env=self._env
            )
            self._workers.append(self.client)
        except BaseException:
            self.close()
            raise

    def _wait_for_master(self, port: int) -> None:
        deadline_s = time.monotonic() + 20
        while time.monotonic() < deadline_s:
            if self._master.poll() is not None:
                raise WorkerError(f"mooncake_master ended with {self._master.returncode}")
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)
        raise WorkerError("mooncake_master did not listen within 20 s")

    def close(self) -> None:
        for worker in reversed(self._workers):
            worker.close()
        self._master.send_signal(signal.SIGTERM)
        try:
            self._master.wait(3)
        except subprocess.TimeoutExpired:
            self._master.kill()
            self._master.wait()
        self._log.close()
        self._folder.cleanup()


class _PeerClient:
    """Child's side: the operations that are measured. Every answer is checked before its time counts."""

    def __init__(self, store: Any, block_bytes: int, count: int) -> None:
        self._store = store
        self._block, self._count = block_bytes, count
        self._source = np.random.default_rng(1).integers(0, 255, block_bytes * count, dtype=np.uint8)
        self._target = np.zeros_like(self._source)
        for array in (self._source, self._target):
            if store.register_buffer(array.ctypes.data, array.nbytes) != 0:
                raise WorkerError("the original refused register_buffer")
        self._round = 0

    def _pointers(self, array: np.ndarray[Any, Any]) -> list[int]:
        return [array.ctypes.data + i * self._block for i in range(self._count)]

    def batch(self) -> dict[str, object]:
        """One batch put and one batch get of all blocks. Seconds."""
        self._round += 1
        keys = [f"b{self._round}-{i}" for i in range(self._count)]
        sizes = [self._block] * self._count
        started = time.perf_counter()
        put = self._store.batch_put_from(keys, self._pointers(self._source), sizes)
        put_s = time.perf_counter() - started
        started = time.perf_counter()
        got = self._store.batch_get_into(keys, self._pointers(self._target), sizes)
        get_s = time.perf_counter() - started
        if (
            any(put)
            or any(size != self._block for size in got)
            or not np.array_equal(self._source, self._target)
        ):
            raise WorkerError("the original did not store or return every block")
        self._target[:] = 0
        for key in keys:
            self._store.remove(key, True)
        return {"put_s": put_s, "get_s": get_s}

    def small(self, operations: int, size_bytes: int) -> dict[str, Any]:
        """Single puts and gets of small blocks. Lists of seconds."""
        self._round += 1
        puts, gets = [], []
        source, target = self._source.ctypes.data, self._target.ctypes.data
        for i in range(operations):
            key = f"s{self._round}-{i}"
            started = time.perf_counter()
            put = self._store.put_from(key, source, size_bytes)
            puts.append(time.perf_counter() - started)
            started = time.perf_counter()
            got = self._store.get_into(key, target, size_bytes)
            gets.append(time.perf_counter() - started)
            if put != 0 or got != size_bytes:
                raise WorkerError(f"the original answered put {put}, get {got}")
        return {"put_s": puts, "get_s": gets}

    def exist(self, keys: int, repeats: int) -> dict[str, Any]:
        """Batched existence of keys that are there. List of seconds."""
        names = [f"e{i}" for i in range(keys)]
        if not self._store.is_exist(names[0]):
            for name in names:
                self._store.put_from(name, self._source.ctypes.data, 64)
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            found = self._store.batch_is_exist(names)
            times.append(time.perf_counter() - started)
            if sum(found) != keys:
                raise WorkerError("the original does not see keys that were put")
        return {"exist_s": times}


def _child(part: _Process, target: str, block_bytes: int = 0, count: int = 0) -> None:
    from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found, unused-ignore]

    store = MooncakeDistributedStore()
    segment = _SEGMENT_BYTES if part is _Process.HOLDER else 0
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, _BUFFER_BYTES, "tcp", "", target)
    if code != 0:
        raise SystemExit(f"the original's setup answered {code}")
    if part is _Process.HOLDER:
        serve({}, {})
        return
    client = _PeerClient(store, block_bytes, count)
    serve({}, {"batch": client.batch, "small": client.small, "exist": client.exist})


if __name__ == "__main__":
    _child(_Process(sys.argv[1]), sys.argv[2], *(int(argument) for argument in sys.argv[3:]))
