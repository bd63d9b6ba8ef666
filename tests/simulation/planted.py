"""Bugs that are planted on purpose, to know that the simulation would find them: each takes one mechanism away.

`REAL` bugs are in the code that ships, `MODEL` bugs in the modelled data plane.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

from mooncache import errors
from mooncache.conductor.core.adoption import CarriedDecisions
from mooncache.conductor.core.fleet_book import FleetBook
from mooncache.conductor.core.work import WorkBook
from mooncache.conductor.ops.resume_requests import UNNAMED_AFTER_S
from mooncache.coordination.lease import LeaseCoordinator
from mooncache.coordination.lease_object import changed
from mooncache.gateway.app import Endpoint
from mooncache.gateway.core.report_queue import ReportQueue
from mooncache.gateway.shell.conductor import Conductor, RequestPlanner
from mooncache.master.core.directory import Directory
from mooncache.master.core.reports import NodeReports
from mooncache.master.shell.trimming import Trimming
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.tasks import wait_for_event
from mooncache.store_node.core.report_planner import ReportKind, ReportPlanner
from tests.master.stories.memory_etcd import MemoryEtcd
from tests.simulation.model_store import ModelStore
from tests.simulation.scheduler import current_process

OF_SERVING: Final = {
    "lost-end",
    "reports-not-repeated",
    "plan-not-given-back",
    "unanswered-forgotten",
    "standby-misses-ends",
    "work-counted-on",
    "tenant-counted-on",
    "old-plan-forgotten",
    "unused-plan-counted",
    "own-decisions-kept",
    "standby-keeps-unnamed",
}
"""Bugs that only seeds with conductors and gateways can find."""
REAL, MODEL = "real", "model"
Plant = Callable[[contextlib.ExitStack], None]
PLANTED: Final[dict[str, tuple[str, str, Plant]]] = {}
"""Name -> where, what was taken away, and how."""


def planted(where: str) -> Callable[[Plant], Plant]:
    """A bug of the table; its docstring says what is missing."""

    def keep(plant: Plant) -> Plant:
        PLANTED[plant.__name__.replace("_", "-")] = where, plant.__doc__ or "", plant
        return plant

    return keep


@contextlib.contextmanager
def bug(name: str) -> Iterator[None]:
    """Plant a bug for a while; "" plants none."""
    with contextlib.ExitStack() as stack:
        if name:
            PLANTED[name][2](stack)
        yield


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, new: Any) -> None:
    stack.enter_context(mock.patch.object(owner, name, new))


@planted(REAL)
def term_not_checked(stack: contextlib.ExitStack) -> None:
    """A node obeys a master that a newer one has followed."""

    def check(terms: Any, incarnation: int, fence: Any) -> None:
        if fence.incarnation and fence.incarnation != incarnation:
            raise errors.StaleIncarnation("another life")

    stack.enter_context(mock.patch("mooncache.store_node.state.check_fence", check))


@planted(REAL)
def life_not_checked(stack: contextlib.ExitStack) -> None:
    """A node obeys a command that was meant for its former process."""

    def check(terms: Any, incarnation: int, fence: Any) -> None:
        if not terms.obey(fence.term):
            raise errors.NotLeader("older")

    stack.enter_context(mock.patch("mooncache.store_node.state.check_fence", check))


@planted(REAL)
def report_gap(stack: contextlib.ExitStack) -> None:
    """An overflow of the event log leads to no full report, and the master takes the gap."""
    drained, delta = ReportPlanner.drained, NodeReports.delta

    def without_gap(self: Any, first_seq: int, last_seq: int, overflow: bool, records: bytes) -> None:
        if records:
            self._acked_seq = max(self._acked_seq, first_seq - 1)
        drained(self, first_seq, last_seq, False, records)

    def takes_gap(self: Any, first_seq: int, last_seq: int, records: bytes, now_s: float) -> Any:
        if self.complete and self._full is None and first_seq > self.acked_seq:
            self.acked_seq = first_seq - 1
        return delta(self, first_seq, last_seq, records, now_s)

    _replace(stack, ReportPlanner, "drained", without_gap)
    _replace(stack, NodeReports, "delta", takes_gap)


@planted(REAL)
def no_sweep(stack: contextlib.ExitStack) -> None:
    """A full report marks, and what it does not name is kept."""

    def kept(self: Any, holder: int) -> None:
        """Nothing is marked, so nothing is swept."""
        self._index.apply(holder, b"")

    _replace(stack, Directory, "begin_full", kept)
    _replace(stack, Directory, "end_full", lambda self, holder: 0)


@planted(REAL)
def report_not_repeated(stack: contextlib.ExitStack) -> None:
    """A node counts changes as reported when the report got no answer."""

    def gives_up(self: Any) -> None:
        pending = self._pending
        if pending is not None and pending.kind is ReportKind.DELTA:
            self._pending, self._acked_seq = None, pending.last_seq

    _replace(stack, ReportPlanner, "send_failed", gives_up)


@planted(REAL)
def full_report_cut_short(stack: contextlib.ExitStack) -> None:
    """A full report counts as ended when its end got no answer."""

    def gives_up(self: Any) -> None:
        if self._pending is not None and self._pending.kind is ReportKind.FULL_END:
            self.acknowledged(self._base_seq, False)

    _replace(stack, ReportPlanner, "send_failed", gives_up)


@planted(REAL)
def dead_nodes_listed(stack: contextlib.ExitStack) -> None:
    """The directory keeps the blocks of a node that is gone."""
    _replace(stack, Directory, "drop_holder", lambda self, holder: 0)


@planted(REAL)
def trim_unconfirmed(stack: contextlib.ExitStack) -> None:
    """Copies are dropped before those that stay have been confirmed."""

    async def confirm(self: Any, trims: Any) -> None:
        for trim in trims:
            for index in trim.stay:
                node = self._state.membership.by_index(index)
                self._asked[index] = node.incarnation if node is not None else 0

    _replace(stack, Trimming, "confirm", confirm)


@planted(REAL)
def drain_without_copies(stack: contextlib.ExitStack) -> None:
    """A draining node's blocks count as copied when the copy was only ordered."""

    async def copy(state: Any, step: Any, term: int) -> tuple[list[int], int]:
        return [errors.OK] * len(step.keys), 0

    stack.enter_context(mock.patch("mooncache.master.background.run_tasks.copy_blocks", copy))


