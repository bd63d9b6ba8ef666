"""A host that vanishes without a word: its link is down, and no FIN arrives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

NODE = """
import subprocess, sys
from mooncache import _native
from tests.conditions import wait_until
from tests.data_plane.wire import SECRET

def run(*command):
    subprocess.run(command, check=True, timeout=20)

engine = subprocess.Popen(
    ["unshare", "--net", sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
try:
    assert engine.stdout.readline() == "apart\\n"
    run("ip", "link", "add", "node0", "type", "veth", "peer", "name", "engine0", "netns", str(engine.pid))
    run("ip", "addr", "add", "10.77.0.1/24", "dev", "node0")
    run("ip", "link", "set", "node0", "up")
    server = _native.StoreServer({
        "secret": SECRET, "tcp_host": "10.77.0.1", "capacity_bytes": 16 << 20,
        "peer_timeout_ms": 3000, "grant_timeout_ms": 0, "idle_timeout_ms": 0,
    })
    server.start()
    engine.stdin.write(f"{server.endpoints()['tcp_port']}\\n")
    engine.stdin.flush()
    assert engine.stdout.readline() == "reserved\\n"
    assert server.stats()["reservations_held"] == 1
    run("ip", "link", "set", "node0", "down")
    wait_until(lambda: server.stats()["reservations_held"] == 0, lambda: str(server.stats()))
    server.stop(1.0)
finally:
    engine.kill()
    engine.wait()
print("released", flush=True)
"""

ENGINE = """
import struct, subprocess, sys
print("apart", flush=True)
port = int(sys.stdin.readline())
for command in ("addr add 10.77.0.2/24 dev engine0", "link set engine0 up"):
    subprocess.run(["ip", *command.split()], check=True, timeout=20)
from tests.data_plane import wire
from tests.data_plane.wire import Peer, key_of
class Server:
    def endpoints(self):
        return {"tcp_host": "10.77.0.1", "tcp_port": port, "tls": False}
peer = Peer(Server()).login()
assert peer.call(wire.RESERVE, struct.pack("<II", 1, 0) + key_of(1) + struct.pack("<Q", 1 << 20)).code == 0
print("reserved", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_what_a_lost_host_held_is_released() -> None:
    """Keepalive alone does it here: the node's own time-outs are off."""
    command = ["unshare", "--net", sys.executable, "-c", NODE, ENGINE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "released\n", done.stderr
