"""A client of the pool alone, in a thread: blocks whose bytes follow from their keys are put and read again."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import mooncache
from mooncache.chaos.core.records import PoolTally
from mooncache.errors import MooncacheError

_BLOCK_BYTES: Final = 32 << 10
_BATCH: Final = 8
_KEYS_KEPT: Final = 256
_CALL_S: Final = 5.0
HUNG_S: Final = 4 * _CALL_S
_PAUSE_S: Final = 0.05


def block_of(key: str) -> bytes:
    """The bytes of a key."""
    return random.Random(key).randbytes(_BLOCK_BYTES)


class PoolLoad:
    """Puts and reads from `start` to `end`."""

    def __init__(self, tally: PoolTally, run: str, client_settings: dict[str, Any]) -> None:
        self._tally, self._run, self._settings = tally, run, client_settings
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="chaos-pool", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def end(self) -> None:
        """Stop; a call that is under way may take its time limit. One that takes longer counts as hanging."""
        self._ended.set()
        self._thread.join(HUNG_S)
        self._tally.hung += self._thread.is_alive()

    def _loop(self) -> None:
        rng = random.Random(self._run)
        keys: deque[str] = deque(maxlen=_KEYS_KEPT)
        number = 0
        client: mooncache.Client | None = None
        while not self._ended.is_set():
            try:
                if client is None:
                    client = mooncache.connect(**self._settings, timeout_s=_CALL_S)
                fresh = [f"chaos-{self._run}-{number + each}" for each in range(_BATCH)]
                number += _BATCH
                self._timed(self._put, client, fresh)
                keys.extend(fresh)
                self._timed(self._read, client, rng.sample(keys, min(len(keys), _BATCH)))
            except MooncacheError as error:
                self._tally.errors[error.name] += 1
            self._ended.wait(_PAUSE_S)
        if client is not None:
            client.close()

    def _timed(
        self, call: Callable[[mooncache.Client, list[str]], None], client: mooncache.Client, keys: list[str]
    ) -> None:
        begun_s = time.monotonic()
        try:
            call(client, keys)
        finally:
            self._tally.hung += time.monotonic() - begun_s > HUNG_S

    def _put(self, client: mooncache.Client, keys: list[str]) -> None:
        result = client.put_many(keys, [block_of(key) for key in keys])
        self._tally.put += len(keys) - len(result.errors)

    def _read(self, client: mooncache.Client, keys: list[str]) -> None:
        for key in keys:
            found = client.get(key)
            self._tally.read += 1
            if found is None:
                self._tally.missed += 1
            elif bytes(found) != block_of(key):
                self._tally.wrong.append(f"{key} came back with other bytes")
