"""A store node whose memory is in systemd's descriptor store. The service manager here is a stand-in that speaks the
protocol as systemd does: it reads the notify socket, keeps the descriptors, and passes them at the next start."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

import mooncache
from mooncache.config import Config
from mooncache.errors import ConfigInvalid
from mooncache.runtime.ports import make_socket_folder
from mooncache.runtime.service_manager import passed_files, tell, wait_until_taken
from mooncache.store_node.descriptor_store import DescriptorStore, chosen_set
from mooncache.store_node.holder import HolderError
from mooncache.store_node.keeping import keeping_of
from tests.conditions import wait_until
from tests.ports import own_port
from tests.store_node.questions import known, stored, value_of

# Puts the descriptors where systemd puts them, and becomes the node.
LAUNCH = """
import fcntl, os, sys
names, files = sys.argv[1], [int(word) for word in sys.argv[2:]]
high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 400) for file in files]
for place, file in enumerate(high):
    os.dup2(file, 3 + place)
if files:
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(files)), "LISTEN_FDNAMES": names}
os.execv(sys.executable, [sys.executable, "-m", "mooncache.store_node"])
"""


class StandIn:
    """One unit of a service manager."""

    def __init__(self, room: int = 64) -> None:
        self._folder = make_socket_folder()
        self.path = self._folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._room = room
        self.stored: list[tuple[str, int]] = []
        self.said: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            data, files, _, _ = socket.recv_fds(self._socket, 4096, 253)
            if data == b"end":
                return
            fields = dict(line.split("=", 1) for line in data.decode().splitlines())
            self.said.append(data.decode())
            if "FDSTORE" in fields:
                for file in files[: self._room - len(self.stored)]:
                    self.stored.append((fields["FDNAME"], os.dup(file)))
            if "FDSTOREREMOVE" in fields:
                for _, file in [one for one in self.stored if one[0] == fields["FDNAME"]]:
                    os.close(file)
                self.stored = [one for one in self.stored if one[0] != fields["FDNAME"]]
            for file in files:  # of a barrier, too: closing it is the answer
                os.close(file)

    def start(self, log: Path, settings: dict[str, str]) -> None:
        """The unit's process, with everything that is stored."""
        files = [file for _, file in self.stored]
        names = ":".join(name for name, _ in self.stored)
        self.said.clear()
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, names, *map(str, files)],
                env={**os.environ, **settings, "NOTIFY_SOCKET": str(self.path)},
                pass_fds=files,
                stdout=out,
                stderr=out,
            )
        wait_until(lambda: "READY=1" in self.said or self.process.poll() is not None, log.read_text)  # type: ignore[union-attr]

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.end(signal.SIGKILL)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"end", str(self.path))
        self._thread.join(10)
        self._socket.close()
        for _, file in self.stored:
            os.close(file)
        shutil.rmtree(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with StandIn() as made:
        monkeypatch.setenv("NOTIFY_SOCKET", str(made.path))
        yield made


def memory_file(content: bytes) -> int:
    file = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(file, content)
    return file


@contextlib.contextmanager
def running_master(target: str, settings: dict[str, str]) -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-m", "mooncache.master"],
        env={**os.environ, **settings, "MOONCACHE_MASTER_PORT": target.rpartition(":")[2]},
        stderr=subprocess.DEVNULL,
    ) as master:
        try:
            yield
        finally:
            master.kill()


