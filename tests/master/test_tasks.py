"""Tasks: replication and drain against a small world of nodes that fail at random."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache import errors
from mooncache.master.core.placement import Candidate, Domains
from mooncache.master.core.task_types import CopyStep, DropStep, Effect, TaskRules, TaskState, WantContents
from mooncache.master.core.tasks import TaskBook

TENANT = 5
KEYS = [bytes([n]) * 32 for n in range(40)]
RULES = TaskRules(
    steps_in_flight_max=4, steps_per_node_max=2, keys_per_step=8, attempts_max=4, retry_delay_s=0.5
)


class FakeWorld:
    """Nodes as sets of keys."""

    def __init__(self, count: int) -> None:
        self.nodes: dict[int, set[bytes]] = {n: set() for n in range(count)}
        self.drained: set[int] = set()

    def holders(self, tenant_id: int, keys: list[bytes]) -> list[list[int]]:
        return [[n for n, held in self.nodes.items() if key in held] for key in keys]

    def readable(self, index: int) -> bool:
        return index in self.nodes

    def lasting(self, index: int) -> bool:
        return index in self.nodes and index not in self.drained

    def draining(self, index: int) -> bool:
        return index in self.drained

    def candidates(self) -> list[Candidate]:
        return [
            Candidate(f"n{n}", f"h{n}", 1.0, n, domains=where)
            for n, where in self.sites().items()
            if n not in self.drained
        ]

    def sites(self) -> dict[int, Domains]:
        return {n: Domains(host=f"h{n}") for n in self.nodes}

    def carry_out(self, book: TaskBook, effect: Effect, now_s: float, code: int = 0) -> None:
        match effect:
            case CopyStep():
                if code == 0 and effect.target in self.nodes and effect.source in self.nodes:
                    got = [key in self.nodes[effect.source] for key in effect.keys]
                    self.nodes[effect.target] |= {k for k, ok in zip(effect.keys, got, strict=True) if ok}
                    codes = [0 if ok else errors.NotFound.code for ok in got]
                else:
                    codes = [code or errors.NodeUnavailable.code] * len(effect.keys)
                book.on_step(effect.step_id, codes, 10 * codes.count(0), now_s)
            case DropStep():
                self.nodes.get(effect.node, set()).difference_update(effect.keys)
                book.on_step(effect.step_id, [0] * len(effect.keys), 0, now_s)
            case WantContents():
                book.on_contents(effect.node, {TENANT: sorted(self.nodes[effect.node])}, self)


def run(book: TaskBook, world: FakeWorld, rng: random.Random | None = None, failing: float = 0.0) -> None:
    now_s = 0.0
    for _ in range(400):
        for effect in book.tick(world, now_s):
            bad = rng is not None and rng.random() < failing
            world.carry_out(book, effect, now_s, errors.ConnectionLost.code if bad else 0)
            book.check()
        book.check()
        now_s += 0.25
        if not book.active_count:
            return
    raise AssertionError("the task did not end")


def test_replicate_brings_every_key_to_its_copies_and_counts() -> None:
    world, book = FakeWorld(4), TaskBook(RULES, "t1")
    world.nodes[0] |= set(KEYS)
    world.nodes[1] |= set(KEYS[:10])
    task = book.replicate(TENANT, "default", KEYS, 2, [], 0.0)
    run(book, world)
    assert task.state is TaskState.DONE
    assert (task.block_count, task.done_count, task.failed_count) == (40, 40, 0)
    assert task.copied_bytes == 300
    assert all(len(where) == 2 for where in world.holders(TENANT, KEYS))


def test_preferred_targets_come_first() -> None:
    world, book = FakeWorld(6), TaskBook(RULES, "t1")
    world.nodes[0] |= set(KEYS)
    book.replicate(TENANT, "default", KEYS, 2, [3], 0.0)
    run(book, world)
    assert world.nodes[3] == set(KEYS)


def test_copies_under_way_are_bounded() -> None:
    world, book = FakeWorld(8), TaskBook(RULES, "t1")
    world.nodes[0] |= set(KEYS)
    book.replicate(TENANT, "default", KEYS, 3, [], 0.0)
    started = [step for step in book.tick(world, 0.0) if isinstance(step, CopyStep)]
    assert len(started) == RULES.steps_in_flight_max
    targets = [step.target for step in started]
    assert max(targets.count(target) for target in targets) <= RULES.steps_per_node_max
    assert not book.tick(world, 0.1)


def test_missing_blocks_and_missing_nodes_fail_with_their_code() -> None:
    world, book = FakeWorld(2), TaskBook(RULES, "t1")
    gone = book.replicate(TENANT, "default", KEYS[:3], 1, [], 0.0)
    world.nodes[0].add(KEYS[9])
    alone = book.replicate(TENANT, "default", [KEYS[9]], 3, [], 0.0)
    run(book, world)
    assert (gone.state, gone.code, gone.failed_count) == (TaskState.FAILED, errors.NotFound.code, 3)
    assert (alone.state, alone.code) == (TaskState.FAILED, errors.NoNodes.code)
    assert KEYS[9] in world.nodes[1], "the copy that can be made is made"


def test_drain_moves_what_only_the_node_holds() -> None:
    world, book = FakeWorld(3), TaskBook(RULES, "t1")
    world.nodes[0] |= set(KEYS)
    world.nodes[1] |= set(KEYS[:10])
    task = book.drain(0, "n0", True, 0.0)
    assert book.drain(0, "n0", True, 0.0) is task
    assert not book.tick(world, 0.0), "nothing moves before the node refuses new blocks"
    world.drained.add(0)
    run(book, world)
    assert task.state is TaskState.DONE
    assert task.block_count == task.done_count == 30
    assert world.nodes[1] | world.nodes[2] == set(KEYS)
    assert world.nodes[0] == set(KEYS[:10])


def test_a_drain_can_be_called_off_and_dies_with_its_node() -> None:
    world, book = FakeWorld(3), TaskBook(RULES, "t1")
    world.drained.add(0)
    first = book.drain(0, "n0", True, 0.0)
    book.tick(world, 0.0)
    book.cancel_drain(0)
    assert first.state is TaskState.CANCELLED
    second = book.drain(0, "n0", True, 1.0)
    book.on_node_gone(0, 1.0)
    assert (second.state, second.code) == (TaskState.FAILED, errors.NodeUnavailable.code)


def test_a_target_that_dies_is_replaced() -> None:
    world, book = FakeWorld(4), TaskBook(RULES, "t1")
    world.nodes[0] |= set(KEYS)
    task = book.replicate(TENANT, "default", KEYS, 2, [2], 0.0)
    started = book.tick(world, 0.0)
    assert any(isinstance(step, CopyStep) and step.target == 2 for step in started)
    del world.nodes[2]
    book.on_node_gone(2, 0.0)
    book.check()
    for step in started:  # outcomes of steps that were given up are ignored
        world.carry_out(book, step, 0.0)
    run(book, world)
    assert task.state is TaskState.DONE
    assert all(len(where) == 2 for where in world.holders(TENANT, KEYS))


def test_limits_and_pages() -> None:
    book = TaskBook(TaskRules(active_max=3, kept_max=2), "t1")
    tasks = [book.replicate(TENANT, "default", KEYS[:1], 1, [], 0.0) for _ in range(3)]
    with pytest.raises(errors.LimitExceeded):
        book.drain(0, "n0", True, 0.0)
    page = book.page(None, False, None, 2)
    assert [task.task_id for task in page] == ["t1-3", "t1-2"]
    assert [task.task_id for task in book.page(None, True, page[-1].number, 2)] == ["t1-1"]
    assert book.require("t1-1") is tasks[0]
    with pytest.raises(errors.TaskUnknown):
        book.require("t9-1")
    world = FakeWorld(1)
    world.nodes[0].add(KEYS[0])
    run(book, world)
    book.tick(world, 1.0)
    assert len(book.tasks) == 2, "old finished tasks are forgotten"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_tasks_end_and_never_lose_a_block_whatever_fails(seed: int) -> None:
    rng = random.Random(seed)
    world, book = FakeWorld(rng.randrange(3, 7)), TaskBook(RULES, "t1")
    for key in KEYS:
        world.nodes[rng.randrange(len(world.nodes))].add(key)
    world.drained.add(0)
    task = book.drain(0, "n0", True, 0.0)
    other = book.replicate(TENANT, "default", KEYS, 2, [], 0.0)
    run(book, world, rng, failing=rng.choice([0.0, 0.2, 0.6, 1.0]))
    held = set().union(*world.nodes.values())
    assert held == set(KEYS), f"seed {seed}"
    lasting = set().union(*(world.nodes[n] for n in world.nodes if n != 0))
    assert task.state is not TaskState.DONE or lasting == set(KEYS), f"seed {seed}"
    assert other.over
