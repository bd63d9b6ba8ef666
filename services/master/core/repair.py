"""The repair: every block gets back the copies it should have, at a bounded rate, apart from each other.

Idea: the directory is looked through page after page, for as long as the master leads, and what it says decides. So
nothing has to be remembered of a loss, a new master goes on where it is, and a copy that others made is never
made twice: what was found is only a hint, and a block is looked up again when its copy is planned. What has fewest
copies comes first, of these what lies in the fastest tier: blocks that are asked for are there.

After a loss, a changed number of copies or the beginning of a term one pass through the directory may displace other
blocks; any other time only free room is used. Otherwise a full pool, which drops copies every second, would make them
again every second.

Blocks that were copied are watched: when a lost node comes back with what it had, one copy too many goes again. So does
the one that is too close to another, once a copy elsewhere is there. Copies that others ordered (hot prefixes, puts
with more replicas) are no surplus here.

Invariant (`check`): a known block is in exactly one of: settling, queue, ready or under way; each is bounded.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from mooncache import errors
from mooncache.master.core.pace import ByteBudget, LateRate, Patience
from mooncache.master.core.placement import Candidate, choose_spread, copy_to_drop, failure_domains
from mooncache.master.core.repair_types import (
    AuditedBlock,
    AuditPage,
    RepairFigures,
    RepairLayout,
    RepairRules,
    RepairState,
    RepairStep,
    RepairView,
    Targets,
    TrimOrder,
)
from mooncache.master.core.task_types import BlockId
from mooncache.runtime.backoff import step_s

_GOOD = frozenset((errors.OK, errors.AlreadyExists.code))


@dataclass(frozen=True, slots=True)
class _Block:
    """A block that waits for a copy."""

    tenant_id: int
    key: bytes
    size_bytes: int
    rank: tuple[int, int]
    displaces: bool

    @property
    def block_id(self) -> BlockId:
        return self.tenant_id, self.key


@dataclass(slots=True)
class _Rest:
    attempts: int
    until_s: float
    displaces: bool


@dataclass(slots=True)
class _Watch:
    """A block that was copied: how often, and when its copies are counted next."""

    copies: int
    due_s: float


class RepairBook:
    """The repair of one term of one master."""

    def __init__(self, rules: RepairRules, now_s: float) -> None:
        self.rules = rules
        self.copied_bytes = self.copied_blocks = self.trimmed = 0
        self._budget = ByteBudget(rules.bytes_per_s)
        self._rate = LateRate()
        self._patience = Patience(rules.grace_s)
        self._patience.lost(-1, now_s)  # nodes that have not registered with this master yet
        self._targets = Targets()
        self._loss = True  # the next pass may displace blocks
        self._pass_displaces = False
        self._found_to = self._counted_to = 0
        self._counting = self._counted = AuditPage(0, 0, 0, 0, 0, ())
        self._copied_before_count = [0, 0]  # of the count under way, of the last one
        self._known: set[BlockId] = set()
        self._settling: deque[tuple[float, _Block]] = deque()
        self._queue: list[tuple[tuple[int, int], int, _Block]] = []
        self._ready: deque[tuple[RepairStep, tuple[_Block, ...]]] = deque()
        self._under_way: dict[int, tuple[RepairStep, tuple[_Block, ...]]] = {}
        self._resting: dict[BlockId, _Rest] = {}
        self._resting_code = errors.OK
        self._watched: dict[BlockId, _Watch] = {}
        self._trimming: set[BlockId] = set()
        self._numbers = 0

    # --- what happens in the cluster -----------------------------------------------------------------------------

    def on_lost(self, node: int, now_s: float) -> None:
        """What a node held is no longer known: it died, or a new process stands in its place."""
        self._patience.lost(node, now_s)
        self._loss = True
        planned, self._ready = self._ready, deque()
        for step, blocks in planned:
            if node in (step.source, step.target):
                for block in blocks:
                    self._enqueue(block)  # to be planned again: the node may come back without them
            else:
                self._ready.append((step, blocks))
        for step_id, (step, _) in list(self._under_way.items()):
            if node in (step.source, step.target):
                self.on_step(step_id, [errors.NodeUnavailable.code] * len(step.keys), 0, now_s)

    def on_back(self, node: int) -> None:
        """All that a node holds is known."""
        self._patience.back(node)

    def on_leaving(self) -> None:
        """A node is to be emptied: its copies no longer count."""
        self._loss = True

    # --- planning ------------------------------------------------------------------------------------------------

    def tick(self, view: RepairView, now_s: float) -> list[RepairStep | TrimOrder]:
        """Look further, plan, and return what is to be started now."""
        self._budget.fill(now_s)
        self._rate.note(self.copied_bytes, now_s)
        targets = view.targets() if self.rules.bytes_per_s else Targets()
        if targets != self._targets:
            self._targets, self._loss = targets, True
        if not targets.any:
            self._forget()
            return []
        layout = _layout(view, targets)
        self._count(view, layout)
        if self._patience.left_s(now_s) > 0.0:
            return []
        self._find(view, layout, now_s)
        while self._settling and self._settling[0][0] <= now_s:
            self._enqueue(self._settling.popleft()[1])
        while len(self._ready) < self.rules.steps_in_flight_max and self._queue:
            self._plan(view, layout, self._next_batch(), now_s)
        return [*self._dispatch(), *self._trims(view, layout, now_s)]

    def on_step(self, step_id: int, codes: Sequence[int], copied_bytes: int, now_s: float) -> None:
        """Take the outcome of a step: one stable code for each key. Unknown steps are ignored."""
        entry = self._under_way.pop(step_id, None)
        if entry is None:
            return
        step, blocks = entry
        self._budget.give_back(max(0, step.size_bytes - copied_bytes))
        self.copied_bytes += copied_bytes
        for block, code in zip(blocks, codes, strict=True):
            if code in _GOOD:
                self._known.discard(block.block_id)
                self._resting.pop(block.block_id, None)
                self.copied_blocks += code == errors.OK
                self._watch(block.block_id, now_s)
            else:
                self._rest(block, code, now_s)

    def on_trimmed(self, order: TrimOrder, codes: Sequence[int], dropped: int) -> None:
        """Take the outcome of an order: one code for each key; those with another one than OK are tried again."""
        self.trimmed += dropped
        for key, code in zip(order.keys, codes, strict=True):
            block_id = (order.tenant_id, key)
            self._trimming.discard(block_id)
            watch = self._watched.get(block_id)
            if code != errors.OK or watch is None:
                continue
            watch.copies -= 1
            if watch.copies <= 0:
                del self._watched[block_id]

    # --- what is shown -------------------------------------------------------------------------------------------

    def figures(self, now_s: float) -> RepairFigures:
        """How the repair stands."""
        counted, queued = self._counted, len(self._known)
        left = max(
            0, counted.missing_bytes + counted.close_bytes - self.copied_bytes + self._copied_before_count[1]
        )
        rate = self._rate.bytes_per_s(self.copied_bytes, now_s)
        wait_s = self._patience.left_s(now_s)
        shown = RepairFigures(
            wait_s=wait_s,
            short_blocks=counted.short_blocks,
            left_bytes=left,
            close_blocks=counted.close_blocks,
            queued_blocks=queued,
            steps_in_flight=len(self._under_way),
            resting_blocks=len(self._resting),
            resting_code=self._resting_code if self._resting else errors.OK,
            bytes_per_s=rate,
            estimate_s=left / rate if rate > 0.0 else left / max(1.0, self.rules.bytes_per_s),
            copied_bytes=self.copied_bytes,
            copied_blocks=self.copied_blocks,
            trimmed=self.trimmed,
        )
        shown.state = self._state(shown)
        return shown

    def _state(self, shown: RepairFigures) -> RepairState:
        if not self._targets.any:
            return RepairState.OFF
        if shown.wait_s > 0.0:
            return RepairState.WAITING
        if shown.queued_blocks:
            return RepairState.REPAIRING
        if shown.resting_blocks and shown.left_bytes:
            return RepairState.BLOCKED
        return RepairState.REPAIRING if shown.left_bytes else RepairState.WHOLE

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        places = Counter(block.block_id for _, block in self._settling)
        places.update(block.block_id for _, _, block in self._queue)
        for _, blocks in (*self._ready, *self._under_way.values()):
            places.update(block.block_id for block in blocks)
        assert set(places) == self._known, "a block is known and nowhere, or somewhere and not known"
        assert all(count == 1 for count in places.values()), "a block waits twice"
        assert len(self._known) <= self.rules.queue_max
        assert len(self._under_way) <= self.rules.steps_in_flight_max
        assert len(self._resting) <= self.rules.resting_max
        assert len(self._watched) <= self.rules.watched_max
        assert self._trimming <= self._watched.keys()

    # --- looking -------------------------------------------------------------------------------------------------

    def _count(self, view: RepairView, layout: RepairLayout) -> None:
        """Count on; the figures of a whole pass are shown until those of the next one are there."""
        for _ in range(self.rules.count_pages):
            if not self._counted_to:
                self._counting = AuditPage(0, 0, 0, 0, 0, ())
                self._copied_before_count[0] = self.copied_bytes
            page = view.audit(layout.ask(), self._counted_to, self.rules.page_entries, 0)
            before = self._counting
            self._counting = AuditPage(
                page.next,
                before.short_blocks + page.short_blocks,
                before.missing_bytes + page.missing_bytes,
                before.close_blocks + page.close_blocks,
                before.close_bytes + page.close_bytes,
                (),
            )
            self._counted_to = page.next
            if not page.next:
                self._counted = self._counting
                self._copied_before_count[1] = self._copied_before_count[0]
                return

    def _find(self, view: RepairView, layout: RepairLayout, now_s: float) -> None:
        room = self.rules.queue_max - len(self._known)
        if room <= 0:
            return
        if not self._found_to:
            self._pass_displaces, self._loss = self._loss, False
            if self._pass_displaces:
                self._resting.clear()  # what could not be done before may be possible now
        page = view.audit(layout.ask(), self._found_to, self.rules.page_entries, room)
        self._found_to = page.next
        for found in page.found:
            block_id = (found.tenant_id, found.key)
            rest = self._resting.get(block_id)
            if block_id in self._known or (rest is not None and rest.until_s > now_s):
                continue
            if view.may_copy(found.tenant_id):
                self._known.add(block_id)
                displaces = self._pass_displaces or (rest is not None and rest.displaces)
                self._settling.append((now_s + self.rules.settle_s, _block_of(found, displaces)))

    # --- copies --------------------------------------------------------------------------------------------------

    def _enqueue(self, block: _Block) -> None:
        self._numbers += 1
        heapq.heappush(self._queue, (block.rank, self._numbers, block))

    def _next_batch(self) -> list[_Block]:
        """The most urgent blocks, of one tenant, that are one step together."""
        limit_bytes = self.rules.bytes_per_s * self.rules.step_s
        batch: list[_Block] = []
        size_bytes = 0
        while self._queue and len(batch) < self.rules.keys_per_step:
            block = self._queue[0][2]
            if batch and (
                block.tenant_id != batch[0].tenant_id or size_bytes + block.size_bytes > limit_bytes
            ):
                break
            heapq.heappop(self._queue)
            batch.append(block)
            size_bytes += block.size_bytes
        return batch

    def _plan(self, view: RepairView, layout: RepairLayout, batch: Sequence[_Block], now_s: float) -> None:
        tenant_id = batch[0].tenant_id
        promised = self._promised()
        routes: dict[tuple[int, int], list[_Block]] = {}
        holders = view.holders(tenant_id, [block.key for block in batch])
        for block, where in zip(batch, holders, strict=True):
            lasting = [index for index in where if index in layout.lasting]
            sources = [index for index in where if view.readable(index)]
            if not lasting or not sources or not _wants_copy(block, lasting, layout):
                self._known.discard(block.block_id)  # nothing is left to do
                continue
            target = self._target(block, where, lasting, layout, promised)
            if target is None:
                self._rest(block, errors.NoNodes.code, now_s)
                continue
            promised[target.index] += block.size_bytes
            source = sources[int.from_bytes(block.key[8:12], "little") % len(sources)]
            routes.setdefault((source, target.index), []).append(block)
        for (source, to), blocks in routes.items():
            self._numbers += 1
            keys = tuple(block.key for block in blocks)
            size_bytes = sum(block.size_bytes for block in blocks)
            rate = self.rules.bytes_per_s * self.rules.pace
            step = RepairStep(self._numbers, source, to, tenant_id, keys, size_bytes, rate)
            self._ready.append((step, tuple(blocks)))

    def _target(
        self,
        block: _Block,
        where: Sequence[int],
        lasting: Sequence[int],
        layout: RepairLayout,
        promised: Counter[int],
    ) -> Candidate | None:
        """The node for one further copy, None where there is none now."""
        taken = set(where)
        fitting = [node for node in layout.candidates if node.index not in taken]
        is_short = len(lasting) < layout.wanted(block.tenant_id)
        if not is_short:  # it has its copies: one in another domain is worth free room, and nothing else
            used = {layout.domains.numbers[index] for index in lasting}
            fitting = [node for node in fitting if layout.domains.numbers[node.index] not in used]
        if not (is_short and block.displaces):
            fitting = [
                node
                for node in fitting
                if node.free_bytes - promised[node.index] - block.size_bytes
                >= node.capacity_bytes * self.rules.room_share
            ]
        held = [layout.sites[index] for index in where if index in layout.sites]
        return next(iter(choose_spread(block.key, fitting, held, 1)), None)

    def _promised(self) -> Counter[int]:
        """Bytes on their way to each node."""
        promised: Counter[int] = Counter()
        for step, _ in (*self._ready, *self._under_way.values()):
            promised[step.target] += step.size_bytes
        return promised

    def _dispatch(self) -> list[RepairStep]:
        started: list[RepairStep] = []
        load = Counter(step.target for step, _ in self._under_way.values())
        for _ in range(len(self._ready)):
            if len(self._under_way) >= self.rules.steps_in_flight_max or not self._budget.ready:
                break
            step, blocks = self._ready.popleft()
            if load[step.target] >= self.rules.steps_per_node_max:
                self._ready.append((step, blocks))
                continue
            load[step.target] += 1
            self._budget.take(step.size_bytes)
            self._under_way[step.step_id] = (step, blocks)
            started.append(step)
        return started

    def _rest(self, block: _Block, code: int, now_s: float) -> None:
        """A copy was not made: try again later, each time a little later."""
        self._known.discard(block.block_id)
        before = self._resting.pop(block.block_id, None)
        attempts = before.attempts + 1 if before is not None else 0
        delay_s = step_s(attempts, self.rules.retry_delay_s, self.rules.retry_delay_max_s)
        self._resting[block.block_id] = _Rest(attempts, now_s + delay_s, block.displaces)
        self._resting_code = code
        while len(self._resting) > self.rules.resting_max:
            del self._resting[next(iter(self._resting))]

    # --- copies that are too many --------------------------------------------------------------------------------

    def _watch(self, block_id: BlockId, now_s: float) -> None:
        before = self._watched.pop(block_id, None)
        copies = before.copies + 1 if before is not None else 1
        self._watched[block_id] = _Watch(copies, now_s + self.rules.watch_interval_s)
        while len(self._watched) > self.rules.watched_max:
            oldest = next(iter(self._watched))
            del self._watched[oldest]
            self._trimming.discard(oldest)

    def _trims(self, view: RepairView, layout: RepairLayout, now_s: float) -> Iterable[TrimOrder]:
        """Orders for watched blocks that have more copies than wanted; one copy of each goes at a time."""
        due: list[BlockId] = []
        for block_id, watch in islice(self._watched.items(), self.rules.watch_keys):
            if watch.due_s <= now_s and block_id not in self._trimming:
                due.append(block_id)
        for block_id in due:  # the next look at it comes after those of all others
            watch = self._watched.pop(block_id)
            watch.due_s = now_s + self.rules.watch_interval_s
            self._watched[block_id] = watch
        for tenant_id, group in groupby(due, key=lambda block_id: block_id[0]):
            order = self._trim(view, layout, tenant_id, [key for _, key in group])
            if order is not None:
                yield order

    def _trim(
        self, view: RepairView, layout: RepairLayout, tenant_id: int, keys: Sequence[bytes]
    ) -> TrimOrder | None:
        found: list[tuple[bytes, tuple[int, ...], int]] = []
        for key, where in zip(keys, view.holders(tenant_id, keys), strict=True):
            lasting = {index: layout.sites[index] for index in where if index in layout.lasting}
            if not where:
                self._watched.pop((tenant_id, key), None)
            if len(lasting) <= layout.wanted(tenant_id):
                continue
            go = copy_to_drop(key, lasting, layout.candidates)
            found.append((key, tuple(index for index in lasting if index != go), go))
        if not found:
            return None
        chosen, stay, go_from = zip(*found, strict=True)
        self._trimming.update((tenant_id, key) for key in chosen)
        return TrimOrder(tenant_id, chosen, stay, go_from)

    def _forget(self) -> None:
        """Nothing is wanted: what was found is no longer needed; what is under way may end."""
        for _, blocks in self._ready:
            self._known.difference_update(block.block_id for block in blocks)
        self._known.difference_update(block.block_id for _, block in self._settling)
        self._known.difference_update(block.block_id for _, _, block in self._queue)
        self._ready.clear()
        self._settling.clear()
        self._queue.clear()
        self._resting.clear()
        self._counted = AuditPage(0, 0, 0, 0, 0, ())
        self._found_to = self._counted_to = 0


def _block_of(found: AuditedBlock, displaces: bool) -> _Block:
    return _Block(found.tenant_id, found.key, found.size_bytes, (found.copies, found.tier), displaces)


def _layout(view: RepairView, targets: Targets) -> RepairLayout:
    sites = view.sites()
    lasting = frozenset(index for index in sites if view.lasting(index))
    candidates = view.candidates()
    domains = failure_domains(
        {index: sites[index] for index in lasting},
        [node.index for node in candidates if node.index in lasting],
    )
    return RepairLayout(
        targets, sites, lasting, [node for node in candidates if node.index in lasting], domains
    )


def _wants_copy(block: _Block, lasting: Sequence[int], layout: RepairLayout) -> bool:
    """Whether a block has fewer copies than it should, or has them in fewer domains than it could."""
    wanted = layout.wanted(block.tenant_id)
    if wanted < 2:
        return False
    used = {layout.domains.numbers[index] for index in lasting}
    return len(lasting) < wanted or len(used) < min(wanted, layout.domains.placeable)
