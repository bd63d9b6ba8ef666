"""A port that is kept for a server: the server gets it, no other process does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from concurrent import futures

import grpc
import pytest

from mooncache.runtime.ports import hold_port, port_of

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
