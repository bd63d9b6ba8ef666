"""Third parties on loopback: a real etcd server, and the Leases of a Kubernetes API, in folders that go away."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conditions import wait_until
from tests.coordination.kubernetes_api import KubernetesApi, running_api
from tests.ports import own_port
from tests.processes import freeze


class EtcdServer:
    """An etcd server, alone or one of several `members`. `pause` and `resume` stop and continue its process."""

    def __init__(self, folder: Path, name: str = "t") -> None:
        self.folder, self.name = folder, name
        self.port, self.peer_port = own_port(), own_port()
        self.members = [self]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def _peer(self) -> str:
        return f"http://127.0.0.1:{self.peer_port}"

    def start(self) -> None:
        self.begin()
        self.wait_healthy()

    def begin(self) -> None:
        """Start its process, and wait for nothing."""
        client = f"http://{self.endpoint}"
        command = [
            "etcd",
            "--name",
            self.name,
            "--data-dir",
            str(self.folder / "data"),
            "--log-level",
            "error",
        ]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", self._peer, "--initial-advertise-peer-urls", self._peer]
        command += ["--initial-cluster", ",".join(f"{each.name}={each._peer}" for each in self.members)]
        with (self.folder / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait_healthy(self) -> None:
        """Until a majority has elected one and takes writes."""

        def healthy() -> bool:
            assert self.process is not None and self.process.poll() is None, self.log()
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://{self.endpoint}/health", timeout=1) as answer,
            ):
                return b'"true"' in answer.read()
            return False

        wait_until(healthy, self.log)

    def log(self) -> str:
        return (self.folder / "etcd.log").read_text()

    def pause(self) -> None:
        assert self.process is not None
        freeze(self.process.pid)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(60)
            self.process = None


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    if shutil.which("etcd") is None:
        pytest.skip("no etcd binary; install the Debian package etcd-server")
    server = EtcdServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[KubernetesApi]:
    with running_api(tmp_path / "kubernetes") as server:
        yield server


@pytest.fixture
def etcd_members(tmp_path: Path) -> Iterator[list[EtcdServer]]:
    """Three members of one etcd."""
    if shutil.which("etcd") is None:
        pytest.skip("no etcd binary; install the Debian package etcd-server")
    servers = [EtcdServer(tmp_path / name, name) for name in ("m1", "m2", "m3")]
    for server in servers:
        server.folder.mkdir()
        server.members = servers
        server.begin()
    try:
        for server in servers:
            server.wait_healthy()
        yield servers
    finally:
        for server in servers:
            server.kill()
