"""Flows over shared links: every flow gets its max-min fair share, recomputed only where something changed.

Idea: a flow crosses a few links (SSD, NIC out, NIC in) and may have a ceiling of its own (a stream is not faster
than the prefill that makes it). A link whose flows could not fill it even at their ceilings limits no flow, so it
does not connect its flows: a change reaches only the flows that are linked by links that could bind.
Invariants: no link carries more than its capacity; a flow below its ceiling has a full link on which no flow is
faster; bytes are neither lost nor made.
Source of the allocation: progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_SLACK = 1.0 + 1e-9


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes under way. `done` is called at the end; `version` tells outdated ends in the event queue apart."""

    number: int
    links: tuple[int, ...]
    bytes_left: float
    ceiling: float
    rate: float = 0.0
    updated_s: float = 0.0
    version: int = 0
    done: Callable[[Flow, float], None] | None = None


class Network:
    """Links by number and the flows on them.

    push: called with (time, flow, version) whenever the end of a flow changes; the event loop brings it back
    with `arrived`.
    """

    def __init__(self, push: Callable[[float, Flow, int], None]) -> None:
        self._push = push
        self._capacity: list[float] = []
        self._flows: list[dict[int, Flow]] = []
        self._used: list[float] = []  # sum of the rates
        self._asked: list[float] = []  # sum of the ceilings: could the link bind?
        self._offer = np.zeros(16)
        self._number = 0
        self.moved_bytes = 0.0

    def add(self, bytes_per_s: float) -> int:
        """Add a link and return its number."""
        self._capacity.append(bytes_per_s)
        self._flows.append({})
        self._used.append(0.0)
        self._asked.append(0.0)
        number = len(self._capacity) - 1
        if number >= len(self._offer):
            self._offer = np.concatenate([self._offer, np.zeros(len(self._offer))])
        self._offer[number] = bytes_per_s
        return number

    def offers(self) -> NDArray[np.float64]:
        """The bandwidth of one more flow on each link (a view, valid until a link is added)."""
        return self._offer[: len(self._capacity)]

    def offer(self, link: int) -> float:
        """The bandwidth of one more flow on the link."""
        return float(self._offer[link])

    def start(self, links: Sequence[int], size: float, now_s: float, ceiling: float = math.inf) -> Flow:
        """Begin to move `size` bytes over all of the links at once, never faster than `ceiling` bytes/s."""
        own = tuple(links)
        self._number += 1
        flow = Flow(self._number, own, size, min([ceiling, *(self._capacity[link] for link in own)]))
        flow.updated_s = now_s
        self.moved_bytes += size
        easy = True
        for link in own:
            easy = easy and self._used[link] + flow.ceiling <= self._capacity[link] * _SLACK
            self._flows[link][flow.number] = flow
            self._asked[link] += flow.ceiling
        if easy:
            self._set_rate(flow, flow.ceiling, now_s)
            self._refresh(own)
        else:
            self._share(own, now_s)
        return flow

    def raise_ceiling(self, flow: Flow, now_s: float, ceiling: float = math.inf) -> None:
        """Let a flow run at another ceiling (a stream whose prefill has ended is bound by links only)."""
        new = min([ceiling, *(self._capacity[link] for link in flow.links)])
        for link in flow.links:
            self._asked[link] += new - flow.ceiling
        bound = flow.rate >= flow.ceiling / _SLACK
        flow.ceiling = new
        if bound:  # else its links hold it back, and they have not changed
            self._share(flow.links, now_s)

    def arrived(self, flow: Flow, version: int, now_s: float) -> bool:
        """An end that was pushed has come: True when it is still true; the flow is then gone."""
        if version != flow.version:
            return False
        flow.bytes_left = 0.0
        self._remove(flow, now_s)
        return True

    def cancel(self, flow: Flow, now_s: float) -> float:
        """Stop a flow; returns the bytes that it has not moved, which are not counted either."""
        if flow.version < 0:
            return 0.0
        self._settle(flow, now_s)
        self.moved_bytes -= flow.bytes_left
        self._remove(flow, now_s)
        return flow.bytes_left

    def _remove(self, flow: Flow, now_s: float) -> None:
        tight = False
        for link in flow.links:
            tight = tight or self._used[link] * _SLACK >= self._capacity[link]
            del self._flows[link][flow.number]
            if self._flows[link]:
                self._used[link] -= flow.rate
                self._asked[link] -= flow.ceiling
            else:
                self._used[link] = self._asked[link] = 0.0  # no rounding errors are kept
        flow.version = -1
        if tight:
            self._share(flow.links, now_s)
        else:
            self._refresh(flow.links)

    def _settle(self, flow: Flow, now_s: float) -> None:
        flow.bytes_left = max(0.0, flow.bytes_left - flow.rate * (now_s - flow.updated_s))
        flow.updated_s = now_s

    def _set_rate(self, flow: Flow, rate: float, now_s: float) -> None:
        self._settle(flow, now_s)
        for link in flow.links:
            self._used[link] += rate - flow.rate
        flow.rate = rate
        flow.version += 1
        if rate > 0:
            self._push(now_s + flow.bytes_left / rate, flow, flow.version)

    def _refresh(self, links: Sequence[int]) -> None:
        for link in links:
            capacity = self._capacity[link]
            free = capacity - self._used[link]
            share = capacity / (len(self._flows[link]) + 1)
            self._offer[link] = free if free > share else share

    def _binding(self, link: int) -> bool:
        return self._asked[link] > self._capacity[link] * _SLACK

    def _component(self, links: Sequence[int]) -> tuple[dict[int, Flow], dict[int, None]]:
        """Flows that a change on these links can reach, and the links that may bind them."""
        flows: dict[int, Flow] = {}
        bounds: dict[int, None] = {}
        for link in links:
            flows.update(self._flows[link])
            if self._binding(link):
                bounds[link] = None
        stack = list(flows.values())
        while stack:
            flow = stack.pop()
            for link in flow.links:
                if link in bounds or not self._binding(link):
                    continue
                bounds[link] = None
                for number, other in self._flows[link].items():
                    if number not in flows:
                        flows[number] = other
                        stack.append(other)
        return flows, bounds

    def _share(self, links: Sequence[int], now_s: float) -> None:
        """Give every flow that a change on these links can reach its share, and push the ends that changed."""
        flows, bounds = self._component(links)
        rates = self._fill(flows, bounds)
        touched: dict[int, None] = dict.fromkeys(links)
        for number, flow in flows.items():
            rate = rates[number]
            if rate != flow.rate:
                self._set_rate(flow, rate, now_s)
                touched.update(dict.fromkeys(flow.links))
        self._refresh(list(touched))

    def _fill(self, flows: dict[int, Flow], bounds: dict[int, None]) -> dict[int, float]:
        """Progressive filling: the lowest ceiling or the tightest link is settled first.

        The share of a link only grows while flows are settled below it, so a link is looked at again only when it
        comes to the top of the heap with a share that is outdated.
        """
        left = {link: self._capacity[link] for link in bounds}
        waiting = {link: len(self._flows[link]) for link in bounds}
        tight = [(left[link] / count, link) for link, count in waiting.items() if count]
        heapq.heapify(tight)
        rates: dict[int, float] = {}
        for flow in sorted(flows.values(), key=lambda flow: (flow.ceiling, flow.number)):
            while flow.number not in rates:
                share, tightest = tight[0] if tight else (math.inf, -1)
                if tightest >= 0:
                    now = left[tightest] / waiting[tightest] if waiting[tightest] else math.inf
                    if now > share:
                        if waiting[tightest]:
                            heapq.heapreplace(tight, (now, tightest))
                        else:
                            heapq.heappop(tight)
                        continue
                if flow.ceiling <= share:
                    settled, level = [flow], flow.ceiling
                else:
                    settled = [other for other in self._flows[tightest].values() if other.number not in rates]
                    level = max(share, 0.0)
                for other in settled:
                    rates[other.number] = level
                    for link in other.links:
                        if link in left:
                            left[link] -= level
                            waiting[link] -= 1
        return rates

    def check(self) -> None:
        """Assert the invariants; for tests."""
        for link, flows in enumerate(self._flows):
            total = sum(flow.rate for flow in flows.values())
            assert total <= self._capacity[link] * (1 + 1e-6), f"link {link} carries {total}"
            assert math.isclose(total, self._used[link], rel_tol=1e-6, abs_tol=1e-3), (
                f"link {link} is miscounted"
            )
        for flows in self._flows:
            for flow in flows.values():
                if flow.rate >= flow.ceiling * (1 - 1e-6):
                    continue
                assert any(self._bottleneck(flow, link) for link in flow.links), "a flow could be faster"

    def _bottleneck(self, flow: Flow, link: int) -> bool:
        full = self._used[link] >= self._capacity[link] * (1 - 1e-6)
        fastest = max(other.rate for other in self._flows[link].values())
        return full and flow.rate >= fastest * (1 - 1e-6)
