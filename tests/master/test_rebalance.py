"""The rebalance against a small world of nodes: when it moves blocks, which, at what rate, and that it ends."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache import errors
from mooncache.kvcache.block_index import AUDIT_RECORD, native_index
from mooncache.master.core.moves import choose_move, difference, excess_bytes, moved
from mooncache.master.core.placement import Domains
from mooncache.master.core.rebalance import RebalanceBook
from mooncache.master.core.rebalance_types import NodeFill, RebalanceState
from mooncache.master.core.repair_types import RepairStep, TrimOrder
from tests.master.model_index import ADD, NO_DOMAIN, REMOVE, ModelIndex, record
from tests.master.rules import rebalance_rules
from tests.master.test_repair import KEYS, MIB, TENANT, TICK_S, Nodes

# --- the choice of one move

_PLACES = [
    Domains(zone, rack, f"h{n}") for n, (zone, rack) in enumerate([("a", "r1"), ("a", "r2"), ("b", "r3")])
]


@st.composite
def pools(draw: st.DrawFn) -> tuple[dict[int, NodeFill], list[tuple[int, set[int]]]]:
    """Nodes, and blocks as their size and their holders; nodes hold other things, too."""
    count = draw(st.integers(2, 6))
    blocks = [
        (draw(st.integers(1, 40)), draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count)))
        for _ in range(draw(st.integers(1, 25)))
    ]
    fills = {}
    for index in range(count):
        held = sum(size for size, holders in blocks if index in holders)
        other = draw(st.integers(0, 50))
        fills[index] = NodeFill(
            held + other + draw(st.integers(1, 300)),
            held + other,
            draw(st.booleans()),
            draw(st.sampled_from(_PLACES)),
        )
    return fills, blocks


def spread(fills: dict[int, NodeFill], holders: set[int]) -> list[int]:
    return [len({fills[index].domains.levels[level] for index in holders}) for level in range(3)]


@settings(max_examples=300, deadline=None)
@given(pools())
def test_moves_end_never_make_it_worse_and_keep_copies_and_domains(
    pool: tuple[dict[int, NodeFill], list[tuple[int, set[int]]]],
) -> None:
    fills, blocks = pool
    sites = {index: fill.domains for index, fill in fills.items()}
    seen: set[tuple[frozenset[int], ...]] = set()
    while True:
        arrangement = tuple(frozenset(holders) for _, holders in blocks)
        assert arrangement not in seen, "a copy came back: no ping-pong"
        seen.add(arrangement)
        before, fullest = excess_bytes(fills), max(fill.share for fill in fills.values())
        for size_bytes, holders in blocks:
            move = choose_move(holders, size_bytes, fills, sites, 1 / 32)
            if move is None:
                continue
            copies, domains = len(holders), spread(fills, holders)
            assert move.source in holders and move.target not in holders and fills[move.target].takes
            holders ^= {move.source, move.target}
            moved(fills, move, size_bytes)
            assert len(holders) == copies
            assert all(now >= was for now, was in zip(spread(fills, holders), domains, strict=True))
            assert fills[move.source].share >= fills[move.target].share
            assert fills[move.target].share <= 31 / 32, "nothing is displaced"
            break
        else:
            return
        assert max(fill.share for fill in fills.values()) <= fullest
        assert excess_bytes(fills) <= before + 1  # rounded


def test_an_audit_for_more_copies_than_givers_finds_every_block_of_theirs() -> None:
    native, model = native_index(), ModelIndex()
    for index in (native, model):
        for n, key in enumerate(KEYS):
            for node in {n % 3, (n + 1) % 4}:
                index.apply(node, record(ADD, TENANT, key, MIB, tier=n % 3))
    ask = ((), 3, [0, NO_DOMAIN, 0], 1, 0, 1000, 1000)
    found = [
        {each[1]: each[2:] for each in AUDIT_RECORD.iter_unpack(index.audit(*ask)[5])}
        for index in (native, model)
    ]
    assert found[0] == found[1]
    assert set(found[0]) == {key for n, key in enumerate(KEYS) if {n % 3, (n + 1) % 4} & {0, 2}}


def test_the_fullest_gives_and_the_emptiest_that_may_takes() -> None:
    fills = {n: NodeFill(1000, used, True, _PLACES[0]) for n, used in enumerate([900, 950, 100, 50, 0])}
    fills[4] = fills[4]._replace(takes=False)
    sites = dict.fromkeys(fills, _PLACES[0])
    assert choose_move([0, 1], 10, fills, sites, 0.0) == (1, 3)
    assert choose_move([0, 3], 10, fills, sites, 0.0) == (0, 2), "no second copy on one node"
    assert choose_move([0], 500, fills, sites, 0.0) is None, "the two would change places"
    assert difference(fills) == pytest.approx(0.9)


# --- rounds


class Pool(Nodes):
    """Nodes that hold blocks of 1 MiB; `pinned` copies stay."""

    def __init__(self, *racks: str, room_blocks: int = 100) -> None:
        super().__init__(*racks, room_blocks=room_blocks)
        self.pinned: set[tuple[int, bytes]] = set()
        self.is_calm = True
        self.ending: set[int] = set()
        self.capacity: dict[int, int] = {}
        self.moved_to: dict[bytes, list[int]] = {}

    def fills(self) -> dict[int, NodeFill]:
        capacity = self.room_blocks * MIB
        return {
            node: NodeFill(
                self.capacity.get(node, capacity), len(self.held(node)) * MIB, node not in self.leaving, where
            )
            for node, where in self.sites().items()
            if self.lasting(node)
        }

    def may_move(self, tenant_id: int) -> bool:
        return tenant_id not in self.ending

    def calm(self) -> bool:
        return self.is_calm

    def join(self, book: RebalanceBook, rack: str, now_s: float) -> int:
        node = len(self.racks)
        self.racks[node] = rack
        book.on_changed(node, now_s)
        return node

    def do(self, book: RebalanceBook, order: RepairStep | TrimOrder, now_s: float) -> None:
        if isinstance(order, RepairStep):
            if order.target not in self.dead:
                for key in order.keys:
                    self.moved_to.setdefault(key, []).append(order.target)
            self.carry_out(book, order, now_s)  # type: ignore[arg-type]
            return
        codes = []
        for key, stay, go in zip(order.keys, order.stay, order.go, strict=True):
            there = self.holders(order.tenant_id, [key])[0]
            if go in self.dead or not set(stay) <= set(there):
                codes.append(errors.NodeUnavailable.code)
            elif (go, key) in self.pinned:
                codes.append(errors.Pinned.code)
            else:
                assert stay and go not in stay
                self.directory.apply(go, record(REMOVE, order.tenant_id, key))
                codes.append(errors.OK)
        book.on_trimmed(order, codes, codes.count(errors.OK))


def balancing(**rules: object) -> RebalanceBook:
    return RebalanceBook(
        rebalance_rules(**{"settle_s": 0.0, "bytes_per_s": 100.0 * MIB, "lag_s": 0.5, **rules}), 0.0
    )


def pass_time(
    book: RebalanceBook,
    pool: Pool,
    begin_s: float,
    seconds: float,
    each: Callable[[float], object] = lambda now_s: None,
) -> list[tuple[float, RepairStep | TrimOrder]]:
    done = []
    for tick in range(round(seconds / TICK_S)):
        now_s = begin_s + tick * TICK_S
        for order in book.tick(pool, now_s):
            book.check()
            done.append((now_s, order))
            pool.do(book, order, now_s)
        book.check()
        each(now_s)
    return done


def moves_of(done: list[tuple[float, RepairStep | TrimOrder]]) -> list[RepairStep]:
    return [order for _, order in done if isinstance(order, RepairStep)]


def uneven_pool(**kwargs: int) -> Pool:
    """Three nodes in racks of their own, two copies of 60 blocks: 40 of 100 blocks on each."""
    pool = Pool("r1", "r2", "r3", **kwargs)
    for n, key in enumerate(KEYS):
        for node in {n % 3, (n + 1) % 3}:
            pool.put(node, [key])
    return pool


def test_blocks_move_to_a_node_that_joins_and_then_it_rests() -> None:
    pool, book = uneven_pool(), balancing()
    assert not pass_time(book, pool, 0.0, 5.0), "all are equally full"
    pool.join(book, "r4", 5.0)
    shown = []
    done = pass_time(book, pool, 5.0, 10.0, lambda now_s: shown.append(book.figures(now_s)))
    counts = [len(pool.held(node)) for node in pool.racks]
    assert sum(counts) == 120 and max(counts) - min(counts) <= 5, counts
    assert pool.copies() == [2] * len(KEYS)
    assert all(len(places) == 1 for places in pool.moved_to.values()), "each block moved once at most"
    found = book.figures(15.0)
    assert (found.state, found.left_bytes) == (RebalanceState.AT_REST, 0)
    assert found.moved_bytes == found.moved_blocks * MIB == counts[3] * MIB
    assert RebalanceState.MOVING in {each.state for each in shown}
    assert max(each.left_bytes for each in shown) >= counts[3] * MIB / 2
    assert moves_of(done) and not pass_time(book, pool, 15.0, 10.0), "and there it stays"


def test_nothing_moves_without_a_reason() -> None:
    pool, book = uneven_pool(), balancing()
    pass_time(book, pool, 0.0, 1.0)
    pool.racks[3] = "r4"  # it was there all the time, and nobody put anything on it
    assert not pass_time(book, pool, 1.0, 5.0), "an uneven load is no reason"
    pool.join(book, "r5", 6.0)
    assert moves_of(pass_time(book, pool, 6.0, 5.0))
    few, calm = uneven_pool(room_blocks=1000), balancing()
    few.join(calm, "r4", 0.0)
    assert not pass_time(calm, few, 0.0, 5.0), "they differ by 4 %"
    off = balancing(bytes_per_s=0.0)
    few.join(off, "r4", 0.0)
    assert not pass_time(off, few, 0.0, 5.0)
    assert off.figures(5.0).state is RebalanceState.OFF


def test_it_waits_for_others_to_join_for_repairs_and_for_drains() -> None:
    pool, book = uneven_pool(), balancing(settle_s=10.0)
    pass_time(book, pool, 0.0, 11.0)
    pool.join(book, "r4", 11.0)
    assert not pass_time(book, pool, 11.0, 9.5)
    assert book.figures(20.5).state is RebalanceState.WAITING
    pool.is_calm = False
    assert not pass_time(book, pool, 20.5, 10.0)
    pool.is_calm = True
    assert moves_of(pass_time(book, pool, 30.5, 5.0))


def test_the_limit_is_kept_and_copies_come_before_drops() -> None:
    pool, book = uneven_pool(), balancing(bytes_per_s=4.0 * MIB)
    pool.join(book, "r4", 0.0)
    done = pass_time(book, pool, 0.0, 20.0)
    sent, here = 0, set[bytes]()
    for at_s, order in done:
        if isinstance(order, RepairStep):
            assert sent <= 4 * MIB * (at_s + 0.5) + 4 * MIB * TICK_S
            sent += order.size_bytes
            here.update(order.keys)
        else:
            assert set(order.keys) <= here and set(order.go) <= {0, 1, 2}
    assert len(pool.held(3)) >= 27


def test_a_larger_node_gets_more_and_racks_stay_apart() -> None:
    pool, book = Pool("r1", "r2", room_blocks=70), balancing()
    for node in (0, 1):
        pool.put(node, KEYS)
    pool.capacity = {2: 140 * MIB}
    pool.join(book, "r1", 0.0)
    pass_time(book, pool, 0.0, 20.0)
    where = pool.holders(TENANT, KEYS)
    assert all({pool.racks[node] for node in each} == {"r1", "r2"} for each in where), "never both in r1"
    assert len(pool.held(1)) == len(KEYS), "the second rack has no other node"
    assert len(pool.held(2)) > 35 > len(pool.held(0)), "it has twice the memory"


def test_pinned_copies_stay_and_their_new_copies_go() -> None:
    pool, book = uneven_pool(), balancing(drop_delay_s=0.2)
    pool.pinned = {(node, key) for node in range(3) for key in KEYS[:30]}
    pool.join(book, "r4", 0.0)
    pass_time(book, pool, 0.0, 30.0)
    assert not set(pool.held(3)) & set(KEYS[:30])
    assert pool.copies() == [2] * len(KEYS)
    assert book.figures(30.0).state is RebalanceState.AT_REST
    assert set(pool.held(3)), "the others moved"


def test_hot_copies_move_and_none_becomes_spare() -> None:
    pool, book = Pool("", "", ""), balancing()
    pool.put(0, KEYS[:40])
    pool.put(1, KEYS[:40])
    pool.put(2, KEYS[:40])
    pool.join(book, "", 0.0)
    done = moves_of(pass_time(book, pool, 0.0, 10.0))
    assert done and not any(step.spare for step in done), "the master does not know which one was"
    assert pool.copies(KEYS[:40]) == [3] * 40


def copied_blocks() -> tuple[Pool, RebalanceBook]:
    """Two copies of each block, of which some were copied to a node that joined; no former copy has gone yet."""
    pool, book = Pool("", "", ""), balancing(overlap_s=2.0)
    pool.put(0, KEYS[:40])
    pool.put(1, KEYS[:40])
    pool.put(2, KEYS[40:60])
    pool.join(book, "", 0.0)
    pass_time(book, pool, 0.0, 1.0)
    assert pool.held(3) and 3 in pool.copies(KEYS[:40])
    return pool, book


def test_a_copy_stays_when_another_one_went_meanwhile() -> None:
    """As the repair's does, which takes the third one of a block for one too many."""
    pool, book = copied_blocks()
    for key in pool.held(3):
        holders = set(pool.holders(TENANT, [key])[0]) & {0, 1}
        gone = holders - {move.source for move in [book._known[TENANT, key].move]}
        for node in gone:
            pool.directory.apply(node, record(REMOVE, TENANT, key))
    pass_time(book, pool, 1.0, 10.0)
    assert min(pool.copies(KEYS[:40])) == 2


