"""Blocks that will not come: the waits for them at store nodes should end now, not at their time limits.

A prefill leg that failed, ended without having stored, or went away with its request or its engine leaves keys that
no leg writes. They are kept here until they are due, because another plan of the same request may still make
its blocks. Then they are taken out, without those that running requests make (`InFlight.unmade`).

This saves time only: a client whose wait ends looks again and computes what is missing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from mooncache.client.keys import KEY_BYTES
from mooncache.conductor.core.in_flight import InFlight, Running

OPEN_MAX: Final = 1024
AGAIN_S: Final = 1.0  # so long another plan of the request may take


class GiveUpReason(StrEnum):
    """Why the blocks will not come."""

    FAILED = "failed"
    """The prefill leg failed, and none takes over."""
    NOT_STORED = "not_stored"
    """It ended well, and the pool did not get them."""
    ENDED = "ended"
    """The request, or the engine that computed them, is gone."""
    ELSEWHERE = "elsewhere"
    """The pool has them, perhaps at other nodes: who waits at this one should look again."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Blocks `begin` to `end` of a chain that will not come to a store node ("": to any)."""

    decision_id: str
    keys: bytes
    begin: int
    end: int
    store_node: str
    reason: GiveUpReason
    due_s: float = 0.0
    pool_tenant: str = ""

    @property
    def packed(self) -> bytes:
        """The keys that will not come."""
        return self.keys[self.begin * KEY_BYTES : self.end * KEY_BYTES]


class GiveUps:
    """What is to be given up, by decision. The oldest are dropped beyond OPEN_MAX, and `dropped` counts them."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, GiveUp] = OrderedDict()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, running: Running, begin: int, end: int, reason: GiveUpReason, due_s: float) -> None:
        """The request will not make these of its blocks; another one may until `due_s`."""
        if begin >= end:
            return
        self._open[running.decision_id] = GiveUp(
            running.decision_id,
            running.keys,
            begin,
            end,
            running.store_node,
            reason,
            due_s,
            running.pool_tenant,
        )
        while len(self._open) > OPEN_MAX:
            self._open.popitem(last=False)
            self.dropped += 1

    def ended(self, decision_id: str, now_s: float) -> None:
        """The request has ended, or has another plan now: there is nothing more to wait for."""
        known = self._open.get(decision_id)
        if known is not None and known.due_s > now_s:
            self._open[decision_id] = replace(known, due_s=now_s)

    def take(self, now_s: float, in_flight: InFlight) -> list[GiveUp]:
        """What is due, once: one for each range of blocks that no running request makes."""
        due = [each for each in self._open.values() if each.due_s <= now_s]
        for each in due:
            del self._open[each.decision_id]
        return [
            replace(each, begin=begin, end=end)
            for each in due
            for begin, end in in_flight.unmade(each.keys, each.begin, each.end, each.store_node)
        ]

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert len(self._open) <= OPEN_MAX, "too many blocks to be given up"
        assert all(each.begin < each.end for each in self._open.values()), "a range without blocks"
