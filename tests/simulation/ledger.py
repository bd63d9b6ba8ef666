"""What is true in a simulated cluster, beside what its processes believe, and invariants that are checked at once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from tests.simulation.model_store import BlockName, short_name
from tests.simulation.pins import PinLedger


class BrokenInvariantError(AssertionError):
    """An invariant is broken. `rule` is its short name."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule, self._text = rule, text

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.rule, self._text)


class Ledger:
    """Notes what happens; the first broken invariant ends the run."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.broken: BrokenInvariantError | None = None
        self.holders: Callable[[BlockName], Iterable[str]] = lambda _: ()
        self.lasting: Callable[[BlockName], Iterable[str]] = lambda _: ()  # without those that drain
        self.durable: set[bytes] = set()  # keys that only puts of several replicas and repairs touch
        self.removed: set[bytes] = set()  # keys of which a client asked for the removal
        self.faults = 0  # deaths of processes so far
        self._safe: dict[BlockName, int] = {}  # with two copies, as of which fault
        self._other_loss_s: dict[BlockName, float] = {}
        self._moments = itertools.count(1)  # the order of confirmations and losses
        self._confirmed: dict[
            tuple[str, BlockName], dict[str, int]
        ] = {}  # call -> who has the block, as of when
        self._lost: dict[tuple[str, BlockName], int] = {}  # a node's copy -> when it last went
        self._terms: dict[int, str] = {}
        self.pins = PinLedger(now_s, self.fail)
        self.counts: Counter[str] = Counter()

    def fail(self, rule: str, text: str) -> None:
        """An invariant is broken."""
        if self.broken is None:
            self.broken = BrokenInvariantError(rule, f"{text} (at {self._now_s():.3f} s)")

    # --- leaders

    def term_begun(self, term: int, master: str) -> None:
        """A master leads from now on."""
        first = self._terms.setdefault(term, master)
        if first != master:
            self.fail("one leader a term", f"{first} and {master} both lead in term {term}")

    def leads_alone(self, who: str, others: list[str]) -> None:
        """A process was elected. others: those that lead by their own clocks."""
        if others:
            self.fail("one leader at a time", f"{who} was elected while {others[0]} led")

    def obeyed(self, node: str, incarnation: int, fence: Any, newest: int, method: str) -> None:
        """A node carried a command out; `newest` is the newest term that it had heard of before."""
        self.counts["commands"] += 1
        if fence.term < newest:
            self.fail(
                "fencing", f"{node} carried out {method} of term {fence.term} after it heard of {newest}"
            )
        if fence.incarnation and fence.incarnation != incarnation:
            self.fail("fencing", f"{node} carried out {method} that was meant for another life of it")

    # --- bytes

    def read(self, who: str, name: BlockName, data: object) -> None:
        """A reader got bytes."""
        self.counts["reads"] += 1
        if data != name:
            self.fail(
                "no foreign bytes",
                f"{who} read block {short_name(name)} and got the bytes of {short_name(data)}",
            )

    # --- copies

    def copy_made(self, node: str, name: BlockName) -> None:
        """A copy is committed."""
        if name[1] in self.durable and len(set(self.lasting(name))) >= 2:
            self._safe[name] = self.faults

    def confirmed(self, node: str, name: BlockName, call: str) -> None:
        """A master asked, in a call of somebody, and the node has the block."""
        self._confirmed.setdefault((call, name), {})[node] = next(self._moments)

    def copy_lost(self, node: str, name: BlockName, reason: str, call: str) -> None:
        """A node let a copy go: evicted, removed or drained by a command, corrupt. call: in which it was commanded."""
        self.counts[reason] += 1
        key = name[1]
        self._lost[node, name] = next(self._moments)
        self.pins.copy_lost(node, name, reason)
        if reason in ("evicted", "corrupt"):
            self._safe.pop(name, None)
            self._other_loss_s[name] = self._now_s()
            return
        if key in self.removed or self._elsewhere(node, name):
            return
        if key in self.durable and name in self._safe and self.faults - self._safe[name] <= 1:
            self.fail("two replicas", f"a command at {node} took the last copy of {short_name(name)}")
        if reason == "removed":
            # Whoever drops a copy has asked another node for its own before; that one may have lost it since.
            asked = self._confirmed.get((call, name), {})
            if not any(self._lost.get((other, name), 0) > at for other, at in asked.items()):
                self.fail(
                    "last copy", f"{node} dropped {short_name(name)}, and no other node was asked for it"
                )
        elif self._now_s() - self._other_loss_s.get(name, -1e9) > 30.0:
            self.fail("last copy", f"a command at {node} took the only copy of {short_name(name)}")

    def process_died(self, node: str, names: Iterable[BlockName], *, kept: bool) -> None:
        """A store node's process ended. kept: its blocks are on a disk; else its memory is gone."""
        self.faults += 1
        self.pins.process_died(node)
        for name in names:
            self._lost[node, name] = next(self._moments)
            if kept:
                continue
            self._other_loss_s[name] = self._now_s()
            if self._elsewhere(node, name):
                continue
            if name in self._safe and self.faults - self._safe[name] <= 1:
                self.fail("two replicas", f"{short_name(name)} was on two nodes and went with {node} alone")
            self._safe.pop(name, None)

    def _elsewhere(self, node: str, name: BlockName) -> bool:
        return any(other != node for other in self.holders(name))

    # --- requests

    def counted_unheard(self, node: str, what: str) -> None:
        """A node counts as reported what no master has acknowledged to it."""
        self.fail("reports are acknowledged", f"{node} counts {what} as reported, and no master said so")

    def ended_late(self, who: str, what: str, limit_s: float) -> None:
        """A call or a request took longer than its own limit allows."""
        self.fail("every request ends", f"{what} of {who} has not ended {limit_s:g} s after its deadline")