def test_a_copy_that_is_gone_again_leaves_the_former_one() -> None:
    pool, book = copied_blocks()
    gone = set(pool.held(3))
    for key in gone:
        pool.directory.apply(3, record(REMOVE, TENANT, key))
    done = pass_time(book, pool, 1.0, 10.0)
    assert min(pool.copies(KEYS[:40])) == 2
    asked = {key for _, order in done if isinstance(order, TrimOrder) for key in order.keys}
    assert not asked & gone, "who confirms fetches what is not there"


def test_what_was_there_already_is_no_move() -> None:
    pool, book = Pool("", ""), balancing()
    pool.put(0, KEYS[:40])
    pool.join(book, "", 0.0)
    steps: list[RepairStep] = []
    for now in range(1, 10):
        steps = steps or [order for order in book.tick(pool, now / 10) if isinstance(order, RepairStep)]
    step = steps[0]
    book.on_step(step.step_id, [errors.AlreadyExists.code] * len(step.keys), 0, 0.2)
    assert not any(book.places(TENANT, key) for key in step.keys)
    book.check()


def test_nothing_begins_with_blocks_that_are_removed() -> None:
    pool, book = copied_blocks()
    moving = set(pool.held(3))
    book.bar(TENANT, frozenset(moving))
    orders = [
        order for now in range(10, 60) for order in book.tick(pool, now / 10) if isinstance(order, TrimOrder)
    ]
    assert not moving & {key for order in orders for key in order.keys}
    assert all(3 in book.places(TENANT, key) for key in moving)
    book.unbar(TENANT, frozenset(moving))
    book.bar(TENANT, None)
    assert not book.tick(pool, 6.0)
    book.unbar(TENANT, None)
    (order,) = [order for order in book.tick(pool, 6.1) if isinstance(order, TrimOrder)]
    assert book.under_way(TENANT, None) >= set(order.keys)
    assert book.under_way(TENANT, frozenset(order.keys[:1])) == set(order.keys[:1])
    assert not book.under_way(TENANT + 1, None)


