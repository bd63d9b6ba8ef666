"""A port that is kept for a server, which no other process gets; a folder whose paths suit a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from mooncache.runtime.ports import hold_port, make_socket_folder, port_of

HOST = "127.0.0.1"


def test_no_other_process_finds_the_port_free() -> None:
    with hold_port(HOST) as held, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((HOST, port_of(held)))


def test_many_holds_are_of_different_ports() -> None:
    with contextlib.ExitStack() as stack:
        holds = [stack.enter_context(hold_port(HOST)) for _ in range(200)]
        assert len({port_of(held) for held in holds}) == 200


async def test_an_asyncio_server_listens_on_it_and_again_after_a_restart() -> None:
    with hold_port(HOST) as held:
        for _ in range(2):
            server = await asyncio.start_server(lambda _reader, writer: writer.close(), HOST, port_of(held))
            reader, writer = await asyncio.open_connection(HOST, port_of(held))
            assert await reader.read() == b""
            writer.close()
            server.close()
            await server.wait_closed()


def test_a_grpc_server_listens_on_it() -> None:
    with hold_port(HOST) as held:
        for _ in range(2):
            server = grpc.server(futures.ThreadPoolExecutor(1))
            assert server.add_insecure_port(f"{HOST}:{port_of(held)}") == port_of(held)
            server.start()
            with pytest.raises(OSError, match="in use"):
                hold_port(HOST, port_of(held))
            server.stop(0).wait()


def test_a_held_port_refuses_connections_until_its_server_listens() -> None:
    with hold_port(HOST) as held, socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect((HOST, port_of(held)))


def test_an_asked_port_that_a_server_has_is_refused() -> None:
    with socket.socket() as server:
        server.bind((HOST, 0))
        server.listen()
        with pytest.raises(OSError, match="in use"):
            hold_port(HOST, port_of(server))


@pytest.mark.parametrize("deep", [False, True])
def test_a_socket_can_be_bound_in_the_folder_however_deep_temporary_files_lie(
    deep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / ("d" * 100) if deep else Path(tempfile.gettempdir())
    temporary.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    folder = make_socket_folder()
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "node.sock"))
        assert folder.stat().st_mode & 0o777 == 0o700
        assert deep == (folder.parent != temporary)
        assert not deep or not list(temporary.iterdir())
    finally:
        (folder / "node.sock").unlink(missing_ok=True)
        folder.rmdir()
