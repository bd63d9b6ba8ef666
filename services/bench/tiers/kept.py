"""Memory that outlives a node: blocks adopted after `kill -9`, the gap that a client sees, and what it costs.

A node with a million small blocks is killed and started again at once, while a client gets one block over and over.
What it costs is measured on two pools that run at the same time, one with kept memory and one without.
"""

from __future__ import annotations

import json
import os
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
        with _Gap.of(client, keys[-1]) as gap:
            pool.kill(NODE)
            killed_s = time.perf_counter()
            pool.restart(NODE)
            gap.wait_over(killed_s)
        after = _held(client, keys)
        found = _adopted(pool.state_dir / "logs" / f"{NODE}.log")
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
            "kept memory: blocks adopted, by one thread",
            found["blocks"] / max(found["seconds"], 1e-9),
            "1/s",
            at_least=_PER_S,
        ),
        bar_row(
            "kept memory: longest gap between two gets that a client sees", gap.longest_s, "s", at_most=_GAP_S
        ),
    ]


def _held(client: mooncache.Client, keys: list[bytes]) -> int:
    return sum(sum(client.exists_many(keys[at : at + _BATCH])) for at in range(0, len(keys), _BATCH))


def _adopted(log: Path) -> dict[str, Any]:
    """What the node said of the memory that it adopted. Raises NodeUnavailable."""
    for line in reversed(log.read_text(encoding="utf-8", errors="replace").splitlines()):
        if Event.NODE_MEMORY_ADOPTED in line:
            return dict(json.loads(line))
    raise NodeUnavailable("The node that was started again adopted no memory.")


class _Gap:
    """A thread that gets one block over and over, and how long it had to wait for it at most."""

    def __init__(self, client: mooncache.Client, key: bytes) -> None:
        self._client, self._key = client, key
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gap", daemon=True)
        self.longest_s = 0.0
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
            if time.perf_counter() - killed_s > _START_S:
                raise NodeUnavailable(f"The node that was started again served nothing for {_START_S:.0f} s.")
            time.sleep(_LOOK_S)

    def _run(self) -> None:
        target = memoryview(bytearray(_BLOCK))
        last_s = time.perf_counter()
        while not self._ends.is_set():
            begun_s = time.perf_counter()
            try:
                came = self._client.get_into(self._key, target, timeout_s=1.0) is not None
            except MooncacheError:
                came = False
            now_s = time.perf_counter()
            if came:
                self.longest_s = max(self.longest_s, now_s - last_s)
                last_s, self._begun_s = now_s, begun_s
            time.sleep(_LOOK_S)
