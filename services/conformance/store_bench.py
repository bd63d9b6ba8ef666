"""A store on the bench: its clients, fresh keys, and reads that are checked at once."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from mooncache.conformance.core.content import content_of, difference, version_of
from mooncache.conformance.core.verdicts import NotOfferedError, PromiseBrokenError
from mooncache.conformance.limits import attempt, within
from mooncache.conformance.runner import TryProgress
from mooncache.conformance.store_contract import StoreUnderTest, call_limit_s, hook

HANG_FACTOR = 4
"""A call that takes so many times its limit hangs: on a busy machine a limit itself may be passed by a little."""


class ReadCount(Counter[str]):
    """How reads ended: found, missed, failed."""

    def text(self) -> str:
        return f"{self['found']:,} read, {self['missed']:,} missing, {self['failed']:,} refused"


@dataclass
class StoreBench:
    """What each try of a promise gets. `run` keeps its keys apart from those of other runs."""

    store: StoreUnderTest
    run: str
    seed: int
    rounds: int = 1
    progress: TryProgress = field(default_factory=TryProgress)
    _clients: list[StoreUnderTest] = field(default_factory=list)
    _number: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def rng(self, what: str) -> random.Random:
        """Randomness for one purpose, the same for each run with this seed."""
        return random.Random(f"{self.seed} {what}")

    def key(self, what: str) -> bytes:
        """A key that was never used."""
        with self._lock:
            self._number += 1
            return f"conformance/{self.run}/{what}/{self._number}".encode()

    @property
    def hang_s(self) -> float:
        """A call that takes longer hangs."""
        return HANG_FACTOR * call_limit_s(self.store)

    def hook(self, name: str) -> Callable[..., Any]:
        """A hook of the store, or NotOfferedError."""
        return hook(self.store, name)

    def other_client(self) -> StoreUnderTest:
        """Another client of the same store, ended with the bench; the store itself when there can be no other."""
        if not self._clients:
            try:
                config = self.hook("attach_config")()
            except NotOfferedError:
                return self.store
            make = cast("Callable[[dict[str, Any]], StoreUnderTest]", type(self.store))
            self._clients.append(make(config))
        return self._clients[0]

    def clients(self) -> list[StoreUnderTest]:
        """The store and its other client, or the store alone."""
        other = self.other_client()
        return [self.store] if other is self.store else [self.store, other]

    def close(self) -> None:
        """End the other client; the store belongs to the caller."""
        for client in self._clients:
            client.close()

    # --- checked calls ---------------------------------------------------------------------------------------

    def must_read(self, key: bytes, right: bytes, client: StoreUnderTest | None = None) -> None:
        """Nothing is broken or full here: what was put is found.

        Raises:
            PromiseBrokenError: it is not, or with other bytes.
        """
        found = (client or self.store).get(key)
        if found is None:
            raise PromiseBrokenError(f"{shown(key)} was put, and is missing, with nothing broken or full")
        if wrong := difference(found, right):
            raise PromiseBrokenError(f"{shown(key)}: {wrong}")

    def must_miss(self, key: bytes, why: str, client: StoreUnderTest | None = None) -> None:
        """Raises PromiseBrokenError: something is found under a key."""
        store = client or self.store
        found = store.get(key)
        if found is not None:
            raise PromiseBrokenError(f"{shown(key)} {why}, and {len(found)} bytes are read")
        if store.exist(key):
            raise PromiseBrokenError(f"{shown(key)} {why}, and is said to exist")

    def may_read(
        self, store: StoreUnderTest, key: bytes, size: int, counts: ReadCount, versions: int = 1
    ) -> None:
        """A read that may miss or fail, but not be wrong.

        Raises:
            PromiseBrokenError: bytes that were never put under this key.
        """
        got = attempt(lambda: store.get(key))
        found = got.answer
        if found is None:
            counts["missed" if got.refusal is None else "failed"] += 1
            return
        if version_of(found, key, size, range(versions)) is None:
            raise PromiseBrokenError(f"{shown(key)}: {difference(found, content_of(key, size))}")
        counts["found"] += 1

    def timed(self, what: str, call: Callable[[], Any]) -> str:
        """How a call ended, as "done" or the name of what it raised.

        Raises:
            PromiseBrokenError: it hangs, or reads wrong bytes.
        """
        return attempt(lambda: within(self.hang_s, what, call)).ended

    def until(self, limit_s: float, what: str, call: Callable[[], None]) -> float:
        """Try a call until it raises nothing; the seconds that took.

        Raises:
            PromiseBrokenError: it never came to that, or the call itself found a promise broken.
        """
        begun_s = time.monotonic()
        last = "nothing was tried"
        while time.monotonic() - begun_s < limit_s:
            refusal = attempt(lambda: within(self.hang_s, what, call)).refusal
            if refusal is None:
                return time.monotonic() - begun_s
            last = repr(refusal)
            time.sleep(0.1)
        raise PromiseBrokenError(f"{what}: not within {limit_s:g} s; at last {last}")


def shown(key: bytes) -> str:
    """A key for people."""
    return repr(key) if len(key) <= 80 else f"a key of {len(key)} bytes"