def test_a_node_of_systemd_comes_back_with_its_blocks(tmp_path: Path) -> None:
    log, target = tmp_path / "node.log", f"127.0.0.1:{own_port()}"
    common = {"MOONCACHE_CLUSTER_STATE_DIR": str(tmp_path / "state"), "MOONCACHE_METRICS_ENABLED": "false"}
    with running_master(target, common), StandIn() as unit:
        settings = {
            **common,
            "MOONCACHE_CLUSTER_MASTER_TARGETS": target,
            "MOONCACHE_STORE_NODE_NODE_ID": "node-1",
            "MOONCACHE_STORE_NODE_KEEP_MEMORY": "true",
            "MOONCACHE_STORE_NODE_DESCRIPTOR_STORE": "true",
            "MOONCACHE_STORE_NODE_CAPACITY_BYTES": "32MiB",
            "MOONCACHE_STORE_NODE_UNIX_PATH": str(unit.path.with_name("node.sock")),
        }
        unit.start(log, settings)
        with mooncache.connect(master=target, state_dir=str(tmp_path / "state")) as client:
            values = {f"block-{number}": value_of(number) for number in range(40)}
            wait_until(lambda: stored(client, "first", b"x"), log.read_text)
            for key, value in values.items():
                client.put(key, value)
            assert client.remove("block-7")
            expected = set(values) - {"block-7"}
            files = len(unit.stored)
            assert files >= 3, "catalogue, generations, at least one arena"
            assert unit.end(signal.SIGKILL) == -signal.SIGKILL
            unit.start(log, settings)
            wait_until(lambda: known(client, list(values)) == expected, log.read_text)
            for key in sorted(expected):
                assert client.get(key) == values[key]
            assert len(unit.stored) == files, "what is stored stays stored, once"
            assert not any("FDSTORE" in said for said in unit.said), "adopted files are stored already"
            # Another layout is a cold start, and what was stored is given back.
            assert unit.end(signal.SIGTERM) == 0
            assert unit.said[-1] == "STOPPING=1"
            old = {name for name, _ in unit.stored}
            unit.start(log, {**settings, "MOONCACHE_STORE_NODE_CAPACITY_BYTES": "64MiB"})
            assert len(unit.stored) == files
            assert not old & {name for name, _ in unit.stored}
            wait_until(
                lambda: known(client, ["block-1"]) == set() and stored(client, "new", b"y"), log.read_text
            )
            unit.end(signal.SIGKILL)
            unit.start(
                log,
                {
                    **settings,
                    "MOONCACHE_STORE_NODE_DESCRIPTOR_STORE": "false",
                    "MOONCACHE_STORE_NODE_KEEP_MEMORY": "false",
                },
            )
            assert unit.stored == [], "a node that does not use the store gives back what it has there"


def test_files_are_stored_once_and_given_back(manager: StandIn) -> None:
    one, other = [memory_file(b"a"), memory_file(b"b")], [memory_file(b"c")]
    store = DescriptorStore()
    assert store.take() == []
    assert not store.has(2)
    for _ in range(2):
        store.keep(one)
        assert store.has(2)
        assert [os.pread(file, 1, 0) for _, file in manager.stored] == [b"a", b"b"]
    store.keep(other)
    assert [os.pread(file, 1, 0) for _, file in manager.stored] == [b"c"]
    store.drop()
    assert wait_until_taken(10.0)
    assert manager.stored == []
    for file in one + other:
        os.close(file)


def test_what_is_not_stored_is_said(manager: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [memory_file(b"a"), memory_file(b"b")]
    monkeypatch.setenv("FDSTORE", "1")
    with pytest.raises(HolderError, match="FileDescriptorStoreMax=2"):
        DescriptorStore().keep(files)
    monkeypatch.delenv("FDSTORE")
    monkeypatch.setenv("NOTIFY_SOCKET", str(manager.path) + "-gone")
    store = DescriptorStore()
    with pytest.raises(HolderError, match="No such file"):
        store.keep(files)
    assert not store.has(2)
    for file in files:
        os.close(file)


def test_a_set_is_chosen_when_it_is_whole_and_the_only_one() -> None:
    one = [("mooncache-00000001-1-2", 11), ("mooncache-00000001-0-2", 10)]
    assert chosen_set(one) == ([10, 11], [])
    assert chosen_set(one[:1]) == ([], [11])
    assert chosen_set([*one, ("mooncache-00000002-0-2", 12)]) == ([10, 11], [12])
    assert chosen_set([*one, ("mooncache-00000002-0-1", 12)]) == ([], [11, 10, 12])
    assert chosen_set([*one, ("mooncache-00000001-1-2", 13), ("other", 14), ("mooncache-x-0-1", 15)]) == (
        [10, 11],
        [13, 14, 15],
    )
    assert chosen_set([("mooncache-00000001-0-0", 10), ("mooncache-00000001-5-1", 11)]) == ([], [10, 11])


def test_descriptors_of_another_process_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_FDS", "2")
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    assert passed_files() == []
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    for count in ("", "x", "-1", "0"):
        monkeypatch.setenv("LISTEN_FDS", count)
        assert passed_files() == []


def test_an_abstract_socket_takes_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        name = f"mooncache-test-{os.getpid()}"
        listener.bind("\0" + name)
        listener.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        tell("READY=1", "STATUS=serves")
        assert listener.recv(100) == b"READY=1\nSTATUS=serves"


def test_it_needs_kept_memory_and_a_service_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config_of(**section: object) -> Config:
        return Config.model_validate({"cluster": {"state_dir": tmp_path}, "store_node": section})

    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    with pytest.raises(ConfigInvalid, match=r"needs store_node\.keep_memory"):
        keeping_of(config_of(descriptor_store=True, capacity_bytes=64 << 20), "node")
    keeper = keeping_of(config_of(descriptor_store=True, keep_memory=True, capacity_bytes=64 << 20), "node")
    assert keeper is not None
    with pytest.raises(ConfigInvalid, match="needs systemd"):
        keeper.take()