def test_blocks_with_an_end_of_life_stay() -> None:
    pool, book = uneven_pool(), balancing()
    pool.ending.add(TENANT)
    pool.join(book, "r4", 0.0)
    assert not moves_of(pass_time(book, pool, 0.0, 5.0))


def test_the_joining_node_dies_in_mid_move() -> None:
    pool, book = uneven_pool(), balancing(bytes_per_s=4.0 * MIB)
    pool.join(book, "r4", 0.0)
    pass_time(book, pool, 0.0, 3.0)
    assert 0 < len(pool.held(3)) < 20
    copied = book.tick(pool, 3.0)  # under way
    only = [key for key in KEYS if pool.holders(TENANT, [key])[0] == [3]]
    assert not only, "no block has its sole copy there by a move"
    pool.dead.add(3)
    left = [len(set(where) - {3}) for where in pool.holders(TENANT, KEYS)]
    pool.directory.drop_holder(3)
    book.on_lost(3, 3.0)
    book.check()
    for order in copied:
        pool.do(book, order, 3.0)
    pass_time(book, pool, 3.0, 10.0)
    assert pool.copies() == left, "what had moved is lost with it, what was under way is where it was"
    assert 0 < left.count(1) < 20
    assert book.figures(13.0).state is RebalanceState.AT_REST


