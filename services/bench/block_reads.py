"""Reads of blocks on a thread of their own, one after the other, while something happens to the cluster."""

from __future__ import annotations

import random
import threading
import time

import mooncache
from mooncache.errors import MooncacheError
from mooncache.reporting.rows import p99


class BlockReads:
    """Reads the blocks in random order until `end`, and notes how long each read took.

    Attributes:
        failed: reads that found no block, or raised.
    """

    def __init__(
        self, client: mooncache.Client, keys: list[str], *, seed: int = 1, pause_s: float = 0.0
    ) -> None:
        self._client, self._keys, self._pause_s = client, keys, pause_s
        self._rng = random.Random(seed)
        self._ended = threading.Event()
        self._times: list[tuple[float, float]] = []  # when it began, how long it took
        self.failed = 0
        self._thread = threading.Thread(target=self._read, name="reader")
        self._thread.start()

    def _read(self) -> None:
        while not self._ended.wait(self._pause_s) if self._pause_s else not self._ended.is_set():
            begun_s = time.monotonic()
            try:
                self.failed += self._client.get(self._rng.choice(self._keys)) is None
            except MooncacheError:
                self.failed += 1
            self._times.append((begun_s, time.monotonic() - begun_s))

    @property
    def count(self) -> int:
        """Reads so far."""
        return len(self._times)

    def end(self) -> None:
        """Stop reading."""
        self._ended.set()
        self._thread.join()

    def p99_s(self, begin_s: float, end_s: float) -> float:
        """The 99th percentile of the reads that began between two moments, in seconds; 0.0 without any."""
        took = [took for begun_s, took in self._times if begin_s <= begun_s < end_s]
        return p99(took) if took else 0.0
