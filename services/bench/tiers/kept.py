"""Memory that outlives a node: blocks adopted after `kill -9`, the gap that a client sees, and what it costs.

A node with a million small blocks is killed, and the supervisor of `mooncache up` starts it again, as the spare process
that it has prepared, while a client gets one block over and over.
What it costs is measured on two pools that run at the same time, one with kept memory and one without.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import mooncache
from mooncache.bench.on_over_off import on_over_off
from mooncache.bench.ssd_pool import NODE
from mooncache.bench.store.ours import OurClient, start_cluster
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.supervisor import SPARE_AFTER_S, PartNews
from mooncache.errors import MooncacheError, NodeUnavailable
from mooncache.reporting.rows import Row, bar_row
from mooncache.runtime.logs import Event

_BLOCKS: Final = 1_000_000
_QUICK_BLOCKS: Final = 20_000
_BLOCK: Final = 4 << 10
_BATCH: Final = 256
_ROOM: Final = 1.25  # of memory over the blocks
_PER_S: Final = 1e6
_GAP_S: Final = 1.0
_FOUND: Final = 0.99
_LOOK_S: Final = 0.002
_START_S: Final = 60.0
_SETTLE_S: Final = (
    SPARE_AFTER_S + 10.0
)  # the supervisor watches by then, and the spare process has imported all
_STEPS: Final = (
    ("killed", "ended", "the kernel takes down the killed process"),
    ("ended", "spawned", "the supervisor notices"),
    ("spawned", "configured", "the spare process wakes and reads the configuration"),
    ("configured", "lent", "the holder lends the memory"),
    ("lent", "adopted", "the blocks are adopted"),
    ("adopted", "kept", "the holder keeps the memory again"),
    ("kept", "open", "the data port opens"),
    ("open", "served", "the client finds it"),
)
"""(begin, end, what) of the steps from the end of a node to its first answer, one after the other."""


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Blocks adopted a second, the gap, the hit ratio after over before; gets and puts with it on over off."""
    rows = adopted(_QUICK_BLOCKS if quick else _BLOCKS, progress)
    rounds, calls = (4, 60) if quick else (100, 200)
    memory_bytes = (64 if quick else 256) << 20
    with ExitStack() as stack:
        clients = {}
        for on in (False, True):
            progress("starting a pool " + ("with" if on else "without") + " kept memory")
            pool = stack.enter_context(start_cluster(1, memory_bytes, keep_memory=on))
            client = mooncache.connect(**pool.client_settings(), timeout_s=60.0)
            clients[on] = OurClient(stack.enter_context(client))
        return rows + on_over_off(clients, "kept memory", rounds, calls, progress)


def adopted(blocks: int, progress: Callable[[str], None]) -> list[Row]:
    """Rows of one `kill -9` of a node with so many blocks. Raises NodeUnavailable when it adopted nothing."""
    env = {"MOONCACHE_LOGGING_LEVEL": "info"}  # the node says in its log how long it took
    with (
        start_cluster(1, int(blocks * _BLOCK * _ROOM), env, keep_memory=True) as pool,
        mooncache.connect(**pool.client_settings(), timeout_s=60.0) as client,
    ):
        progress(f"{blocks:,} blocks")
        body = memoryview(bytearray(os.urandom(_BLOCK)))
        keys = [os.urandom(32) for _ in range(blocks)]
        for at in range(0, blocks, _BATCH):
            part = keys[at : at + _BATCH]
            client.put_many(part, [body] * len(part)).raise_for_errors()
        before = _held(client, keys)
        progress("kill -9, and a start")
        with _supervised(pool) as seen:
            with _Gap.of(client, keys[-1]) as gap:
                seen.update(_kill(pool, gap))
            after = _held(client, keys)
        node_log = pool.state_dir / "logs" / f"{NODE}.log"
        found = _said(node_log, Event.NODE_MEMORY_ADOPTED)
        opened = _said(node_log, Event.NODE_DATA_PORT_OPEN)
    return [
        Row("kept memory: blocks in memory when the node was killed", float(before), ""),
        bar_row(
            "kept memory: of these, there after its start",
            float(after),
            "",
            against="before",
            reference=float(before) or None,
            at_least=_FOUND,
        ),
        bar_row(
            "kept memory: blocks adopted, by each thread",
            found["blocks"] / max(found["seconds"] * found["threads"], 1e-9),
            "1/s",
            at_least=_PER_S,
        ),
        Row("kept memory: threads that adopted", float(found["threads"]), ""),
        bar_row(
            "kept memory: longest gap between two gets that a client sees", gap.longest_s, "s", at_most=_GAP_S
        ),
        *_phases({**seen, **opened["phases_s"], "served": gap.served_s}),
        Row(
            "kept memory: processor time of the new process until it serves, with its imports before",
            opened["processor_s"] * 1e3,
            "ms",
        ),
    ]


