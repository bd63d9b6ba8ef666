"""The nodes' policy "mooncache" decides as the simulator's does, to the bit, whatever moves it is given.

Both are driven with the same moves: chains that are asked for, blocks that come and go, blocks that cannot go, room
that is needed. Worths are compared with ==.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache import _native
from mooncache.simulate.cache import make
from mooncache.simulate.cache.hazard import BAND_BEGIN_S
from mooncache.simulate.cache.reuse import NO_BLOCK, Reuse
from mooncache.traces import Trace, generate
from mooncache.traces.generator import conversation, tool_agent
from tests.reuse_prediction import predicted_hits


class Both:
    """The simulator's policy and the nodes', in step, for one node that holds `capacity_blocks`."""

    def __init__(self, capacity_blocks: int, start_uses: int = 512, chains_max: int = 1 << 16) -> None:
        self.simulated = Reuse(capacity_blocks, chains_max, start_uses)
        self.native = _native.Reuse(chains_max, start_uses)
        self.capacity_blocks = capacity_blocks
        self.stored: set[int] = set()  # what the node stores, known or not
        self.aside: set[int] = set()
        self.victims = 0

    def seen(self, blocks: Sequence[int], now_s: float) -> None:
        here = sum(1 << at for at, block in enumerate(blocks) if block in self.stored)
        self.simulated.seen(blocks, now_s, here=self.stored)
        self.native.seen(list(blocks), now_s, here.to_bytes(len(blocks) // 8 + 1, "little"))
        self.aside -= set(blocks)

    def put(self, block: int, now_s: float) -> None:
        self.stored.add(block)
        assert self.simulated.stored(block, now_s) == self.native.stored(block, now_s)

    def remove(self, block: int) -> None:
        self.stored.discard(block)
        self.aside.discard(block)
        self.simulated.discard(block)
        self.native.discard(block)

    def set_aside(self, block: int) -> None:
        self.aside.add(block)
        self.simulated.set_aside(block)
        self.native.set_aside(block)

    def victim(self, now_s: float, incoming: int | None = None) -> int | None:
        expected = self.simulated.victim(now_s, NO_BLOCK if incoming is None else incoming)
        got = self.native.victim(now_s, incoming)
        assert got == (None if expected is None else tuple(expected))
        self.victims += 1
        return None if expected is None else expected.block

    def make_room(self, now_s: float, incoming: int) -> None:
        while len(self.stored) >= self.capacity_blocks:
            victim = self.victim(now_s, incoming)
            self.remove(min(self.stored) if victim is None else victim)

    def check(self) -> None:
        assert self.native.check() == ""
        assert len(self.native) == len(self.simulated)
        assert all(block in self.native for block in self.simulated._owner)


def replay(trace: Trace, both: Sequence[Both], placed: Callable[[int], int]) -> None:
    """Every node sees every chain and stores the blocks that are placed on it."""
    for request, now_s in enumerate(trace.arrival_s.tolist()):
        chain = trace.blocks(request)
        for number, node in enumerate(both):
            node.seen(chain, now_s)
            for block in chain:
                if placed(block) == number and block not in node.stored:
                    node.make_room(now_s, block)
                    node.put(block, now_s)
    for node in both:
        node.check()


@pytest.mark.parametrize(
    ("capacity_blocks", "nodes", "start_uses"),
    [(300, 1, 0), (1_500, 1, 512), (6_000, 1, 200), (2_000, 3, 100)],
)
def test_same_victims_in_the_same_order_over_a_trace(
    capacity_blocks: int, nodes: int, start_uses: int
) -> None:
    trace = generate(conversation(requests=2_500), random.Random(7))
    both = [Both(capacity_blocks // nodes, start_uses) for _ in range(nodes)]
    replay(trace, both, lambda block: (block * 2_654_435_761 >> 7) % nodes)
    assert all(node.victims > 1_000 for node in both)


def test_same_victims_where_sessions_share_beginnings() -> None:
    node = Both(1_000, start_uses=50)
    replay(generate(tool_agent(requests=1_500), random.Random(3)), [node], lambda _: 0)
    assert node.victims > 1_000


def test_same_victims_with_few_chains_to_learn_from() -> None:
    node = Both(500, start_uses=0, chains_max=40)
    replay(generate(conversation(requests=600), random.Random(11)), [node], lambda _: 0)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            ["turn", "turn", "turn", "fork", "new", "put", "remove", "aside", "repeat", "victim"]
        ),
        st.integers(0, 7),
        st.sampled_from([0.0, 0.001, 0.7, 5.0, 31.0, 95.0, 400.0, *BAND_BEGIN_S[1:]]),
    ),
    max_size=120,
)


@given(moves=MOVES, capacity=st.integers(1, 40), seed=st.integers(0, 1 << 30), start=st.sampled_from([0, 20]))
@settings(max_examples=150, deadline=None)
def test_same_decisions_whatever_happens(
    moves: list[tuple[str, int, float]], capacity: int, seed: int, start: int
) -> None:
    rng = random.Random(seed)
    node = Both(capacity, start, chains_max=12)
    sessions: list[list[int]] = [[1, 2, 3, 4] for _ in range(8)]  # they share a beginning
    now_s, fresh = 0.0, 100
    for move, number, passed_s in moves:
        now_s += passed_s
        chain = sessions[number]
        if move in ("turn", "fork", "new"):
            kept = {"turn": len(chain), "fork": rng.randint(0, len(chain)), "new": 0}[move]
            grown = rng.randint(0, 15)
            chain = sessions[number] = [*chain[:kept], *range(fresh, fresh + grown)]
            fresh += grown
            node.seen(chain, now_s)
        order = chain if rng.random() < 0.6 else rng.sample(chain, len(chain))
        if move in ("turn", "fork", "new", "put"):
            for block in order[: rng.randint(0, len(order))]:
                if block not in node.stored:
                    node.make_room(now_s, block)
                    node.put(block, now_s)
        elif move == "remove" and chain:
            node.remove(rng.choice(chain))
        elif move == "aside":
            victim = node.victim(now_s)
            if victim is not None:
                node.set_aside(victim)
            for block in sorted(node.aside)[: number % 3]:
                node.aside.remove(block)
                node.put(block, now_s)
        elif move == "repeat" and chain:  # a client may ask for a block twice in one chain
            node.seen([*chain, rng.choice(chain)], now_s)
        elif move == "victim":
            node.victim(now_s, rng.choice([None, *chain]))
        node.check()


def test_ids_use_all_64_bits() -> None:
    node = Both(40, start_uses=0)
    rng = random.Random(5)
    chain: list[int] = []
    for step in range(200):
        if step % 7 == 0:
            chain = []
        chain = [*chain, *(rng.getrandbits(64) for _ in range(6))]
        node.seen(chain, 3.0 * step)
        for block in chain:
            if block not in node.stored:
                node.make_room(3.0 * step, block)
                node.put(block, 3.0 * step)
    node.check()


def test_what_is_asked_for_and_never_stored_takes_bounded_memory() -> None:
    policy = _native.Reuse(chains_max=1_000)
    sizes = []
    for number in range(30_000):
        policy.seen([40 * number + at for at in range(40)], 0.001 * number)
        sizes.append(policy.memory_bytes)
    assert policy.check() == ""
    assert len(policy) == 0
    assert policy.chains <= 1_000 + 8_192
    assert sizes[-1] == sizes[5_000]


def test_bids_do_not_pile_up_while_nothing_is_asked_for() -> None:
    node = Both(3, start_uses=0)
    node.seen([1, 2, 3], 0.0)
    for block in (1, 2, 3):
        node.put(block, 0.0)
    node.seen([1, 2, 3], 0.0)
    sizes = []
    for _ in range(6_000):  # as with pinned blocks: named, set aside, back again
        while (victim := node.victim(1.0)) is not None:
            node.set_aside(victim)
        for block in (1, 2, 3):
            node.put(block, 1.0)
        sizes.append(node.native.memory_bytes)
    assert sizes[-1] == sizes[3_000]
    assert len(node.simulated._heap) < 10_000
    node.check()


def test_no_chains_to_learn_from_is_refused() -> None:
    with pytest.raises(ValueError, match="chains_max"):
        _native.Reuse(chains_max=0)


@pytest.mark.parametrize("capacity_blocks", [300, 1_000, 4_000])
def test_a_store_hits_what_the_simulator_says(capacity_blocks: int) -> None:
    trace = generate(conversation(requests=2_500), random.Random(21))
    times_ms = [round(arrival_s * 1000) for arrival_s in trace.arrival_s.tolist()]
    chains = [trace.blocks(request) for request in range(len(trace))]
    expected = predicted_hits(chains, [time_ms / 1000 for time_ms in times_ms], capacity_blocks)
    hits = {
        name: _native.replay_chains(name, capacity_blocks, chains, times_ms)
        for name in ("lru", "2q", "mooncache")
    }
    assert hits["mooncache"] == expected
    lru = make("lru", capacity_blocks)
    for chain, now_ms, found in zip(chains, times_ms, hits["lru"], strict=True):
        assert lru.leading(chain, now_ms / 1000) == found
        lru.use(chain, now_ms / 1000)
    if capacity_blocks == 1_000:
        assert sum(hits["mooncache"]) > max(sum(hits["lru"]), sum(hits["2q"]))


@pytest.mark.parametrize("start_uses", [0, 512])
def test_chances_are_the_simulators_to_the_bit(start_uses: int) -> None:
    trace = generate(conversation(requests=600), random.Random(8))
    native, simulated = _native.Reuse(start_uses=start_uses), Reuse(1 << 30, start_uses=start_uses)
    now_s = 0.0
    for number, arrival_s in enumerate(trace.arrival_s.tolist()):
        now_s, chain = arrival_s, trace.blocks(number)
        native.seen(chain, now_s)
        simulated.seen(chain, now_s)
        for block in chain:
            native.stored(block, now_s)
            simulated.stored(block, now_s)
    listed = native.next_victims(now_s + 30.0, 2_000)
    assert len(listed) == 2_000
    assert len({block for block, _ in listed}) == 2_000
    assert [simulated._chance(block, now_s + 30.0) for block, _ in listed] == [chance for _, chance in listed]
