"""Where blocks are that the native core cannot place: asked of the master, of all nodes while it is away.

In a small cluster the core asks every node itself and nothing comes here. In a larger one a reader that waits for a
block asks for it every few milliseconds; what was nowhere a moment ago is not asked for again, because the master hears
of new blocks only with a node's next report.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mooncache.client.native_call import call_native
from mooncache.errors import MooncacheError

if TYPE_CHECKING:
    from mooncache._native import Client as NativeClient

Locate = Callable[[bytes, float], bytes]
"""Packed keys and a time limit in seconds -> packed locations (see BlockIndex.locate)."""

ABSENT_MIN_S = 0.1  # how often nodes report, unless configured otherwise
ABSENT_MAX_S = 1.0
AWAY_S = 5.0  # the master did not answer: nodes are asked for so long before it is asked again
_ABSENT_SHARE = 1 / 8  # of the time that a block has been awaited
_FORGET_S = 10.0
_ABSENT_KEYS_MAX = 65_536
_SEARCH_KEYS_MAX = 1_024  # keys that one search takes to every node


class Locator:
    """Thread-safe. `locate` None: there is no master, only nodes."""

    def __init__(
        self, native: NativeClient, locate: Locate | None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._native = native
        self._locate = locate
        self._now_s = now_s
        self._lock = threading.Lock()
        self._absent: dict[bytes, tuple[float, float]] = {}  # key -> first asked, not to be asked before
        self._away_until_s = 0.0

    def learn(self, missed: Sequence[bytes], limit_s: float) -> bool:
        """Tell the core where missed keys are; True when it knows more than before and is worth asking again."""
        end_s = self._now_s() + limit_s
        unlocated = self._native.unlocated(b"".join(missed)) if missed else ()
        wanted = self._due([missed[position] for position in unlocated])
        if not wanted:
            return False
        found = self._ask_master(wanted, limit_s / 2)  # half: the block has to be fetched too
        if found is None:
            wanted = wanted[:_SEARCH_KEYS_MAX]
            found = self._ask_nodes(wanted, (end_s - self._now_s()) / 2)
        self._remember(wanted, found)
        return any(found)

    def _ask_master(self, keys: list[bytes], limit_s: float) -> list[bool] | None:
        """For each key whether it is anywhere; None when there is no answer."""
        if self._locate is None or self._now_s() < self._away_until_s:
            return None
        packed = b"".join(keys)
        try:
            locations = self._locate(packed, limit_s)
        except MooncacheError:
            self._away_until_s = self._now_s() + AWAY_S
            return None
        self._native.learn_locations(packed, locations)
        missing = set(self._native.unlocated(packed))
        return [position not in missing for position in range(len(keys))]

    def _ask_nodes(self, keys: list[bytes], limit_s: float) -> list[bool]:
        """The same from the nodes themselves; the core remembers who has what."""
        if limit_s <= 0:
            return [False] * len(keys)
        packed = b"".join(keys)
        try:
            call_native(self._native.match, packed, limit_s, False, None, None, True)
        except MooncacheError:
            return [False] * len(keys)  # the cache can only save work: an unlocated key is a miss
        missing = set(self._native.unlocated(packed))
        return [position not in missing for position in range(len(keys))]

    def _due(self, keys: list[bytes]) -> list[bytes]:
        now_s = self._now_s()
        with self._lock:
            return [key for key in keys if key not in self._absent or self._absent[key][1] <= now_s]

    def _remember(self, keys: list[bytes], found: list[bool]) -> None:
        now_s = self._now_s()
        with self._lock:
            for key, there in zip(keys, found, strict=True):
                first_s, until_s = self._absent.pop(key, (now_s, now_s))
                if there:
                    continue
                if now_s - until_s > _FORGET_S:
                    first_s = now_s
                pause_s = min(max((now_s - first_s) * _ABSENT_SHARE, ABSENT_MIN_S), ABSENT_MAX_S)
                self._absent[key] = first_s, now_s + pause_s
            while len(self._absent) > _ABSENT_KEYS_MAX:
                del self._absent[next(iter(self._absent))]  # the one that was asked for longest ago
