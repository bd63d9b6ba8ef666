"""A link that passes bytes one way only, or loses some: every call ends, and what comes is right.

Two network namespaces with a link between them: two nodes in one, a client in the other. A route that leads nowhere
cuts one direction to one node; nobody is told, as with a failing switch or a wrong firewall rule.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]

NODES = """
import os, re, subprocess, sys
from pathlib import Path
from mooncache import _native
from tests.conditions import wait_until
from tests.data_plane.random_loss import lose_at_random, packets_lost
from tests.data_plane.wire import SECRET

def run(*command):
    return subprocess.run(command, check=True, timeout=20, capture_output=True, text=True).stdout

case = sys.argv[2]
command = ["unshare", "--net", sys.executable, "-c", sys.argv[1], case]
client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

def hear(word):
    line = client.stdout.readline()
    assert line == word + "\\n", line

def say(text):
    client.stdin.write(text + "\\n")
    client.stdin.flush()

try:
    hear("apart")
    run("ip", "link", "add", "node0", "type", "veth", "peer", "name", "client0", "netns", str(client.pid))
    for address in ("10.77.0.1/24", "10.77.0.3/24"):
        run("ip", "addr", "add", address, "dev", "node0")
    run("ip", "link", "set", "node0", "up")
    for name in ("all", "node0"):
        Path(f"/proc/sys/net/ipv4/conf/{name}/rp_filter").write_text("0")
    servers = [_native.StoreServer({
        "node_id": name, "secret": SECRET, "tcp_host": host, "capacity_bytes": 64 << 20, "incarnation": 7,
        "peer_timeout_ms": 3000, "grant_timeout_ms": 0, "idle_timeout_ms": 0,
    }) for name, host in (("a", "10.77.0.1"), ("b", "10.77.0.3"))]
    for server in servers:
        server.start()
    say(" ".join(str(server.endpoints()["tcp_port"]) for server in servers))
    hear("stored")
    if case == "slow":
        queue = ("handle", "1:", "tbf", "rate", "40mbit", "burst", "16kbit", "latency", "2ms")
        run("tc", "qdisc", "add", "dev", "node0", "root", *queue)
        say("slow")
        hear("read")
        lost = re.search(r"dropped (\\d+)", run("tc", "-s", "qdisc", "show", "dev", "node0"))
        assert lost is not None and int(lost[1]) > 0, "the link loses packets"
    elif case == "random":
        lose_at_random("node0", 0.03)
        say("slow")
        hear("read")
        assert packets_lost("node0") > 10
    else:
        assert servers[0].stats()["reservations_held"] == 1
        if case == "answers":
            run("ip", "rule", "add", "from", "10.77.0.1", "to", "10.77.0.2", "priority", "1", "blackhole")
        say("cut")
        hear("served")
        wait_until(lambda: servers[0].stats()["reservations_held"] == 0, lambda: str(servers[0].stats()))
        if case == "answers":
            run("ip", "rule", "del", "priority", "1")
        say("whole")
        hear("back")
    for server in servers:
        server.stop(1.0)
finally:
    client.kill()
    client.wait()
print("right", flush=True)
"""

CLIENT = """
import os, struct, subprocess, sys
print("apart", flush=True)
ports = sys.stdin.readline().split()
case = sys.argv[1]

def run(*command):
    subprocess.run(command, check=True, timeout=20)

run("ip", "addr", "add", "10.77.0.2/24", "dev", "client0")
run("ip", "link", "set", "client0", "up")
import mooncache
from mooncache.auth import Token
from mooncache.errors import MooncacheError
from tests.conditions import wait_until
from tests.data_plane import wire
from tests.data_plane.wire import Peer, key_of

nodes = [f"a@10.77.0.1:{ports[0]}", f"b@10.77.0.3:{ports[1]}"]
token = Token("default", admin=True, key=wire.SECRET).text
pool = mooncache.connect(nodes=nodes, token=token, shm=False, timeout_s=20)
values = {f"k{number}": os.urandom(256 << 10) for number in range(24)}
pool.put_many(list(values), list(values.values()), replicas=2).raise_for_errors()

class Server:
    def endpoints(self):
        return {"tcp_host": "10.77.0.1", "tcp_port": int(ports[0]), "tls": False}

peer = Peer(Server()).login()
assert peer.call(wire.RESERVE, struct.pack("<II", 1, 0) + key_of(1) + struct.pack("<Q", 1 << 20)).code == 0
print("stored", flush=True)
assert sys.stdin.readline() in ("cut\\n", "slow\\n")
if case == "requests":
    run("ip", "route", "add", "blackhole", "10.77.0.1/32")
for round in range(3):
    assert list(pool.get_many(list(values))) == list(values.values()), "from the other copy"
    more = {f"n{round}-{number}": os.urandom(4096) for number in range(16)}
    pool.put_many(list(more), list(more.values())).raise_for_errors()
    assert list(pool.get_many(list(more))) == list(more.values())
if case in ("slow", "random"):
    print("read", flush=True)
else:
    print("served", flush=True)
    assert sys.stdin.readline() == "whole\\n"
    if case == "requests":
        run("ip", "route", "del", "blackhole", "10.77.0.1/32")

    def answers():
        try:
            pool.ping(0)
        except MooncacheError:
            return False
        return True

    wait_until(answers, "the node is used again")
    print("back", flush=True)
sys.stdin.read()
"""


def play(case: str) -> None:
    command = ["unshare", "--net", sys.executable, "-c", NODES, CLIENT, case]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "right\n", done.stdout + done.stderr


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


@needs_root
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lost", ["requests", "answers"])
def test_a_link_that_passes_one_way_only(lost: str) -> None:
    """The other copy is read, new blocks go to the other node, and what a client held there is released."""
    play(lost)


@needs_root
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("tc") is None, reason="needs tc, of the Debian package iproute2")
def test_a_slow_link_that_loses_packets() -> None:
    """A queue of 2 ms in front of 40 Mbit/s: TCP loses packets all the time and sends them again."""
    play("slow")


@needs_root
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("tc") is None, reason="needs tc, of the Debian package iproute2")
def test_a_link_that_loses_packets_at_random() -> None:
    """Three of a hundred packets are lost in each direction, whatever they are: data, acknowledgements, connects."""
    play("random")