@planted(REAL)
def repair_without_copies(stack: contextlib.ExitStack) -> None:
    """The repair orders no copies."""

    async def copy(state: Any, step: Any, term: int) -> tuple[list[int], int]:
        return [errors.OK] * len(step.keys), 0

    stack.enter_context(mock.patch("mooncache.master.shell.book_runner.copy_blocks", copy))


@planted(REAL)
def pins_forgotten(stack: contextlib.ExitStack) -> None:
    """A pin is answered with OK, and reaches no node."""

    async def nowhere(*_: Any, **__: Any) -> list[list[int]]:
        return [[errors.OK]]

    stack.enter_context(mock.patch("mooncache.master.ops.pin_blocks.to_holders", nowhere))


@planted(REAL)
def lost_end(stack: contextlib.ExitStack) -> None:
    """A gateway does not tell the conductor of one in five ends."""
    report, ends = (
        Conductor.report,
        (pb.REQUEST_PHASE_FINISHED, pb.REQUEST_PHASE_FAILED, pb.REQUEST_PHASE_ABORTED),
    )

    def forgets(self: Any, request_id: str, said: Any) -> None:
        if said.phase not in ends or int(request_id[1:]) % 5:
            report(self, request_id, said)

    _replace(stack, Conductor, "report", forgets)


@planted(REAL)
def reports_not_repeated(stack: contextlib.ExitStack) -> None:
    """A gateway drops reports that the conductor does not acknowledge in time."""

    def drops(self: Any) -> float:
        self.acknowledged()
        return 0.0

    _replace(stack, ReportQueue, "failed", drops)


@planted(REAL)
def plan_not_given_back(stack: contextlib.ExitStack) -> None:
    """A client leaves while the conductor is asked, and the plan is kept."""
    _replace(stack, Conductor, "_give_back", lambda self, request_id, code, call: None)


@planted(REAL)
def unanswered_forgotten(stack: contextlib.ExitStack) -> None:
    """A list of open requests that is sent also counts for the questions that got no answer shortly before."""
    name_open_requests = Conductor.name_open_requests

    async def waits(self: Any, at_most_s: float) -> None:
        await wait_for_event(self._unanswered, at_most_s)

    async def forgets(self: Any, me: pb.Gateway) -> bool:
        self._unanswered.clear()
        return await name_open_requests(self, me)

    _replace(stack, Conductor, "unanswered", waits)
    _replace(stack, Conductor, "name_open_requests", forgets)


@planted(REAL)
def standby_misses_ends(stack: contextlib.ExitStack) -> None:
    """A standby does not take in what gateways report."""
    from mooncache.conductor.shell import replay

    take_in = replay._take_in

    def without_progress(state: Any, entry: Any, what: str | None, at_s: float) -> None:
        if what != "progress":
            take_in(state, entry, what, at_s)

    _replace(stack, replay, "_take_in", without_progress)


@planted(REAL)
def work_counted_on(stack: contextlib.ExitStack) -> None:
    """The book of instances keeps the work of requests that have ended."""
    _replace(stack, FleetBook, "ended", lambda self, decision_id, now_s: None)


@planted(REAL)
def tenant_counted_on(stack: contextlib.ExitStack) -> None:
    """A gateway counts a tenant's request on after its client has left."""
    leave = Endpoint._leave

    def unless_gone(self: Any, exchange: Any) -> None:
        if not exchange.gone:
            leave(self, exchange)

    _replace(stack, Endpoint, "_leave", unless_gone)