def test_a_node_that_refuses_costs_a_bounded_number_of_calls() -> None:
    pool, book = uneven_pool(), balancing()
    pool.join(book, "r4", 0.0)
    pool.refusals[3] = errors.NoSpace.code
    done = pass_time(book, pool, 0.0, 30.0)
    assert sum(len(step.keys) for step in moves_of(done)) <= len(KEYS)
    assert book.figures(30.0).state is RebalanceState.AT_REST
    assert pool.copies() == [2] * len(KEYS)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32))
def test_whatever_happens_copies_are_kept_and_it_ends(seed: int) -> None:
    rng = random.Random(seed)
    pool = Pool(*rng.choices(["", "r1", "r2"], k=rng.randrange(2, 5)), room_blocks=80)
    book = balancing(
        bytes_per_s=rng.choice([5.0, 50.0]) * MIB, drop_delay_s=0.2, page_found=rng.choice([3, 256])
    )
    for key in KEYS:
        for node in rng.sample(sorted(pool.racks), rng.choice([1, 1, 2])):
            pool.put(node, [key])
    where = dict(zip(KEYS, pool.copies(), strict=True))
    racks = {key: _racks(pool, key) for key in KEYS}
    now_s = 0.0
    for _ in range(rng.randrange(2, 8)):
        event = rng.random()
        if event < 0.5:
            pool.join(book, rng.choice(["", "r1", "r3"]), now_s)
        elif event < 0.7:
            pool.pinned = {(rng.choice(sorted(pool.racks)), key) for key in rng.sample(KEYS, 20)}
        elif event < 0.85:
            pool.refusals = {rng.choice(sorted(pool.racks)): errors.NoSpace.code}
        else:
            free = [node for node in pool.racks if len(pool.held(node)) < 60]
            fresh = [bytes([rng.randrange(100, 250), rng.randrange(250)]) + bytes(30) for _ in range(10)]
            for node in free[:1]:
                pool.directory.apply(node, b"".join(record(ADD, TENANT, key, MIB) for key in fresh))
        pass_time(book, pool, now_s, 4.0)
        now_s += 4.0
        assert all(where[key] <= count for key, count in zip(KEYS, pool.copies(), strict=True)), seed
        assert all(racks[key] <= _racks(pool, key) for key in KEYS), seed
    pass_time(book, pool, now_s, 60.0)
    if not pool.pinned:  # a new copy that is pinned before it could go again stays
        assert dict(zip(KEYS, pool.copies(), strict=True)) == where, f"reproduce with seed {seed}"
    assert book.figures(now_s + 60.0).state is RebalanceState.AT_REST, f"reproduce with seed {seed}"
    assert not pass_time(book, pool, now_s + 60.0, 5.0), f"reproduce with seed {seed}"


def _racks(pool: Pool, key: bytes) -> int:
    return len({pool.racks[node] for node in pool.holders(TENANT, [key])[0]})
