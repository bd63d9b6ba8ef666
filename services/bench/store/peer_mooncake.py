"""The original's store, driven through its own Python package (extra `[bench]`, or a folder with another build).

Its master, a client that lends memory, and the client that is measured run in processes of their own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mooncache.bench.store.same_calls import MeasuredPart
from mooncache.bench.worker import Worker, WorkerError, find_tool
from mooncache.cluster.ports import PortPicker

DEFAULT: Final = {"MC_TCP_ENABLE_CONNECTION_POOL": "0"}
POOLED: Final = {"MC_TCP_ENABLE_CONNECTION_POOL": "1"}
"""Variables of the original: TCP with a connection for each transfer, which is its default, and with kept ones."""
_SAME_CALLS: Final = "mooncache.bench.store.same_calls"


def _master_program(build: Path | None) -> str | None:
    """Its master: of the installed package, or of a folder into which pip put another build."""
    if build is None:
        return find_tool("mooncake_master")
    program = build / "mooncake" / "mooncake_master"
    return str(program) if program.is_file() else None


def unavailable_reason(build: Path | None) -> str | None:
    """None when the original can be run here, else why not."""
    if _master_program(build) is not None:
        return None
    if build is not None:
        return (
            f"{build} holds no build of the original: "
            f"pip install --no-deps --target {build} mooncake-transfer-engine-non-cuda"
        )
    return (
        "the original is not installed: pip install 'mooncache[bench]' (its wheel also needs the Debian "
        "packages libibverbs1 librdmacm1 libnuma1 libcurl4 liburing2)"
    )


class PeerMooncake:
    """One running instance of the original: master, memory holder and measured client."""

    def __init__(
        self, settings: Mapping[str, str], *, build: Path | None, block_bytes: int, count: int
    ) -> None:
        self._env = {**settings, "GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}
        if build is not None:
            self._env["PYTHONPATH"] = os.pathsep.join([str(build), os.environ.get("PYTHONPATH", "")])
        self._folder = tempfile.TemporaryDirectory(prefix="mooncache-bench-")
        with PortPicker("127.0.0.1") as ports:
            port, metrics_port = ports.any(), ports.any()
        self._log = (Path(self._folder.name) / "master.log").open("wb")
        self._master = subprocess.Popen(
            [
                _master_program(build) or "mooncake_master",
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
            target = f"127.0.0.1:{port}"
            self._workers.append(Worker(_SAME_CALLS, [MeasuredPart.HOLDER, target], env=self._env))
            measured = [MeasuredPart.ORIGINAL, target, str(block_bytes), str(count)]
            self.client = Worker(_SAME_CALLS, measured, env=self._env)
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
