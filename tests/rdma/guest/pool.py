"""Runs inside the test machine: a master, two store nodes and a client on the two rails, and what befalls them.

All processes are forks of this one, because importing is what costs time on an emulated processor. Prints
one line of JSON for each act: what came back, over what, in what time. The bytes are compared here; what is
expected of the numbers, the test says. One node's memory outlives it, the other's is a file on tmpfs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mooncache
import mooncache.master.__main__ as master
import mooncache.master.service  # imported here, so that the forks need not
import mooncache.store_node.__main__ as store_node
import mooncache.store_node.service
from mooncache.auth import load_or_create_cluster_token
from mooncache.errors import ChecksumMismatch, NodeUnavailable, NotFound
from mooncache.store_node import holder

FOLDER = Path("/tmp/pool")
HOLDER = FOLDER / "holder.sock"
ARENA, ARENA_BYTES = Path("/dev/shm/arena"), 128 << 20
BLOCK_BYTES, BLOCKS, COPIED = 1 << 20, 32, 8
DEADLINE_S, STRIKE_WITHIN_S, SETTLED_WITHIN_S = 30.0, 5.0, 90.0
NODES = ("b0", "b1")
RAILS = ("va0", "va1", "vb0", "vb1")


def fork(name: str, main: Callable[[], int], **env: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(f"/share/{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update({f"MOONCACHE_{key}": value for key, value in env.items()})
    os._exit(main())


# Everything is slow here; a node that is late must not count as dead before a test says so.
COMMON = {
    "CLUSTER_TOKEN_FILE": str(FOLDER / "token"),
    "MASTER_HEARTBEAT_INTERVAL_S": "2",
    "MASTER_SUSPECT_AFTER_S": "20",
    "MASTER_LEASE_S": "40",
}
MEMORY = {
    "b0": {
        "STORE_NODE_CAPACITY_BYTES": "128MiB",
        "STORE_NODE_KEEP_MEMORY": "true",
        "STORE_NODE_HOLDER_PATH": str(HOLDER),
    },
    "b1": {"STORE_NODE_ARENA_PATH": str(ARENA)},
}


def start_node(name: str, turn: int | None = None) -> int:
    """Forks a node, which begins at once or when something comes through the pipe `turn`."""
    own = {"STORE_NODE_NODE_ID": name, "STORE_NODE_UNIX_ENABLED": "false", "RDMA_DEVICES": "rxb0,rxb1"}
    own |= {"CLUSTER_STATE_DIR": str(FOLDER / name), **MEMORY[name]}

    def begin() -> int:
        if turn is not None:
            os.read(turn, 1)
        return store_node.main()

    return fork(name if turn is None else f"{name} again", begin, **own, **COMMON)


def start(successors_turn: int) -> dict[str, int]:
    FOLDER.mkdir(mode=0o700)
    load_or_create_cluster_token(FOLDER / "token")
    pids = {
        "holder": fork("holder", lambda: holder.main([str(HOLDER)])),
        "master": fork("master", master.main, CLUSTER_STATE_DIR=str(FOLDER / "m"), **COMMON),
    }
    ARENA.touch(mode=0o600)
    os.truncate(ARENA, ARENA_BYTES)
    for name in NODES:
        pids[name] = start_node(name)
    # Before there is a client: its threads and gRPC's do not survive a fork.
    pids["b0 again"] = start_node("b0", successors_turn)
    os.environ["MOONCACHE_RDMA_DEVICES"] = "rxa0,rxa1"
    return pids


def connect() -> mooncache.Client:
    """A client, once both nodes are active."""
    until_s = time.monotonic() + 60
    while True:
        try:
            client = mooncache.connect(
                master="127.0.0.1:7700", token_file=str(FOLDER / "token"), shm=False, timeout_s=DEADLINE_S
            )
        except mooncache.MooncacheError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.5)
            continue
        while sum(node.state == "active" for node in client.nodes()) < len(NODES):
            assert time.monotonic() < until_s, client.nodes()
            time.sleep(0.2)
        return client


def sent_bytes() -> dict[str, int]:
    folder = Path("/sys/class/net")
    return {rail: int((folder / rail / "statistics" / "tx_bytes").read_text()) for rail in RAILS}


class Act:
    """One step: counts what moved in it and over what, and prints that."""

    def __init__(self, name: str, client: mooncache.Client) -> None:
        self.name, self.client = name, client
        self.said: dict[str, Any] = {"act": name}

    def __enter__(self) -> Act:
        self._rails, self._stats, self._begin_s = sent_bytes(), self.client.stats(), time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        stats = self.client.stats()
        moved = {key: stats[key] - self._stats[key] for key in ("rdma_bytes", "tcp_bytes", "miss_checksum")}
        rails = {rail: after - self._rails[rail] for rail, after in sent_bytes().items()}
        self.said |= {"took_s": round(time.monotonic() - self._begin_s, 2), **moved, "rails": rails}
        print(json.dumps(self.said), flush=True)

    def when_moving(self, do: Callable[[], object], bytes_moved: int = 4 << 20) -> threading.Thread:
        """Does it in mid-transfer: once this many bytes went over the cables since the act began."""

        def wait() -> None:
            until_s = time.monotonic() + STRIKE_WITHIN_S
            while sum(sent_bytes().values()) - sum(self._rails.values()) < bytes_moved:
                if time.monotonic() > until_s:
                    break
                time.sleep(0.001)
            else:
                self.said["struck"] = True  # in mid-transfer, as it should be
            do()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    def put(self, blocks: dict[str, bytes], *, replicas: int = 1) -> None:
        """Counts what was put. A put leaves a node that is silent for a second, as a starved one may be."""
        codes = self.client.put_many(list(blocks), list(blocks.values()), replicas=replicas).codes
        unexpected = set(codes) - {0, NodeUnavailable.code}
        assert not unexpected, f"a put may only miss a node: {sorted(unexpected)}"
        self.said["right"] = self.said.get("right", 0) + codes.count(0)
        self.said["unavailable"] = self.said.get("unavailable", 0) + codes.count(NodeUnavailable.code)

    def read(self, blocks: dict[str, bytes]) -> None:
        into = [bytearray(BLOCK_BYTES) for _ in blocks]
        codes = self.client.get_many_into(list(blocks), into).codes
        equal = [got == block for got, block in zip(into, blocks.values(), strict=True)]
        self.said["right"] = sum(code == 0 and same for code, same in zip(codes, equal, strict=True))
        self.said["wrong"] = sum(code == 0 and not same for code, same in zip(codes, equal, strict=True))
        self.said["unavailable"] = codes.count(NodeUnavailable.code)
        self.said["missed"] = codes.count(NotFound.code) + codes.count(ChecksumMismatch.code)
        self.said["codes"] = sorted(set(codes))


def until_whole(
    name: str, client: mooncache.Client, blocks: int, *, rdma_bytes: int | None = None
) -> Iterator[Act]:
    """The same act until all is right and went as it should: a starved processor is late for what works, too. A put
    sends again, elsewhere, what a node was silent about for a second; a get reads another copy."""
    until_s = time.monotonic() + SETTLED_WITHIN_S
    while True:
        with Act(name, client) as act:
            yield act
        over_rdma = act.said["rdma_bytes"] if rdma_bytes is None else rdma_bytes
        whole = act.said["right"] == blocks and act.said["rdma_bytes"] == over_rdma
        if whole or time.monotonic() > until_s:
            return
        time.sleep(1)


def link(rail: str, state: str) -> None:
    subprocess.run(["/usr/bin/ip", "link", "set", rail, state], check=True)


def rails_in_map(client: mooncache.Client, expected: set[str]) -> list[str]:
    """Rails of all nodes as the map has them; waits a little for what is expected."""
    until_s = time.monotonic() + 15
    while True:
        found = sorted({rail for node in client.nodes() for rail in node.rails})
        if set(found) == expected or time.monotonic() > until_s:
            return found
        time.sleep(0.2)


def rails_fail(client: mooncache.Client, blocks: dict[str, bytes]) -> None:
    for name, rail in (("one rail goes down", "va0"), ("both are down", "va1")):
        with Act(name, client) as act:
            strike = act.when_moving(lambda rail=rail: link(rail, "down"))  # type: ignore[misc]
            act.read(blocks)
            strike.join()
        rdma_bytes = len(blocks) * BLOCK_BYTES if rail == "va0" else 0
        for again in until_whole(f"{name}, afterwards", client, len(blocks), rdma_bytes=rdma_bytes):
            again.read(blocks)
        left = {"va0": {"rxb1:1"}, "va1": set()}[rail]
        print(json.dumps({"act": f"{name}, in the map", "rails": rails_in_map(client, left)}), flush=True)
    for rail in ("va0", "va1"):
        link(rail, "up")
    until_s = time.monotonic() + 120
    moved = client.stats()["rdma_bytes"]
    while client.stats()["rdma_bytes"] == moved and time.monotonic() < until_s:
        time.sleep(1)
        client.get_many_into(list(blocks)[:4], [bytearray(BLOCK_BYTES) for _ in range(4)])
    for again in until_whole("both are up again", client, len(blocks)):
        again.read(blocks)


def arena_shrinks(client: mooncache.Client, blocks: dict[str, bytes], copies: dict[str, bytes]) -> None:
    """The tail of the file is nearly empty, so it loses nearly all; the devices have pages of it pinned."""
    with Act("an arena is truncated", client) as act:
        strike = act.when_moving(lambda: os.truncate(ARENA, BLOCK_BYTES))
        act.read(blocks | copies)
        strike.join()
    until_s = time.monotonic() + 10
    while b"arena_damaged" not in Path("/share/b1.log").read_bytes() and time.monotonic() < until_s:
        time.sleep(0.2)
    with Act("an arena is truncated, afterwards", client) as act:
        act.read(blocks | copies)
    count = BLOCKS // 2
    for again in until_whole("memory in its place", client, count, rdma_bytes=3 * count * BLOCK_BYTES):
        new = {os.urandom(8).hex(): os.urandom(BLOCK_BYTES) for _ in range(count)}
        again.put(new, replicas=2)
        again.read(new)


def node_dies(client: mooncache.Client, pid: int, blocks: dict[str, bytes], copies: dict[str, bytes]) -> None:
    with Act("a node is killed", client) as act:
        strike = act.when_moving(lambda: os.kill(pid, signal.SIGKILL))
        act.read(blocks | copies)
        strike.join()
        os.waitpid(pid, 0)
    with Act("the node is gone", client) as act:
        act.read(copies)


def memory_outlives(client: mooncache.Client, pid: int, turn: int, copies: dict[str, bytes]) -> None:
    """Kill the only node that is left, in mid-transfer; its successor's devices register adopted memory."""
    with Act("kept memory, its node is killed", client) as act:
        strike = act.when_moving(lambda: os.kill(pid, signal.SIGKILL))
        act.read(copies)
        strike.join()
        os.waitpid(pid, 0)
    os.write(turn, b"!")
    moved_bytes = len(copies) * BLOCK_BYTES
    for again in until_whole("kept memory, adopted", client, len(copies), rdma_bytes=moved_bytes):
        again.read(copies)


