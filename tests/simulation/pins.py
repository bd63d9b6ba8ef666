"""Pins, beside what masters and nodes believe: who asked for which, and which node's process holds it.

A node has one pin of a block, whoever asked for it: the last pin sets its end, an unpin of anyone ends it, and it dies
with the process. So a pin that a client was promised lasts until its end, unless one of these came after the client
had asked.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.model_store import BlockName, short_name

RULE = "pins hold"


class PinLedger:
    """Notes pins; what breaks the rule goes to `fail(rule, text)`. Times are seconds of the world's clock."""

    def __init__(self, now_s: Callable[[], float], fail: Callable[[str, str], None]) -> None:
        self._now_s, self._fail = now_s, fail
        self._asked: set[tuple[BlockName, int]] = set()  # block, ttl_ms
        self._given_back: set[BlockName] = set()
        self._until_s: dict[tuple[str, BlockName], float] = {}  # of a node's living process
        self._cut_s: dict[BlockName, float] = {}  # when one of its pins last ended before its time

    # --- clients

    def asks(self, name: BlockName, ttl_ms: int) -> None:
        """A client is about to pin a block."""
        self._asked.add((name, ttl_ms))

    def gives_back(self, name: BlockName) -> None:
        """A client is about to unpin a block. Its call may be carried out now, late, twice or never."""
        self._given_back.add(name)

    def promised(self, name: BlockName, asked_s: float, ttl_ms: int) -> None:
        """A client has heard that the block is pinned: then a node has pinned it since it asked, for as long."""
        until_s = asked_s + ttl_ms / 1e3
        if self._now_s() >= until_s or self._cut_s.get(name, -1.0) >= asked_s:
            return
        if not any(end_s >= until_s for (_, held), end_s in self._until_s.items() if held == name):
            self._fail(
                RULE, f"a client was promised {short_name(name)}, and no node has pinned it for so long"
            )

    # --- nodes

    def taken(self, node: str, name: BlockName, ttl_ms: int) -> None:
        """A node's process has pinned a block by command."""
        if (name, ttl_ms) not in self._asked:
            self._fail(RULE, f"{node} pinned {short_name(name)} for {ttl_ms} ms, and no client asked for it")
        until_s = self._now_s() + ttl_ms / 1e3
        if until_s < self._until_s.get((node, name), 0.0):
            self._cut_s[name] = self._now_s()
        self._until_s[node, name] = until_s

    def released(self, node: str, name: BlockName) -> None:
        """A node's process has unpinned a block by command."""
        if name not in self._given_back:
            self._fail(RULE, f"{node} unpinned {short_name(name)}, and no client asked for it")
        self._end(node, name)

    def copy_lost(self, node: str, name: BlockName, reason: str) -> None:
        """A node's process let a copy go; only wrong bytes excuse that of a pinned one."""
        if self._end(node, name) and reason != "corrupt":
            self._fail(RULE, f"{node} let {short_name(name)} go ({reason}), which it has pinned")

    def process_died(self, node: str) -> None:
        """A pin lives in the memory of a process."""
        for where, name in [each for each in self._until_s if each[0] == node]:
            self._end(where, name)

    def _end(self, node: str, name: BlockName) -> bool:
        """The node's pin is over; whether that is before its time."""
        early = self._until_s.pop((node, name), 0.0) > self._now_s()
        if early:
            self._cut_s[name] = self._now_s()
        return early
