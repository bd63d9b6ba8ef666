"""The rebalance: after a node came or went, blocks move from the fullest nodes to the emptiest, at a bounded rate.

Idea: a round begins only after such an event, and only when fills differ much; it has an allotment of bytes from its
beginning and ends when fills differ little, when the allotment is planned, or when a look at the whole directory finds
nothing to move. So it ends whatever clients do meanwhile, and an uneven load does not keep blocks wandering.

A move is a copy, then, once the directory has heard of it, the end of the copy that it replaces: as many others as the
block had must be there and confirm first (`TrimOrder`), so a move leaves no block with fewer copies than before. A copy
that does not go, a pinned one, is asked again; then the new copy goes instead. What moves is chosen in core/moves.py.

Invariant (`check`): a known block is in exactly one of: ready, copying, copied, ordered, recent; all are bounded.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mooncache import errors
from mooncache.kvcache.block_index import TIER_DRAM
from mooncache.master.core import moves
from mooncache.master.core.moves import choose_move, difference, excess_bytes, mean_share
from mooncache.master.core.pace import ByteBudget, LateRate, Patience
from mooncache.master.core.rebalance_types import (
    Move,
    NodeFill,
    RebalanceFigures,
    RebalanceRules,
    RebalanceState,
    RebalanceView,
)
from mooncache.master.core.repair_types import NO_DOMAIN, AuditAsk, AuditedBlock, RepairStep, TrimOrder
from mooncache.master.core.task_types import BlockId


@dataclass(slots=True)
class _MovingBlock:
    """A block under way."""

    tenant_id: int
    key: bytes
    size_bytes: int
    move: Move
    copies: int
    """How many it has that last, and keeps."""
    attempts: int = 0
    made_s: float = 0.0
    due_s: float = 0.0
    undo: bool = False
    """The former copy stays: the new one has to go."""

    @property
    def block_id(self) -> BlockId:
        return self.tenant_id, self.key


class RebalanceBook:
    """The rebalance of one term of one master."""

    def __init__(self, rules: RebalanceRules, now_s: float) -> None:
        self.rules = rules
        self.moved_bytes = self.moved_blocks = 0
        self._budget = ByteBudget(rules.bytes_per_s)
        self._rate = LateRate()
        self._patience = Patience(rules.settle_s)
        self._patience.lost(-1, now_s)  # nodes that have not registered with this master yet
        self._due = True  # something happened: the fills are to be compared
        self._round_bytes = 0  # that may still be planned in this round; 0: there is none
        self._at = 0  # in the directory
        self._idle_pass = False  # it began with true figures, and nothing was planned since
        self._gave: set[int] = set()  # nodes, in this round
        self._took: set[int] = set()
        self._skipped: set[BlockId] = set()
        self._known: dict[BlockId, _MovingBlock] = {}
        self._barred: list[tuple[int, frozenset[bytes] | None]] = []
        self._shift: Counter[Move] = Counter()  # bytes of what is known: nodes' figures may lack them
        self._found: deque[AuditedBlock] = deque()
        self._ready: deque[tuple[RepairStep, tuple[_MovingBlock, ...]]] = deque()
        self._copying: dict[int, tuple[RepairStep, tuple[_MovingBlock, ...]]] = {}
        self._copied: deque[_MovingBlock] = deque()
        self._ordered: dict[BlockId, _MovingBlock] = {}
        self._recent: deque[tuple[float, _MovingBlock]] = deque()  # moved, and reports may not say so yet
        self._fills: dict[int, NodeFill] = {}
        self._numbers = 0
        self._now_s = now_s

    # --- what happens in the cluster -----------------------------------------------------------------------------

    def on_changed(self, node: int, now_s: float) -> None:
        """A node came or went."""
        self._due = True
        self._patience.lost(node, now_s)

    def on_lost(self, node: int, now_s: float) -> None:
        """What a node held is no longer known: what moved to it stays where it was."""
        self.on_changed(node, now_s)
        planned, self._ready = self._ready, deque()
        for step, blocks in planned:
            if node in (step.source, step.target):
                self._give_up(blocks)
            else:
                self._ready.append((step, blocks))
        for step_id, (step, _) in list(self._copying.items()):
            if node in (step.source, step.target):
                self.on_step(step_id, [errors.NodeUnavailable.code] * len(step.keys), 0, now_s)
        copied, self._copied = self._copied, deque()
        for block in copied:
            if node in block.move:
                self._give_up([block])
            else:
                self._copied.append(block)

    # --- planning ------------------------------------------------------------------------------------------------

    def tick(self, view: RebalanceView, now_s: float) -> list[RepairStep | TrimOrder]:
        """Look further, plan, and return what is to be started now."""
        self._now_s = now_s
        self._budget.fill(now_s)
        self._rate.note(self.moved_bytes, now_s)
        self._look_at_fills(view, now_s)
        if self.rules.bytes_per_s and self._patience.left_s(now_s) <= 0.0 and view.calm():
            self._begin_or_end()
            if self._round_bytes:
                self._plan(view)
        return [*self._dispatch(), *self._drops(view, now_s)]

    def on_step(self, step_id: int, codes: Sequence[int], copied_bytes: int, now_s: float) -> None:
        """Take the outcome of a copy: one stable code for each key. Unknown steps are ignored."""
        entry = self._copying.pop(step_id, None)
        if entry is None:
            return
        step, blocks = entry
        self._budget.give_back(max(0, step.size_bytes - copied_bytes))
        for block, code in zip(blocks, codes, strict=True):
            if code == errors.OK:  # what was there already is a copy of its own
                block.made_s, block.due_s = now_s, now_s + self.rules.overlap_s
                self._copied.append(block)
            else:
                self._give_up([block])

    def on_trimmed(self, order: TrimOrder, codes: Sequence[int], _dropped: int) -> None:
        """Take the outcome of an order: one code for each key; those with another one than OK are tried again."""
        for key, code in zip(order.keys, codes, strict=True):
            block = self._ordered.pop((order.tenant_id, key), None)
            if block is None:
                continue
            if code == errors.OK and not block.undo:
                self.moved_blocks += 1
                self.moved_bytes += block.size_bytes
                self._recent.append((self._now_s, block))
            elif code == errors.OK:
                self._give_up([block])
            else:
                self._again(block)

    def _again(self, block: _MovingBlock) -> None:
        """A copy did not go: later; then the other one; then both stay."""
        block.attempts += 1
        block.due_s = self._now_s + self.rules.drop_delay_s
        if block.attempts >= self.rules.drop_attempts_max:
            if block.undo:
                self._give_up([block])
                return
            block.undo, block.attempts = True, 0
        self._copied.append(block)

    # --- what others remove meanwhile ----------------------------------------------------------------------------

    def bar(self, tenant_id: int, keys: frozenset[bytes] | None) -> None:
        """Start no copy and no order of these blocks until `unbar`; None: of all of the tenant's."""
        self._barred.append((tenant_id, keys))

    def unbar(self, tenant_id: int, keys: frozenset[bytes] | None) -> None:
        """Take `bar` back."""
        self._barred.remove((tenant_id, keys))

    def under_way(self, tenant_id: int, keys: frozenset[bytes] | None) -> set[bytes]:
        """Those of which a copy or an order is under way now."""
        blocks = [block for _, copying in self._copying.values() for block in copying]
        blocks += self._ordered.values()
        return {
            block.key
            for block in blocks
            if block.tenant_id == tenant_id and (keys is None or block.key in keys)
        }

    def places(self, tenant_id: int, key: bytes) -> tuple[int, ...]:
        """The nodes between which a block moves: the directory may not have heard of its copy there yet."""
        block = self._known.get((tenant_id, key))
        return tuple(block.move) if block is not None else ()

    def _is_barred(self, tenant_id: int, keys: Iterable[bytes]) -> bool:
        return any(
            barred == tenant_id and (of is None or not of.isdisjoint(keys)) for barred, of in self._barred
        )

    # --- what is shown -------------------------------------------------------------------------------------------

    def figures(self, now_s: float) -> RebalanceFigures:
        """How the rebalance stands."""
        moving = bool(self._round_bytes or self._known)
        left = sum(step.size_bytes for step, _ in self._steps())
        left += min(self._round_bytes, excess_bytes(self._fills))
        rate = self._rate.bytes_per_s(self.moved_bytes, now_s)
        wait_s = self._patience.left_s(now_s) if self._due else 0.0
        shares = [fill.share for fill in self._fills.values() if fill.capacity_bytes] or [0.0]
        state = RebalanceState.MOVING if moving else RebalanceState.AT_REST
        if not self.rules.bytes_per_s:
            state = RebalanceState.OFF
        elif self._due and not moving:
            state = RebalanceState.WAITING
        left = left if moving else 0
        return RebalanceFigures(
            state=state,
            wait_s=wait_s,
            left_bytes=left,
            bytes_per_s=rate,
            estimate_s=left / (rate if rate > 0.0 else max(1.0, self.rules.bytes_per_s)),
            moved_bytes=self.moved_bytes,
            moved_blocks=self.moved_blocks,
            skipped_blocks=len(self._skipped),
            steps_in_flight=len(self._copying),
            fullest_share=max(shares),
            emptiest_share=min(shares),
        )

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        places = Counter(block.block_id for _, blocks in self._steps() for block in blocks)
        places.update(block.block_id for block in self._copied)
        places.update(list(self._ordered))
        places.update(block.block_id for _, block in self._recent)
        assert set(places) == set(self._known), "a block is known and nowhere, or somewhere and not known"
        assert all(count == 1 for count in places.values()), "a block moves twice"
        assert bool(self._known) == bool(self._shift)
        assert all(size_bytes > 0 for size_bytes in self._shift.values())
        assert len(self._copying) <= self.rules.steps_in_flight_max
        assert len(self._skipped) <= self.rules.skipped_max
        assert len(self._known) <= self.rules.moving_max + self.rules.keys_per_step
        assert self._round_bytes >= 0

    # --- rounds --------------------------------------------------------------------------------------------------

    def _look_at_fills(self, view: RebalanceView, now_s: float) -> None:
        """The nodes' own figures, and what is under way or was moved after they were made."""
        while self._recent and self._recent[0][0] + self.rules.lag_s <= now_s:
            self._forget(self._recent.popleft()[1])
        fills = view.fills()
        for move, size_bytes in self._shift.items():
            moves.moved(fills, move, size_bytes)
        # Figures are late, or count a move twice for a moment. Who took does not give, so no copy comes back by that.
        self._fills = {
            index: fill._replace(takes=fill.takes and index not in self._gave, gives=index not in self._took)
            for index, fill in fills.items()
        }

    def _begin_or_end(self) -> None:
        uneven = difference(self._fills) if len(self._fills) > 1 else 0.0
        if self._round_bytes:
            even = not self._known and uneven <= self.rules.end_share
            if even or len(self._skipped) >= self.rules.skipped_max:
                self._end_round()
        elif self._due and not self._known:
            self._due = False
            if uneven > self.rules.begin_share:
                self._round_bytes = round(excess_bytes(self._fills) * self.rules.planned_share)
                self._skipped.clear()
                self._found.clear()
                self._at, self._idle_pass = 0, False

    def _end_round(self) -> None:
        self._round_bytes = 0
        self._found.clear()
        self._gave.clear()
        self._took.clear()

    def _plan(self, view: RebalanceView) -> None:
        """One step's worth of moves, when there is room for it."""
        steps = len(self._copying) + len(self._ready)
        if steps >= self.rules.steps_in_flight_max or len(self._known) >= self.rules.moving_max:
            return
        if not self._found:
            self._find(view)
        limit_bytes = self.rules.bytes_per_s * self.rules.step_s
        routes: dict[tuple[Move, int], list[_MovingBlock]] = {}
        planned_bytes = planned_keys = 0
        sites = view.sites()
        for found, holders in self._looked_up(view):
            if planned_keys and (
                planned_bytes + found.size_bytes > limit_bytes or planned_keys >= self.rules.keys_per_step
            ):
                self._found.appendleft(found)
                break
            if (found.tenant_id, found.key) in self._known:
                continue
            move = choose_move(holders, found.size_bytes, self._fills, sites, self.rules.room_share)
            if move is None:
                continue
            lasting = sum(view.lasting(index) for index in holders)
            block = _MovingBlock(found.tenant_id, found.key, found.size_bytes, move, lasting)
            routes.setdefault((move, found.tenant_id), []).append(block)
            moves.moved(self._fills, move, found.size_bytes)
            self._known[block.block_id] = block
            self._shift[move] += block.size_bytes
            self._settle_sides(move)
            planned_bytes += found.size_bytes
            planned_keys += 1
            if planned_bytes >= self._round_bytes:
                break
        for (move, tenant_id), blocks in routes.items():
            self._add_step(move, tenant_id, blocks)
        self._idle_pass = self._idle_pass and not routes
        self._round_bytes = max(0, self._round_bytes - planned_bytes)
        if not self._round_bytes:
            self._end_round()

    def _settle_sides(self, move: Move) -> None:
        self._gave.add(move.source)
        self._took.add(move.target)
        self._fills[move.source] = self._fills[move.source]._replace(takes=False)
        self._fills[move.target] = self._fills[move.target]._replace(gives=False)

    def _add_step(self, move: Move, tenant_id: int, blocks: Sequence[_MovingBlock]) -> None:
        self._numbers += 1
        keys = tuple(block.key for block in blocks)
        size_bytes = sum(block.size_bytes for block in blocks)
        rate = self.rules.bytes_per_s * self.rules.pace
        # Never spare: which of a block's copies was is not known here, and a spare one goes when it is not read.
        step = RepairStep(self._numbers, *move, tenant_id, keys, size_bytes, rate)
        self._ready.append((step, tuple(blocks)))

    def _find(self, view: RebalanceView) -> None:
        """The next blocks in memory of nodes fuller than the mean. A pass that planned nothing ends the round."""
        if not self._at:
            if self._idle_pass:
                self._end_round()
                return
            self._idle_pass = not self._known
        mean = mean_share(self._fills)
        givers = [index for index, fill in self._fills.items() if fill.gives and fill.share > mean]
        numbers = [NO_DOMAIN] * (max(givers, default=-1) + 1)
        for index in givers:
            numbers[index] = 0
        # More copies than there are givers: so every block that one of them holds is found.
        ask = AuditAsk((), len(givers) + 1, tuple(numbers), 1)
        page = view.audit(ask, self._at, self.rules.page_entries, self.rules.page_found)
        self._at = page.next
        for found in page.found:
            block_id = (found.tenant_id, found.key)
            movable = found.size_bytes and found.tier <= TIER_DRAM and block_id not in self._skipped
            if movable and view.may_move(found.tenant_id):
                self._found.append(found)

    def _looked_up(self, view: RebalanceView) -> Iterable[tuple[AuditedBlock, list[int]]]:
        """The blocks that were found, each with its holders of now; taken off as they are asked for."""
        while self._found:
            found = self._found.popleft()
            yield found, view.holders(found.tenant_id, [found.key])[0]

    def _dispatch(self) -> list[RepairStep]:
        started: list[RepairStep] = []
        while self._ready and len(self._copying) < self.rules.steps_in_flight_max and self._budget.ready:
            if self._is_barred(self._ready[0][0].tenant_id, self._ready[0][0].keys):
                break  # for a moment
            step, blocks = self._ready.popleft()
            self._budget.take(step.size_bytes)
            self._copying[step.step_id] = (step, blocks)
            started.append(step)
        return started

    def _drops(self, view: RebalanceView, now_s: float) -> list[TrimOrder]:
        """Orders for blocks that were copied: one copy of each goes."""
        due: dict[int, list[_MovingBlock]] = {}
        room = self.rules.keys_per_step - len(self._ordered)
        waiting, self._copied = self._copied, deque()
        for block in waiting:
            if room > 0 and block.due_s <= now_s and not self._is_barred(block.tenant_id, (block.key,)):
                room -= 1
                due.setdefault(block.tenant_id, []).append(block)
            else:
                self._copied.append(block)
        orders = [self._order(view, tenant_id, blocks, now_s) for tenant_id, blocks in due.items()]
        return [order for order in orders if order.keys]

    def _order(
        self, view: RebalanceView, tenant_id: int, blocks: Sequence[_MovingBlock], now_s: float
    ) -> TrimOrder:
        keys: list[bytes] = []
        stays: list[tuple[int, ...]] = []
        goes: list[int] = []
        holders = view.holders(tenant_id, [block.key for block in blocks])
        for block, where in zip(blocks, holders, strict=True):
            go, new = (block.move.target, block.move.source) if block.undo else block.move
            stay = tuple(
                index for index in dict.fromkeys([new, *where]) if index != go and view.lasting(index)
            )
            if new not in where and new in stay and block.made_s + self.rules.lag_s > now_s:
                self._copied.append(block)  # whoever asks the directory would find neither
            elif new not in where or new not in stay or len(stay) < block.copies:
                self._give_up([block])  # it is leaving, or gone, or another copy is: this one stays
            else:
                self._ordered[block.block_id] = block
                keys.append(block.key)
                stays.append(stay)
                goes.append(go)
        return TrimOrder(tenant_id, tuple(keys), tuple(stays), tuple(goes))

    def _steps(self) -> Iterable[tuple[RepairStep, tuple[_MovingBlock, ...]]]:
        yield from self._ready
        yield from self._copying.values()

    def _give_up(self, blocks: Iterable[_MovingBlock]) -> None:
        """These stay as they are for the rest of the round."""
        for block in blocks:
            self._forget(block)
            if len(self._skipped) < self.rules.skipped_max:
                self._skipped.add(block.block_id)

    def _forget(self, block: _MovingBlock) -> None:
        self._known.pop(block.block_id, None)
        self._shift[block.move] -= block.size_bytes
        if not self._shift[block.move]:
            del self._shift[block.move]
