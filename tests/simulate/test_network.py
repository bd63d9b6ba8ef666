"""Max-min sharing: the invariants hold after every change, and known cases come out as by hand."""

from __future__ import annotations

import heapq
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.simulate.network import Flow, Network


class Clock:
    """Plays the ends of flows in order, as the event loop does."""

    def __init__(self) -> None:
        self.queue: list[tuple[float, int, Flow, int]] = []
        self.now_s = 0.0
        self.ended: dict[int, float] = {}
        self.network = Network(self._push)

    def _push(self, at_s: float, flow: Flow, version: int) -> None:
        heapq.heappush(self.queue, (at_s, len(self.queue) + 1000 * flow.number + version, flow, version))

    def until(self, at_s: float) -> None:
        while self.queue and self.queue[0][0] <= at_s:
            self.now_s, _, flow, version = heapq.heappop(self.queue)
            if self.network.arrived(flow, version, self.now_s):
                self.ended[flow.number] = self.now_s
            self.network.check()
        self.now_s = max(self.now_s, at_s) if at_s < math.inf else self.now_s

    def start(self, links: tuple[int, ...], size: float, ceiling: float = math.inf) -> Flow:
        flow = self.network.start(links, size, self.now_s, ceiling)
        self.network.check()
        return flow


def test_two_flows_share_and_the_second_speeds_up() -> None:
    clock = Clock()
    link = clock.network.add(10.0)
    first, second = clock.start((link,), 10.0), clock.start((link,), 20.0)
    assert first.rate == second.rate == 5.0
    clock.until(math.inf)
    assert clock.ended == {first.number: pytest.approx(2.0), second.number: pytest.approx(3.0)}


def test_what_one_flow_cannot_use_goes_to_the_others() -> None:
    clock = Clock()
    wide, narrow = clock.network.add(10.0), clock.network.add(2.0)
    bound = clock.start((wide, narrow), 100.0)
    free = clock.start((wide,), 100.0)
    assert bound.rate == pytest.approx(2.0)
    assert free.rate == pytest.approx(8.0)


def test_ceiling_holds_until_it_is_raised() -> None:
    clock = Clock()
    link = clock.network.add(10.0)
    stream = clock.start((link,), 10.0, ceiling=1.0)
    assert stream.rate == 1.0
    clock.until(4.0)
    clock.network.raise_ceiling(stream, clock.now_s)
    assert stream.rate == 10.0
    clock.until(math.inf)
    assert clock.ended[stream.number] == pytest.approx(4.6)


def test_what_was_cancelled_is_not_counted() -> None:
    clock = Clock()
    link = clock.network.add(10.0)
    flow, other = clock.start((link,), 100.0), clock.start((link,), 10.0)
    clock.until(1.0)
    clock.network.cancel(flow, clock.now_s)
    clock.network.cancel(flow, clock.now_s)
    assert other.rate == 10.0
    assert clock.network.moved_bytes == pytest.approx(15.0)


def test_offer_is_what_a_newcomer_gets() -> None:
    clock = Clock()
    link = clock.network.add(12.0)
    clock.start((link,), 100.0, ceiling=2.0)
    clock.start((link,), 100.0)
    offered = clock.network.offer(link)
    newcomer = clock.start((link,), 100.0)
    assert newcomer.rate == pytest.approx(5.0)
    assert offered == pytest.approx(4.0)  # a third is certain; what others do not use is more


ACTIONS = st.tuples(
    st.sampled_from(["start", "start", "start", "wait", "cancel", "raise"]),
    st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True),
    st.floats(0.1, 50.0),
    st.floats(0.05, 30.0),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.5, 20.0), min_size=6, max_size=6), st.lists(ACTIONS, max_size=40))
def test_shares_are_max_min_fair_and_every_byte_arrives(
    capacities: list[float], actions: list[tuple[str, list[int], float, float]]
) -> None:
    clock = Clock()
    for capacity in capacities:
        clock.network.add(capacity)
    flows: list[Flow] = []
    cancelled: set[int] = set()
    for kind, links, size, ceiling in actions:
        going = [f for f in flows if f.number not in clock.ended and f.number not in cancelled]
        if kind == "start":
            flows.append(clock.start(tuple(links), size, ceiling if links[0] % 2 else math.inf))
        elif kind == "wait":
            clock.until(clock.now_s + ceiling / 10)
        elif going and kind == "cancel":
            clock.network.cancel(going[0], clock.now_s)
            cancelled.add(going[0].number)
        elif going:
            clock.network.raise_ceiling(going[-1], clock.now_s)
        clock.network.check()
    clock.until(math.inf)
    assert {f.number for f in flows} == set(clock.ended) | cancelled
    whole = sum(f.number in clock.ended for f in flows)
    assert whole + len(cancelled) == len(flows)
    assert list(clock.network.offers()) == pytest.approx(capacities)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(4, 7), st.floats(1, 20)), min_size=1, max_size=12))
def test_work_is_conserved_on_a_busy_link(sends: list[tuple[int, int, float]]) -> None:
    """As long as bytes for a link wait that nothing else holds up, the link is full."""
    clock = Clock()
    for _ in range(8):
        clock.network.add(1.0)
    for out, into, size in sends:
        clock.start((out, into), size)
    clock.until(math.inf)
    total = sum(size for _, _, size in sends)
    longest = max(sum(size for o, i, size in sends if link in (o, i)) for link in range(8))
    assert max(clock.ended.values()) >= longest * (1 - 1e-9)
    assert max(clock.ended.values()) <= total * (1 + 1e-9)
