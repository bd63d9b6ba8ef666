"""Replication and drain: long work, cut into bounded steps, planned anew whenever something fails.

A task owns blocks, not a schedule. Each chunk of keys is planned at the moment it is carried out, from the
directory as it is then: where copies are, who can take one. A step that fails puts its keys back, later, and
they are planned again; so a target that died, a source that evicted, or a copy that was made meanwhile need
no special case. Effects are data (`CopyStep`, `DropStep`, `WantContents`); the shell carries them out and
hands the outcome back.

A drain moves: blocks whose only usable copy is on the node are copied elsewhere and then dropped there. Its
list of blocks is the node's own full report, taken after the node has stopped taking new blocks, and it is
done when a further report names no such block.

Invariant (`check`): every block of a task is in exactly one of: pending, open, done, failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mooncache import errors
from mooncache.master.core.placement import Candidate, Domains, choose_spread
from mooncache.master.core.task_types import (
    BlockId,
    CopyStep,
    DropStep,
    Effect,
    PlanningView,
    TaskKind,
    TaskRules,
    TaskState,
    TaskStep,
    WantContents,
)
from mooncache.runtime.backoff import step_s


@dataclass(slots=True)
class _Chunk:
    tenant_id: int
    keys: Sequence[bytes]
    attempts: int = 0
    not_before_s: float = 0.0


@dataclass(slots=True)
class _Open:
    attempts: int
    copies_left: int
    code: int = errors.OK


@dataclass(slots=True)
class Task:
    """One task. The public fields are what GetTask shows."""

    number: int
    task_id: str
    kind: TaskKind
    created_s: float
    tenant: str = ""
    node_id: str = ""
    node: int | None = None
    replica_count: int = 1
    preferred: tuple[int, ...] = ()
    spare: bool = False
    move_blocks: bool = True
    state: TaskState = TaskState.QUEUED
    block_count: int = 0
    done_count: int = 0
    failed_count: int = 0
    copied_bytes: int = 0
    code: int = errors.OK
    message: str = ""
    passes: int = 0
    listing_since_s: float | None = None
    pending: deque[_Chunk] = field(default_factory=deque)
    ready: deque[TaskStep] = field(default_factory=deque)
    open: dict[BlockId, _Open] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)

    @property
    def over(self) -> bool:
        return self.state in (TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED)

    @property
    def idle(self) -> bool:
        return not (self.pending or self.ready or self.open or self.steps)


class TaskBook:
    """All tasks of one term of one master."""

    def __init__(self, rules: TaskRules, prefix: str) -> None:
        self.rules = rules
        self.tasks: dict[str, Task] = {}
        self._prefix = prefix
        self._numbers = 0
        self._step_numbers = 0
        self._in_flight: dict[int, tuple[Task, TaskStep]] = {}

    @property
    def active_count(self) -> int:
        return sum(not task.over for task in self.tasks.values())

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    def require(self, task_id: str) -> Task:
        """A task. Raises TaskUnknown."""
        task = self.tasks.get(task_id)
        if task is None:
            raise errors.TaskUnknown(f"no task {task_id!r} here; tasks end with the master that started them")
        return task

    def replicate(
        self,
        tenant_id: int,
        tenant: str,
        keys: Sequence[bytes],
        replica_count: int,
        preferred: Iterable[int],
        now_s: float,
        *,
        spare: bool = False,
    ) -> Task:
        """Start bringing `keys` to `replica_count` copies; spare ones may go again. Raises LimitExceeded."""
        task = self._new(TaskKind.REPLICATE, now_s)
        task.tenant, task.replica_count, task.preferred = tenant, replica_count, tuple(preferred)
        task.spare = spare
        self._add_keys(task, tenant_id, list(dict.fromkeys(keys)))
        return task

    def drain(self, node: int, node_id: str, move_blocks: bool, now_s: float) -> Task:
        """Start emptying a node; returns the task that already does so if there is one.

        Raises LimitExceeded.
        """
        for task in self.tasks.values():
            if task.kind is TaskKind.DRAIN and task.node == node and not task.over:
                task.move_blocks = task.move_blocks or move_blocks
                return task
        task = self._new(TaskKind.DRAIN, now_s)
        task.node, task.node_id, task.move_blocks = node, node_id, move_blocks
        return task

    def cancel_drain(self, node: int) -> None:
        """Call a node's drain off; copies under way may still finish."""
        for task in self.tasks.values():
            if task.kind is TaskKind.DRAIN and task.node == node and not task.over:
                self._end(task, TaskState.CANCELLED, errors.Cancelled.code, "the drain was cancelled")

    def tick(self, world: PlanningView, now_s: float) -> list[Effect]:
        """Plan and return what may be started now."""
        effects: list[Effect] = []
        for task in [task for task in self.tasks.values() if not task.over]:
            task.state = TaskState.RUNNING
            if task.idle:
                effects.extend(self._advance(task, world, now_s))
            if not task.over:
                self._plan(task, world, now_s)
                effects.extend(self._dispatch(task))
        self._prune()
        return effects

    def on_step(self, step_id: int, codes: Sequence[int], copied_bytes: int, now_s: float) -> None:
        """Take the outcome of a step: one stable code for each key.

        Unknown steps (given up meanwhile) are ignored.
        """
        entry = self._in_flight.pop(step_id, None)
        if entry is None:
            return
        task, step = entry
        task.steps.discard(step_id)
        if task.over or isinstance(step, DropStep):
            return
        task.copied_bytes += copied_bytes
        good = (errors.OK, errors.AlreadyExists.code)
        copied = [key for key, code in zip(step.keys, codes, strict=True) if code in good]
        for key, code in zip(step.keys, codes, strict=True):
            self._settle(task, (step.tenant_id, key), errors.OK if code in good else code, now_s)
        if task.kind is TaskKind.DRAIN and copied and step.source == task.node:
            task.ready.append(DropStep(self._next_step(), step.source, step.tenant_id, tuple(copied)))

    def on_node_gone(self, node: int, now_s: float) -> None:
        """Give up what needs a dead node: its drain, and steps from or to it (planned again elsewhere)."""
        for task in self.tasks.values():
            if task.kind is TaskKind.DRAIN and task.node == node and not task.over:
                self._end(
                    task, TaskState.FAILED, errors.NodeUnavailable.code, "the node died before it was empty"
                )
        lost = errors.NodeUnavailable.code
        for step_id, (_, step) in list(self._in_flight.items()):
            if node in _nodes_of(step):
                self.on_step(step_id, [lost] * len(step.keys), 0, now_s)
        for task in self.tasks.values():
            for step in [step for step in task.ready if node in _nodes_of(step)]:
                task.ready.remove(step)
                if isinstance(step, CopyStep):
                    for key in step.keys:
                        self._settle(task, (step.tenant_id, key), lost, now_s)

    def on_contents(self, node: int, contents: dict[int, list[bytes]], world: PlanningView) -> None:
        """Take the blocks (tenant id -> keys) that a draining node says it holds."""
        for task in self.tasks.values():
            if (
                task.kind is not TaskKind.DRAIN
                or task.node != node
                or task.over
                or task.listing_since_s is None
            ):
                continue
            task.listing_since_s = None
            found = False
            for tenant_id, keys in contents.items():
                holders = world.holders(tenant_id, keys)
                sole = [
                    key
                    for key, where in zip(keys, holders, strict=True)
                    if not any(world.lasting(index) for index in where if index != node)
                ]
                self._add_keys(task, tenant_id, sole)
                found = found or bool(sole)
            if not found:
                self._end(task, TaskState.DONE)

    def page(
        self,
        kind: TaskKind | None,
        active_only: bool,
        before: int | None,
        limit: int,
        tenant: str | None = None,
    ) -> list[Task]:
        """Up to `limit` tasks, newest first, older than task number `before`.

        Of one tenant or of all.
        """
        chosen = [
            task
            for task in self.tasks.values()
            if (kind is None or task.kind is kind)
            and not (active_only and task.over)
            and (before is None or task.number < before)
            and (tenant is None or task.tenant == tenant)
        ]
        chosen.sort(key=lambda task: -task.number)
        return chosen[:limit]

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert len(self._in_flight) <= self.rules.steps_in_flight_max
        for task in self.tasks.values():
            pending = sum(len(chunk.keys) for chunk in task.pending)
            assert (
                task.over
                or task.block_count == pending + len(task.open) + task.done_count + task.failed_count
            )
            assert all(entry.copies_left > 0 for entry in task.open.values())
            assert all(step_id in self._in_flight for step_id in task.steps)

    def _new(self, kind: TaskKind, now_s: float) -> Task:
        if self.active_count >= self.rules.active_max:
            raise errors.LimitExceeded(f"{self.rules.active_max} tasks are already running; try again later")
        self._numbers += 1
        task = Task(self._numbers, f"{self._prefix}-{self._numbers}", kind, now_s)
        self.tasks[task.task_id] = task
        return task

    def _add_keys(self, task: Task, tenant_id: int, keys: Sequence[bytes]) -> None:
        task.block_count += len(keys)
        size = self.rules.keys_per_step
        task.pending.extend(_Chunk(tenant_id, keys[at : at + size]) for at in range(0, len(keys), size))

    def _advance(self, task: Task, world: PlanningView, now_s: float) -> list[Effect]:
        """Nothing is left to do in this pass: end the task or begin the next pass."""
        if task.kind is TaskKind.REPLICATE or task.failed_count:
            self._finish(task)
            return []
        assert task.node is not None
        if not world.draining(task.node):
            return []
        if not task.move_blocks:
            self._end(task, TaskState.DONE)
            return []
        if task.listing_since_s is not None and now_s - task.listing_since_s < self.rules.listing_timeout_s:
            return []
        if task.passes >= self.rules.passes_max:
            self._end(
                task,
                TaskState.FAILED,
                errors.DeadlineExceeded.code,
                "the node kept reporting blocks that only it holds",
            )
            return []
        task.passes += 1
        task.listing_since_s = now_s
        return [WantContents(task.node)]

    def _finish(self, task: Task) -> None:
        if task.failed_count:
            self._end(task, TaskState.FAILED, task.code, task.message)
        else:
            self._end(task, TaskState.DONE)

    def _end(self, task: Task, state: TaskState, code: int = errors.OK, message: str = "") -> None:
        task.state, task.code, task.message = state, code, message
        task.pending.clear()
        task.ready.clear()
        task.open.clear()

    def _plan(self, task: Task, world: PlanningView, now_s: float) -> None:
        """Turn due chunks into ready steps while there is room to carry steps out soon."""
        for _ in range(len(task.pending)):
            if len(task.ready) >= self.rules.steps_in_flight_max:
                return
            chunk = task.pending.popleft()
            if chunk.not_before_s > now_s:
                task.pending.append(chunk)
                continue
            self._plan_chunk(task, chunk, world, now_s)

    def _plan_chunk(self, task: Task, chunk: _Chunk, world: PlanningView, now_s: float) -> None:
        candidates, sites = world.candidates(), world.sites()
        routes: dict[tuple[int, int], list[bytes]] = {}
        for key, holders in zip(chunk.keys, world.holders(chunk.tenant_id, chunk.keys), strict=True):
            block = (chunk.tenant_id, key)
            sources = [index for index in holders if world.readable(index)]
            missing = task.replica_count - sum(world.lasting(index) for index in holders)
            if missing <= 0 or (not sources and task.kind is TaskKind.DRAIN):
                task.done_count += 1
                continue
            targets = _targets(key, task.preferred, candidates, holders, sites, missing)
            # Every copy that can be made is made; what is short of nodes stays open and is tried again.
            short = (
                errors.NotFound.code
                if not sources
                else errors.NoNodes.code
                if len(targets) < missing
                else errors.OK
            )
            task.open[block] = _Open(chunk.attempts, len(targets) if sources else 0, short)
            if not sources or not targets:
                task.open[block].copies_left = 1
                self._settle(task, block, short, now_s)
                continue
            for target in targets:
                source = sources[int.from_bytes(key[8:12], "little") % len(sources)]
                routes.setdefault((source, target), []).append(key)
        for (source, target), keys in routes.items():
            step = CopyStep(self._next_step(), source, target, chunk.tenant_id, tuple(keys), task.spare)
            task.ready.append(step)

    def _dispatch(self, task: Task) -> list[Effect]:
        started: list[Effect] = []
        load: dict[int, int] = {}
        for _, step in self._in_flight.values():
            if isinstance(step, CopyStep):
                load[step.target] = load.get(step.target, 0) + 1
        for _ in range(len(task.ready)):
            if len(self._in_flight) >= self.rules.steps_in_flight_max:
                break
            step = task.ready.popleft()
            if isinstance(step, CopyStep):
                if load.get(step.target, 0) >= self.rules.steps_per_node_max:
                    task.ready.append(step)
                    continue
                load[step.target] = load.get(step.target, 0) + 1
            self._in_flight[step.step_id] = (task, step)
            task.steps.add(step.step_id)
            started.append(step)
        return started

    def _settle(self, task: Task, block: BlockId, code: int, now_s: float) -> None:
        """One copy of a block came to an end."""
        entry = task.open.get(block)
        if entry is None:
            return
        entry.copies_left -= 1
        entry.code = code or entry.code
        if entry.copies_left > 0:
            return
        del task.open[block]
        if entry.code == errors.OK:
            task.done_count += 1
        elif entry.attempts + 1 >= self.rules.attempts_max:
            task.failed_count += 1
            task.code = entry.code
            task.message = f"{task.failed_count} of {task.block_count} blocks could not be copied"
        else:
            delay_s = step_s(entry.attempts, self.rules.retry_delay_s)
            self._put_back(task, block, entry.attempts + 1, now_s + delay_s)

    def _put_back(self, task: Task, block: BlockId, attempts: int, not_before_s: float) -> None:
        tenant_id, key = block
        last = task.pending[-1] if task.pending else None
        same = last is not None and last.tenant_id == tenant_id and last.attempts == attempts
        if (
            last is not None
            and same
            and last.not_before_s == not_before_s
            and len(last.keys) < self.rules.keys_per_step
        ):
            last.keys = [*last.keys, key]
        else:
            task.pending.append(_Chunk(tenant_id, [key], attempts, not_before_s))

    def _next_step(self) -> int:
        self._step_numbers += 1
        return self._step_numbers

    def _prune(self) -> None:
        over = [task for task in self.tasks.values() if task.over]
        for task in over[: max(0, len(over) - self.rules.kept_max)]:
            del self.tasks[task.task_id]


def _nodes_of(step: TaskStep) -> tuple[int, ...]:
    return (step.source, step.target) if isinstance(step, CopyStep) else (step.node,)


def _targets(
    key: bytes,
    preferred: Sequence[int],
    candidates: Sequence[Candidate],
    holders: Sequence[int],
    sites: Mapping[int, Domains],
    count: int,
) -> list[int]:
    """Up to `count` nodes for further copies, best first: preferred nodes, then those far from existing copies."""
    taken = set(holders)
    fitting = [node for node in candidates if node.index not in taken]
    held = [sites[index] for index in holders if index in sites]
    return [node.index for node in choose_spread(key, fitting, held, count, preferred=preferred)]
