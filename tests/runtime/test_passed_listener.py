"""A listening socket of the parent, passed as systemd does: found by the process that it is for, and by no other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mooncache.cluster.ports import PortPicker
from mooncache.runtime.ports import passed_listener

ASK = (
    "import os, sys; from mooncache.runtime.ports import passed_listener, LISTENER_FD\n"
    "os.dup2(int(sys.argv[1]), LISTENER_FD)\n"
    "os.environ |= {'LISTEN_PID': str(os.getpid() + int(sys.argv[2])), 'LISTEN_FDS': '1'}\n"
    "found = passed_listener(); print(found.getsockname()[1] if found else 0)"
)


def found_by_a_child(passed: socket.socket, *, pid_off: int = 0) -> int:
    fd = str(passed.fileno())
    done = subprocess.run(
        [sys.executable, "-c", ASK, fd, str(pid_off)], pass_fds=[int(fd)], capture_output=True, check=True
    )
    return int(done.stdout)


def test_it_is_found() -> None:
    with PortPicker("127.0.0.1") as ports:
        port = ports.any()
        listening = ports.listen(port)
        assert found_by_a_child(listening) == port
        assert found_by_a_child(listening, pid_off=1) == 0, "it is for another process"


def test_a_socket_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    with socket.socket() as idle:
        assert found_by_a_child(idle) == 0
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "s"))
        unix.listen()
        assert found_by_a_child(unix) == 0


def test_nothing_was_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert passed_listener() is None
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "2")
    assert passed_listener() is None


def test_who_waits_at_a_port_that_is_given_up_is_refused() -> None:
    with PortPicker("127.0.0.1") as ports:
        port = ports.any()
        ports.listen(port)
        socket.create_connection(("127.0.0.1", port), 5).close()
        ports.release(port)
        ports.release(port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