def main() -> None:
    begin_s = time.monotonic()
    turn, give_turn = os.pipe()
    pids = start(turn)
    client = connect()
    started = {
        "took_s": round(time.monotonic() - begin_s, 2),
        "rails": rails_in_map(client, {"rxb0:1", "rxb1:1"}),
    }
    print(json.dumps({"act": "start", **started}), flush=True)
    blocks: dict[str, bytes] = {}
    copies: dict[str, bytes] = {}
    moved_bytes = (BLOCKS + 2 * COPIED) * BLOCK_BYTES
    for number, again in enumerate(until_whole("put", client, BLOCKS + COPIED, rdma_bytes=moved_bytes)):
        if number:
            client.remove_many([*blocks, *copies])
        blocks = {f"block-{number}-{i}": os.urandom(BLOCK_BYTES) for i in range(BLOCKS)}
        copies = {f"copied-{number}-{i}": os.urandom(BLOCK_BYTES) for i in range(COPIED)}
        again.put(blocks)
        again.put(copies, replicas=2)
    everything = blocks | copies
    for again in until_whole("get", client, len(everything), rdma_bytes=len(everything) * BLOCK_BYTES):
        again.read(everything)
    rails_fail(client, blocks)
    arena_shrinks(client, blocks, copies)
    node_dies(client, pids["b1"], blocks, copies)
    memory_outlives(client, pids["b0"], give_turn, copies)
    client.close()
    for name in ("b0 again", "master", "holder"):
        os.kill(pids[name], signal.SIGKILL)
        os.waitpid(pids[name], 0)


if __name__ == "__main__":
    main()