# --- what the simulation once found, with what mended it taken away


@planted(REAL)
def old_plan_forgotten(stack: contextlib.ExitStack) -> None:
    """A gateway that chooses an instance itself does not give the conductor's plan back."""
    _replace(stack, RequestPlanner, "take", lambda self, plan: setattr(self, "plan", plan))


@planted(REAL)
def unused_plan_counted(stack: contextlib.ExitStack) -> None:
    """A gateway whose old leg answers after all reports its end under the old plan, though a new one was made."""
    take, offered = RequestPlanner.take, "_offered"

    def at_last(self: Any, plan: Any) -> None:
        if not plan.decision_id or plan is getattr(self, offered, None):
            take(self, plan)
        setattr(self, offered, plan)

    _replace(stack, RequestPlanner, "take", at_last)


@planted(REAL)
def own_decisions_kept(stack: contextlib.ExitStack) -> None:
    """A conductor that leads again counts its own decisions of before, when no gateway names them."""
    unnamed = WorkBook.unnamed

    def young_ones_stay(self: Any, gateway_run: int, named: frozenset[str], before_s: float) -> list[str]:
        process = current_process()
        now_s = process.loop.virtual_now_s * process.rate
        return unnamed(self, gateway_run, named, min(before_s, now_s - UNNAMED_AFTER_S))

    _replace(stack, WorkBook, "unnamed", young_ones_stay)


@planted(REAL)
def standby_keeps_unnamed(stack: contextlib.ExitStack) -> None:
    """A standby counts on what gateways do not name to its leader."""
    _replace(stack, CarriedDecisions, "unnamed", lambda self, term, gateway_run, open_ids: [])


@planted(MODEL)
def etcd_takes_ended_leases(stack: contextlib.ExitStack) -> None:
    """etcd takes a transaction with a lease that has ended, so that the key stays."""
    txn = MemoryEtcd.txn

    def takes(self: Any, request: Any) -> Any:
        leases = {step.request_put.lease for step in request.success if step.HasField("request_put")}
        ended = dict.fromkeys(leases - self._leases.keys() - {0}, (0, 0.0))
        self._leases.update(ended)
        answer = txn(self, request)
        for lease in ended:
            del self._leases[lease]
        return answer

    _replace(stack, MemoryEtcd, "txn", takes)


@planted(REAL)
def lease_unconditional(stack: contextlib.ExitStack) -> None:
    """A candidate writes the Lease whatever has become of the one that it read."""

    def without_version(lease: Any, spec: Any = None, annotations: Any = None) -> dict[str, Any]:
        made = changed(lease, spec, annotations)
        for name in ("resourceVersion", "uid"):
            made["metadata"].pop(name, None)
        return made

    stack.enter_context(mock.patch("mooncache.coordination.lease.changed", without_version))


@planted(REAL)
def lease_renewed_unheard(stack: contextlib.ExitStack) -> None:
    """A leader goes on when its renewal got no answer."""
    renew = LeaseCoordinator._renew

    async def counts_on(self: Any, leadership: Any) -> None:
        try:
            await renew(self, leadership)
        except errors.MooncacheError:
            leadership.until_s = self._end_of(self._clock.now_s())

    _replace(stack, LeaseCoordinator, "_renew", counts_on)


@planted(REAL)
def lease_from_answer(stack: contextlib.ExitStack) -> None:
    """A leader counts its lease from the answer on, not from when it asked."""
    end_of = LeaseCoordinator._end_of
    _replace(stack, LeaseCoordinator, "_end_of", lambda self, sent_s: end_of(self, self._clock.now_s()))


@planted(MODEL)
def early_unpin(stack: contextlib.ExitStack) -> None:
    """A reader's pin ends before it has the bytes."""
    begin = ModelStore.begin_read

    def unpinned(self: Any, line: str, name: Any) -> int:
        extent = begin(self, line, name)
        self.held[name].pins.pop(line)
        return extent

    _replace(stack, ModelStore, "begin_read", unpinned)


@planted(MODEL)
def reservation_kept(stack: contextlib.ExitStack) -> None:
    """A client's reservations outlive its connection."""

    def closes(self: Any, line: str) -> None:
        self.closed.add(line)
        for held in self.held.values():
            held.pins.pop(line, None)

    _replace(stack, ModelStore, "close_line", closes)


@planted(MODEL)
def quota_unchecked(stack: contextlib.ExitStack) -> None:
    """A node takes blocks beyond a tenant's quota."""
    reserve = ModelStore.reserve

    def unchecked(self: Any, line: str, name: Any) -> bool:
        quotas, self.quotas = self.quotas, {}
        try:
            return reserve(self, line, name)
        finally:
            self.quotas = quotas

    _replace(stack, ModelStore, "reserve", unchecked)
