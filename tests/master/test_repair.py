"""The repair against a small world of nodes: what comes first, at what rate, when, and that it loses nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mooncache import errors
from mooncache.master.core.directory import Directory
from mooncache.master.core.pace import ByteBudget, LateRate, Patience
from mooncache.master.core.placement import Candidate, Domains
from mooncache.master.core.repair import RepairBook
from mooncache.master.core.repair_types import (
    AuditAsk,
    AuditPage,
    RepairState,
    RepairStep,
    Targets,
    TrimOrder,
)
from tests.master.model_index import ADD, REMOVE, ModelIndex, record
from tests.master.rules import repair_rules

TENANT, OTHER = 5, 6
MIB = 1 << 20
KEYS = [bytes([n]) * 32 for n in range(60)]
TICK_S = 0.1


class Nodes:
    """Nodes that hold blocks of 1 MiB and do at once what they are told; `racks[n]` is where node n is."""

    def __init__(self, *racks: str, room_blocks: int = 1000) -> None:
        self.racks = dict(enumerate(racks))
        self.index = ModelIndex()
        self.directory = Directory(self.index)
        self.dead: set[int] = set()
        self.leaving: set[int] = set()
        self.wanted = Targets(2)
        self.room_blocks = room_blocks
        self.refusals: dict[int, int] = {}  # node -> the code that it answers copies with

    def held(self, node: int) -> list[bytes]:
        return [key for _, key in self.index.blocks.get(node, {})]

    def put(
        self, node: int, keys: Sequence[bytes], tenant: int = TENANT, size: int = MIB, tier: int = 1
    ) -> None:
        for key in keys:
            self.directory.apply(node, record(ADD, tenant, key, size, tier))

    def kill(self, book: RepairBook, node: int, now_s: float) -> list[bytes]:
        lost = self.held(node)
        self.dead.add(node)
        self.directory.drop_holder(node)
        book.on_lost(node, now_s)
        return lost

    def bring_back(self, book: RepairBook, node: int, keys: Sequence[bytes] = ()) -> None:
        self.dead.discard(node)
        self.put(node, keys)
        book.on_back(node)

    # what the book asks

    def holders(self, tenant_id: int, keys: Sequence[bytes]) -> list[list[int]]:
        return self.directory.holders(tenant_id, keys)

    def readable(self, index: int) -> bool:
        return index not in self.dead

    def lasting(self, index: int) -> bool:
        return index not in self.dead | self.leaving

    def sites(self) -> dict[int, Domains]:
        return {node: Domains("", rack, f"h{node}") for node, rack in self.racks.items()}

    def candidates(self) -> list[Candidate]:
        capacity = self.room_blocks * MIB
        return [
            Candidate(
                f"n{node}",
                where.host,
                1.0,
                node,
                True,
                where,
                capacity,
                capacity - len(self.held(node)) * MIB,
            )
            for node, where in self.sites().items()
            if self.lasting(node)
        ]

    def targets(self) -> Targets:
        return self.wanted

    def may_copy(self, tenant_id: int) -> bool:
        return tenant_id == TENANT

    def audit(self, ask: AuditAsk, start: int, entries_max: int, found_max: int) -> AuditPage:
        return self.directory.audit(ask, start, entries_max, found_max)

    def carry_out(self, book: RepairBook, effect: RepairStep | TrimOrder, now_s: float) -> int:
        """Do it, tell the book, and return the bytes that moved."""
        if isinstance(effect, TrimOrder):
            for key, go in zip(effect.keys, effect.go, strict=True):
                self.directory.apply(go, record(REMOVE, effect.tenant_id, key))
            book.on_trimmed(effect, [0] * len(effect.keys), len(effect.keys))
            return 0
        code = self.refusals.get(effect.target, 0)
        if effect.target in self.dead or effect.source in self.dead:
            code = errors.NodeUnavailable.code
        if code:
            book.on_step(effect.step_id, [code] * len(effect.keys), 0, now_s)
            return 0
        # A copy may have gone from the source since the step was planned: one too many was trimmed there.
        held = set(self.held(effect.source))
        there = [key for key in effect.keys if key in held]
        copied = effect.size_bytes * len(there) // len(effect.keys)
        self.put(effect.target, there)
        codes = [0 if key in held else errors.NotFound.code for key in effect.keys]
        book.on_step(effect.step_id, codes, copied, now_s)
        return copied

    def copies(self, keys: Sequence[bytes] = KEYS) -> list[int]:
        return [len(where) for where in self.holders(TENANT, keys)]


def book_of(**rules: object) -> RepairBook:
    return RepairBook(repair_rules(**{"grace_s": 0.0, "bytes_per_s": 1000.0 * MIB, **rules}), 0.0)


def run(
    book: RepairBook, nodes: Nodes, begin_s: float, seconds: float, tick_s: float = TICK_S
) -> list[tuple[float, RepairStep | TrimOrder]]:
    """Let time pass; returns what was ordered, and when."""
    done: list[tuple[float, RepairStep | TrimOrder]] = []
    for tick in range(round(seconds / tick_s)):
        now_s = begin_s + tick * tick_s
        for effect in book.tick(nodes, now_s):
            book.check()
            done.append((now_s, effect))
            nodes.carry_out(book, effect, now_s)
        book.check()
    return done


def steps(done: list[tuple[float, RepairStep | TrimOrder]]) -> list[tuple[float, RepairStep]]:
    return [(at_s, effect) for at_s, effect in done if isinstance(effect, RepairStep)]


def test_lost_copies_are_made_on_other_nodes() -> None:
    nodes, book = Nodes("", "", ""), book_of()
    nodes.put(0, KEYS)
    nodes.put(1, KEYS[:30])
    nodes.put(2, KEYS[30:])
    assert not run(book, nodes, 0.0, 10.0), "nothing is missing"
    assert book.figures(10.0).state is RepairState.WHOLE
    nodes.kill(book, 0, 10.0)
    done = steps(run(book, nodes, 10.0, 10.0))
    assert nodes.copies() == [2] * len(KEYS)
    assert sum(len(step.keys) for _, step in done) == len(KEYS), "each one was copied once"
    shown = book.figures(20.0)
    assert (shown.state, shown.copied_blocks, shown.copied_bytes) == (RepairState.WHOLE, 60, 60 * MIB)
    assert (shown.left_bytes, shown.short_blocks) == (0, 0)


def test_nothing_is_done_without_a_number_of_copies_or_without_a_limit() -> None:
    nodes = Nodes("", "")
    nodes.put(0, KEYS)
    nodes.wanted = Targets(1)
    book = book_of()
    assert not run(book, nodes, 0.0, 10.0)
    assert book.figures(10.0).state is RepairState.OFF
    nodes.wanted = Targets(2)
    assert not run(book_of(bytes_per_s=0.0), nodes, 0.0, 10.0)
    nodes.wanted = Targets(1, {TENANT: 2})
    assert run(book, nodes, 10.0, 10.0), "a tenant's own number goes first"
    assert nodes.copies() == [2] * len(KEYS)


def test_the_limit_is_kept_whatever_the_size_of_blocks() -> None:
    for block_bytes, limit in ((4096, 100_000), (MIB, 10 * MIB), (8 * MIB, 3 * MIB)):
        nodes, book = Nodes("", "", "", room_blocks=10_000), book_of(bytes_per_s=float(limit))
        nodes.put(0, KEYS, size=block_bytes)
        total = len(KEYS) * block_bytes
        expected_s = total / limit
        done = steps(run(book, nodes, 0.0, expected_s * 2 + 10.0))
        began_s, ended_s = done[0][0], done[-1][0]
        assert nodes.copies() == [2] * len(KEYS)
        late = (block_bytes + limit) / limit  # one block, and what one step may hold, may be early or late
        assert expected_s - late <= ended_s - began_s <= expected_s * 1.02 + 0.5
        sent = 0
        for at_s, step in done:
            assert sent <= limit * (at_s - began_s + 0.5) + TICK_S * limit, "never ahead of the budget"
            sent += step.size_bytes
            assert step.bytes_per_s == limit * book.rules.pace > limit, "it comes piece by piece"


def test_what_has_fewest_copies_comes_first_then_what_lies_in_memory() -> None:
    nodes, book = Nodes("", "", "", ""), book_of(bytes_per_s=20.0 * MIB)
    nodes.wanted = Targets(3)
    nodes.put(0, KEYS)
    nodes.put(1, KEYS[:20])
    nodes.put(1, KEYS[20:40], tier=2)
    for key in KEYS[20:40]:
        nodes.directory.apply(0, record(ADD, TENANT, key, MIB, 2))
    done = steps(run(book, nodes, 0.0, 60.0))
    order = list(dict.fromkeys(key for _, step in done for key in step.keys))
    ranks = {key: 0 if key in KEYS[40:] else 1 if key in KEYS[:20] else 2 for key in KEYS}
    first = [ranks[key] for key in order]
    assert first == sorted(first)
    assert nodes.copies() == [3] * len(KEYS)


def test_a_lost_node_has_time_to_come_back() -> None:
    nodes, book = Nodes("", "", ""), book_of(grace_s=30.0)
    nodes.put(0, KEYS)
    nodes.put(1, KEYS)
    run(book, nodes, 0.0, 31.0)
    lost = nodes.kill(book, 0, 31.0)
    assert not run(book, nodes, 31.0, 25.0)
    shown = book.figures(56.0)
    assert (shown.state, round(shown.wait_s), shown.left_bytes) == (RepairState.WAITING, 5, 60 * MIB)
    nodes.bring_back(book, 0, lost)
    assert not run(book, nodes, 56.0, 60.0), "it came back with all it had"
    nodes.kill(book, 0, 200.0)
    first_s, _ = run(book, nodes, 200.0, 60.0)[0]
    assert 230.0 <= first_s < 233.0
    assert nodes.copies() == [2] * len(KEYS)


def test_a_new_master_waits_for_the_nodes() -> None:
    nodes, book = Nodes("", "", ""), book_of(grace_s=20.0)
    nodes.put(0, KEYS)
    first_s, _ = run(book, nodes, 0.0, 60.0)[0]
    assert 20.0 <= first_s < 23.0


def test_a_copy_too_many_goes_when_a_lost_node_comes_back() -> None:
    nodes, book = Nodes("", "", ""), book_of()
    nodes.put(0, KEYS)
    nodes.put(1, KEYS)
    lost = nodes.kill(book, 0, 0.0)
    run(book, nodes, 0.0, 10.0)
    nodes.put(0, KEYS[:10])  # others ordered these: hot prefixes
    nodes.directory.drop_holder(0)
    nodes.bring_back(book, 0, lost)
    assert nodes.copies() == [3] * len(KEYS)
    run(book, nodes, 10.0, 20.0)
    assert nodes.copies() == [2] * len(KEYS)
    assert book.figures(30.0).trimmed == len(KEYS)
    assert len({node for where in nodes.holders(TENANT, KEYS) for node in where}) == 3, (
        "not all of one node go"
    )


def test_copies_that_others_ordered_stay() -> None:
    nodes, book = Nodes("", "", "", ""), book_of()
    for node in range(4):
        nodes.put(node, KEYS[:10])
    assert not run(book, nodes, 0.0, 30.0)
    assert nodes.copies(KEYS[:10]) == [4] * 10


def test_copies_in_one_rack_move_apart_when_another_rack_joins() -> None:
    nodes, book = Nodes("r1", "r1"), book_of()
    nodes.put(0, KEYS)
    nodes.put(1, KEYS)
    assert not run(book, nodes, 0.0, 10.0), "there is one rack only"
    nodes.racks[2] = "r2"
    run(book, nodes, 10.0, 30.0)
    assert nodes.copies() == [2] * len(KEYS)
    assert all(2 in where for where in nodes.holders(TENANT, KEYS)), "one copy of each is in the new rack"
    assert book.figures(40.0).state is RepairState.WHOLE
    assert not run(book, nodes, 40.0, 30.0), "and there it stays"


def test_a_third_node_in_the_same_rack_is_no_reason_to_move() -> None:
    nodes, book = Nodes("r1", "r1"), book_of()
    nodes.put(0, KEYS)
    nodes.put(1, KEYS)
    nodes.racks[2] = "r1"
    assert not run(book, nodes, 0.0, 30.0)


def test_a_full_pool_is_not_shuffled() -> None:
    nodes, book = Nodes("", "", room_blocks=70), book_of()
    nodes.wanted = Targets(1, {TENANT: 2})
    nodes.put(0, KEYS)
    nodes.put(1, KEYS)
    run(book, nodes, 0.0, 10.0)  # the pass of the term's beginning
    for node in (0, 1):
        nodes.put(node, [bytes([100 + n]) * 32 for n in range(10)], tenant=OTHER)
    for key in KEYS[:10]:
        nodes.directory.apply(1, record(REMOVE, TENANT, key))  # evicted
    nodes.put(1, [bytes([200 + n]) * 32 for n in range(10)], tenant=OTHER)
    assert not steps(run(book, nodes, 10.0, 20.0)), (
        "what was evicted is not brought back where nothing is free"
    )
    shown = book.figures(30.0)
    assert (shown.state, shown.resting_blocks, shown.short_blocks) == (RepairState.BLOCKED, 10, 10)
    book.on_lost(7, 30.0)  # any loss: now copies may displace other blocks
    run(book, nodes, 30.0, 70.0)
    assert nodes.copies() == [2] * len(KEYS)


def test_refusals_are_tried_again_later_and_elsewhere_is_not_held_up() -> None:
    nodes, book = Nodes("", "", ""), book_of()
    nodes.put(0, KEYS)
    nodes.refusals[1] = errors.NoSpace.code
    done = steps(run(book, nodes, 0.0, 20.0))
    assert nodes.refusals[1] and 0 < sum(count == 2 for count in nodes.copies()) < len(KEYS)
    assert len(done) < 400, "each time a little later"
    shown = book.figures(20.0)
    assert shown.resting_code == errors.NoSpace.code
    nodes.refusals.clear()
    run(book, nodes, 20.0, 70.0)
    assert nodes.copies() == [2] * len(KEYS)


def test_a_leaving_node_gives_its_copies_and_does_not_count() -> None:
    nodes, book = Nodes("", "", ""), book_of()
    nodes.put(0, KEYS)
    nodes.put(1, KEYS[:30])
    run(book, nodes, 0.0, 10.0)
    nodes.leaving.add(0)
    book.on_leaving()
    run(book, nodes, 10.0, 20.0)
    both = [set(where) >= {1, 2} for where in nodes.holders(TENANT, KEYS)]
    assert all(both), "two copies of each, without the node that leaves"


def test_more_copies_than_nodes_are_no_endless_work() -> None:
    nodes, book = Nodes("", ""), book_of()
    nodes.wanted = Targets(5)
    nodes.put(0, KEYS)
    run(book, nodes, 0.0, 20.0)
    assert nodes.copies() == [2] * len(KEYS)
    assert book.figures(20.0).state is RepairState.WHOLE


def test_a_tenant_without_a_name_waits() -> None:
    nodes, book = Nodes("", ""), book_of()
    nodes.put(0, KEYS, tenant=OTHER)
    assert not run(book, nodes, 0.0, 10.0)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 32))
@example(3405)  # a node dies and comes back without its blocks while copies from it are planned
def test_whatever_happens_no_block_loses_its_last_copy_and_in_the_end_all_have_two(seed: int) -> None:
    rng = random.Random(seed)
    nodes = Nodes(*rng.choices(["", "r1", "r2"], k=rng.randrange(3, 6)))
    book = book_of(grace_s=rng.choice([0.0, 5.0]), keys_per_step=7, watch_keys=20)
    for key in KEYS:
        for node in rng.sample(sorted(nodes.racks), rng.choice([1, 2, 2, 2])):
            nodes.put(node, [key])
    now_s = 0.0
    for _ in range(rng.randrange(3, 12)):
        alive = sorted(set(nodes.racks) - nodes.dead)
        event = rng.random()
        if event < 0.4 and len(alive) > 2:
            lost = nodes.kill(book, rng.choice(alive), now_s)
            gone = [key for key in lost if not nodes.holders(TENANT, [key])[0]]
            for key in gone:  # only this one had it: nobody could help that; a client brings it again
                nodes.put(rng.choice(sorted(set(nodes.racks) - nodes.dead)), [key])
        elif event < 0.7 and nodes.dead:
            kept = rng.sample(KEYS, rng.choice([0, 20, 60]))
            nodes.bring_back(book, rng.choice(sorted(nodes.dead)), kept)
        elif event < 0.85:
            nodes.racks[len(nodes.racks)] = rng.choice(["", "r1", "r3"])
        seconds = rng.choice([0.1, 1.0, 8.0])
        run(book, nodes, now_s, seconds, tick_s=0.5 if seconds > 1.0 else TICK_S)
        now_s += seconds
        assert min(nodes.copies()) >= 1
    run(book, nodes, now_s, 80.0, tick_s=0.5)
    assert min(nodes.copies()) >= 2, f"reproduce with seed {seed}"
    racks = {nodes.racks[node] for node in set(nodes.racks) - nodes.dead}
    if len(racks) > 1:
        spread = [{nodes.racks[node] for node in where} for where in nodes.holders(TENANT, KEYS)]
        assert all(len(found) > 1 for found in spread), f"reproduce with seed {seed}"


# --- pace


def test_a_budget_is_kept_over_time_and_saves_little_up() -> None:
    budget = ByteBudget(1000.0)
    budget.fill(0.0)
    taken = 0
    for tick in range(1, 1001):
        budget.fill(tick * 0.1)
        while budget.ready:
            budget.take(170)
            taken += 170
    assert 100_000 <= taken <= 100_000 * 1.01 + 500
    budget.fill(10_000.0)
    assert budget.left_bytes == pytest.approx(500.0)


def test_a_late_rate_forgets() -> None:
    rate = LateRate()
    assert rate.bytes_per_s(0, 0.0) == 0.0
    for tick in range(101):
        rate.note(tick * 10, tick * 0.1)
    assert rate.bytes_per_s(1000, 10.0) == pytest.approx(100.0, rel=0.02)
    for tick in range(101, 301):
        rate.note(1000, tick * 0.1)
    assert rate.bytes_per_s(1000, 30.0) == 0.0


def test_patience_has_an_end_and_ends_early_when_all_are_back() -> None:
    patience = Patience(30.0)
    patience.lost(1, 0.0)
    patience.lost(2, 10.0)
    patience.lost(1, 20.0)
    assert patience.left_s(20.0) == 20.0, "going again does not prolong it"
    patience.back(2)
    assert patience.left_s(20.0) == 10.0
    assert patience.left_s(30.0) == 0.0
