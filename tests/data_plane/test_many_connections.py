"""Thousands of idle peers, and peers that never prove who they are."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conditions import wait_until
from tests.data_plane import wire
from tests.data_plane.conftest import Start
from tests.data_plane.wire import Peer, key_of

IDLE_PEERS = 10_000
ROOT = Path(__file__).resolve().parents[2]


CROWD = """
import json, resource, sys
from tests.data_plane.wire import Peer
endpoints, count = json.loads(sys.argv[1]), int(sys.argv[2])
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
class Server:
    def endpoints(self):
        return endpoints
crowd = [Peer(Server(), unix=i % 2 == 0).login() for i in range(count)]
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_ten_thousand_idle_peers_do_not_disturb_a_worker(start: Start) -> None:
    """The crowd is another process, so that each of the two needs one descriptor per connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = IDLE_PEERS + 500
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} open files per process, the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    server = start()
    command = [sys.executable, "-c", CROWD, json.dumps(server.endpoints()), str(IDLE_PEERS)]
    crowd = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert crowd.stdout is not None
        assert crowd.stdout.readline() == b"ready\n"
        work(server)
        assert server.stats()["connections_open"] >= IDLE_PEERS
    finally:
        crowd.communicate(timeout=60)  # closes its input: it ends, and with it all its connections
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_until(lambda: server.stats()["connections_open"] == 0)


def work(server: Any) -> None:
    with Peer(server) as worker:
        worker.login()
        for i in range(50):
            assert worker.put([(key_of(i), bytes([i]) * 100_000)]) == [0]
            assert worker.get(key_of(i)) == [(0, bytes([i]) * 100_000)]


def test_two_thousand_idle_peers_do_not_disturb_a_worker(start: Start) -> None:
    hold_many(start(), 2000)


def hold_many(server: Any, count: int) -> None:
    crowd: list[Peer] = []
    try:
        crowd.extend(Peer(server, unix=i % 2 == 0).login() for i in range(count))
        work(server)
        assert server.stats()["connections_open"] >= count
        for peer in crowd[:: count // 10]:
            assert peer.call(wire.PING).code == 0
    finally:
        for peer in crowd:
            peer.close()
    wait_until(lambda: server.stats()["connections_open"] == 0)


def test_silent_strangers_do_not_keep_others_out(start: Start) -> None:
    server = start(max_unauthenticated=16, handshake_timeout_ms=60_000)
    strangers = [Peer(server) for _ in range(40)]
    with Peer(server) as peer:
        peer.login()
        assert peer.call(wire.PING).code == 0
    for stranger in strangers:
        stranger.close()


def test_connections_over_the_limit_are_closed_at_once(start: Start) -> None:
    server = start(max_connections=3)
    peers = [Peer(server).login() for _ in range(3)]
    refused = Peer(server)
    assert refused.closed()
    refused.close()
    assert server.stats()["connections_closed_capacity"] == 1
    peers.pop().close()
    wait_until(lambda: server.stats()["connections_open"] == 2)
    Peer(server).login().close()
    for peer in peers:
        peer.close()


def test_a_slow_sender_is_let_go_and_holds_up_nobody(start: Start) -> None:
    server = start(frame_timeout_ms=500, progress_timeout_ms=500)
    slow = Peer(server).login()
    slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    message = wire.put_frame([(key_of(1), bytes(1 << 20))])
    slow.send(message[:100])
    with Peer(server) as other:
        other.login()
        assert other.put([(key_of(2), b"quick")]) == [0]
    assert slow.closed()
    slow.close()
    assert server.stats()["connections_closed_slow"] == 1