@contextmanager
def _supervised(pool: EmbeddedCluster) -> Iterator[dict[str, float]]:
    """The supervisor of `mooncache up` meanwhile; the dict gets `spawned`, when it started the node again.

    A process that it starts ends with its thread, so what is measured ends before this does.
    """
    ends, seen = threading.Event(), dict[str, float]()

    def progress(name: str, news: PartNews) -> None:
        if name == NODE and "started again" in news.text:
            seen["spawned"] = time.monotonic()

    supervising = threading.Thread(target=pool.supervise, args=(progress, ends.is_set), name="supervise")
    supervising.start()
    try:
        time.sleep(_SETTLE_S)
        yield seen
    finally:
        ends.set()
        supervising.join()


def _kill(pool: EmbeddedCluster, gap: _Gap) -> dict[str, float]:
    """Kill the node and wait until it serves again: when it was killed and had ended, in seconds of the monotonic
    clock. Raises NodeUnavailable."""
    process = pool.parts[NODE].open_pidfd()
    if process is None:
        raise NodeUnavailable("The node ended before it was killed.")
    try:
        killed_s = time.monotonic()
        signal.pidfd_send_signal(process, signal.SIGKILL)
        if not select.select([process], [], [], _START_S)[0]:
            raise NodeUnavailable(f"The kernel did not end the node within {_START_S:.0f} s.")
        ended_s = time.monotonic()
        gap.wait_over(ended_s)
    finally:
        os.close(process)
    return {"killed": killed_s, "ended": ended_s}


def _phases(moments_s: dict[str, float]) -> list[Row]:
    """What the gap is made of: steps that follow one another, and the imports, which run beside some of them."""
    steps = [
        Row(f"kept memory: of the gap, {what}", max(0.0, moments_s[end] - moments_s[begin]) * 1e3, "ms")
        for begin, end, what in _STEPS
    ]
    beside_ms = max(0.0, moments_s["imported"] - moments_s["configured"]) * 1e3
    return [*steps, Row("kept memory: imports that were left, beside that", beside_ms, "ms")]


def _held(client: mooncache.Client, keys: list[bytes]) -> int:
    return sum(sum(client.exists_many(keys[at : at + _BATCH])) for at in range(0, len(keys), _BATCH))


def _said(log: Path, event: Event) -> dict[str, Any]:
    """What the node said of the newest such event. Raises NodeUnavailable."""
    for line in reversed(log.read_text(encoding="utf-8", errors="replace").splitlines()):
        if event in line:
            return dict(json.loads(line))
    raise NodeUnavailable(f"The node that was started again did not say {event}.")


class _Gap:
    """A thread that gets one block over and over, and how long it had to wait for it at most."""

    def __init__(self, client: mooncache.Client, key: bytes) -> None:
        self._client, self._key = client, key
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gap", daemon=True)
        self.longest_s = self.served_s = 0.0  # the longest gap, and when it ended
        self._begun_s = 0.0  # of the last get that brought the block

    @classmethod
    @contextmanager
    def of(cls, client: mooncache.Client, key: bytes) -> Iterator[_Gap]:
        gap = cls(client, key)
        gap._thread.start()
        try:
            yield gap
        finally:
            gap._ends.set()
            gap._thread.join()

    def wait_over(self, killed_s: float) -> None:
        """Wait for a get that began after the node's end and brought the block. Raises NodeUnavailable."""
        while self._begun_s <= killed_s:
            if time.monotonic() - killed_s > _START_S:
                raise NodeUnavailable(f"The node that was started again served nothing for {_START_S:.0f} s.")
            time.sleep(_LOOK_S)

    def _run(self) -> None:
        target = memoryview(bytearray(_BLOCK))
        last_s = time.monotonic()
        while not self._ends.is_set():
            begun_s = time.monotonic()
            try:
                came = self._client.get_into(self._key, target, timeout_s=1.0) is not None
            except MooncacheError:
                came = False
            now_s = time.monotonic()
            if came:
                if now_s - last_s > self.longest_s:
                    self.longest_s, self.served_s = now_s - last_s, now_s
                last_s, self._begun_s = now_s, begun_s
            time.sleep(_LOOK_S)
