"""The process that holds memory files between two starts: who gets them, when, and who does not."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.errors import ConfigInvalid
from mooncache.store_node import keeping as keeping_module
from mooncache.store_node.holder import Holder, HolderError, RequestRefused, listen, parsed
from mooncache.store_node.keeping import HeldMemory, ask, close_all, end_holder
from tests.conditions import wait_until

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NODE = """
import fcntl, os, sys, time
from pathlib import Path
from mooncache.store_node.keeping import HeldMemory
keeping = HeldMemory(Path(sys.argv[1]), "one", 600.0)
held = keeping.take()
if not held:
    for content in (b"alpha", b"gamma"):
        held.append(os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.write(held[-1], content)
        fcntl.fcntl(held[-1], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    keeping.keep(held)
    print("made", flush=True)
else:
    print([os.pread(file, 5, 0).decode() for file in held], flush=True)
time.sleep(600)
"""


class NodeProcess:
    """A process that adopts the files of the node `one`, or makes them, and says which."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NODE, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.said = self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def memory_file(content: bytes, seals: int = _SEALS) -> int:
    file = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(file, content)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "holder.sock"
    yield where
    end_holder(where)


def test_files_go_to_the_next_process_and_to_one_at_a_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping_module, "_IN_USE_S", 0.2)
    first = NodeProcess(path)
    assert first.said == "made"
    with pytest.raises(ConfigInvalid, match=f"process {first.pid} has the memory of one"):
        HeldMemory(path, "one", 600.0).take()
    first.kill()
    second = NodeProcess(path)
    assert second.said == "['alpha', 'gamma']"
    second.kill()
    taken = HeldMemory(path, "one", 600.0).take()
    assert [os.pread(file, 5, 0) for file in taken] == [b"alpha", b"gamma"]
    close_all(taken)


def test_without_its_holder_a_node_starts_another_and_leaves_its_files_there(path: Path) -> None:
    keeping = HeldMemory(path, "one", 600.0)
    assert keeping.take() == []
    file = memory_file(b"alpha")
    keeping.keep([file])
    assert keeping.has(1)
    end_holder(path)
    wait_until(lambda: not keeping.has(1))
    keeping.keep([file])
    assert keeping.has(1)
    os.close(file)


def test_a_node_beside_a_holder_of_its_own_service_starts_none(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the node started would hold the socket, and end with the node's container."""
    monkeypatch.setattr(keeping_module, "_START_S", 0.2)
    keeping = HeldMemory(path, "one", 600.0, starts=False)
    with pytest.raises(ConfigInvalid, match="Start `mooncache store-holder`"):
        keeping.take()
    file = memory_file(b"alpha")
    with pytest.raises(HolderError, match="no answer"):
        keeping.keep([file])
    assert not path.exists()
    HeldMemory(path, "other", 600.0).start_holder()
    keeping.keep([file])
    assert keeping.has(1)
    os.close(file)


def test_only_sealed_memory_files_are_held(path: Path, tmp_path: Path) -> None:
    keeping = HeldMemory(path, "one", 600.0)
    keeping.start_holder()
    plain = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT, 0o600)
    for file in (plain, memory_file(b"alpha", 0)):
        with pytest.raises(HolderError, match="only sealed memory files"):
            keeping.keep([file])
        os.close(file)
    assert ask(path, {"op": "list"})[0]["nodes"] == {}


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"x",
        b"[]",
        b"null",
        b"{}",
        b'{"op":"take"}',
        b'{"op":"take","node":7}',
        b'{"op":"steal","node":"one"}',
        b'{"op":"keep","node":"one","files":3,"hold_s":1}',
        b'{"op":"keep","node":"one","hold_s":-1}',
        b'{"op":"take","node":"' + b"n" * 200 + b'"}',
        b"[" * 4000,
        b"y" * 9000,
    ],
)
def test_bytes_that_are_no_request_harm_nobody(path: Path, request_bytes: bytes) -> None:
    keeping = HeldMemory(path, "one", 600.0)
    keeping.start_holder()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        connection.send(request_bytes)
        if request_bytes:
            assert b'"ok": false' in connection.recv(4096)
    assert ask(path, {"op": "list"})[0]["ok"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=200),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "op": st.sampled_from(["take", "keep", "list"]) | _JSON,
        "node": st.just("one") | _JSON,
        "files": st.integers(-1, 300) | _JSON,
        "hold_s": st.floats() | _JSON,
    },
)


@given(st.binary(max_size=200) | (_FIELDS | _JSON).map(lambda value: json.dumps(value).encode()))
def test_drawn_requests_are_answered_or_refused(data: bytes) -> None:
    holder = Holder()
    try:
        answer, lent = holder.answer(parsed(data, 0), [], os.getpid(), 0.0)
    except RequestRefused:
        pass
    else:
        assert lent == [], "it was given none"
        json.dumps(answer)
    finally:
        holder.close()


def test_the_socket_is_the_users_alone_and_one_holder_has_it(path: Path) -> None:
    keeping = HeldMemory(path, "one", 600.0)
    keeping.start_holder()
    assert path.stat().st_mode & 0o077 == 0
    assert listen(path) is None


def test_a_holder_that_is_stopped_costs_a_bounded_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping_module, "_CALL_S", 0.2)
    monkeypatch.setattr(keeping_module, "_START_S", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.bind(str(path))
        deaf.listen(1)
        with pytest.raises(ConfigInvalid, match="No process holds memory"):
            HeldMemory(path, "one", 600.0).take()


def test_what_no_process_has_is_dropped_in_time() -> None:
    holder = Holder()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        file = memory_file(b"alpha")
        request = {"op": "keep", "node": "one", "files": 1, "hold_s": 60}
        holder.answer(request, [file], process.pid, 100.0)
        holder.tick(1000.0)
        with pytest.raises(RequestRefused, match=f"process {process.pid} has the memory"):
            holder.answer({"op": "take", "node": "one"}, [], os.getpid(), 1000.0)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    wait_until(lambda: _nobody_has(holder, "one", 1000.0))
    holder.tick(1059.0)
    assert holder.holds
    holder.tick(1060.0)
    assert not holder.holds
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def _nobody_has(holder: Holder, name: str, now_s: float) -> bool:
    holder.tick(now_s)
    answer, _ = holder.answer({"op": "list"}, [], os.getpid(), now_s)
    return bool(answer["nodes"][name]["pid"] == 0)
