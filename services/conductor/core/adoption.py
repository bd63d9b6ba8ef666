"""Decisions that another conductor made: counted and recorded here as there, without deciding again.

A standby adopts what its leader decides; a new leader adopts what gateways say is under way. So load books, prompts in
flight and records are right at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from mooncache.conductor.core.decisions import (
    Arrival,
    PlannedRequest,
    PoolAnswer,
    PoolState,
    SchedulingRequest,
    new_decision,
    new_record,
)
from mooncache.conductor.core.handover_node import NO_NODE
from mooncache.conductor.core.models import ServedModel
from mooncache.conductor.core.policy import crowding
from mooncache.conductor.core.policy.types import NO_ROW, Awaited, Branch, Choice, Reason, Request
from mooncache.conductor.core.records import DecisionState
from mooncache.conductor.core.scheduler import Scheduler

OPEN_MAX: Final = 100_000
ENDED_MAX: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeDecision:
    """A decision of another conductor. Instances by name; `prefill` is "" when the decode instance computes."""

    decision_id: str
    request: SchedulingRequest
    admitted: bool
    reason: Reason
    message: str = ""
    prefill: str = ""
    decode: str = ""
    store_node: str = NO_NODE
    branch: Branch = Branch.LOCAL
    prefix_tokens: int = 0
    fetch_tokens: int = 0
    pool_blocks: int = 0
    awaited: str = ""
    ttft_s: float = 0.0
    queue_s: float = 0.0
    ready_s: float = 0.0
    compute_s: float = 0.0
    handover_s: float = 0.0
    wait_s: float = 0.0
    head: bytes = b""  # of the record, packed; b"": it is made here


def adopt(scheduler: Scheduler, made: MadeDecision, now_s: float, wall_s: float) -> bool:
    """Record a decision and count it as work, unless it is known; return whether it is counted now.

    A decision whose instances are not known here is only recorded.
    """
    if scheduler.work.get(made.decision_id) is not None:
        return False
    request = made.request
    if request.attempt > 1:
        earlier = scheduler.work.of_request(request.tenant, request.request_id)
        if earlier is not None:
            scheduler.close(earlier.decision_id, DecisionState.SUPERSEDED, now_s)
    pool = PoolAnswer(PoolState.OK if request.keys else PoolState.NO_KEYS, made.pool_blocks)
    arrival = Arrival(request, pool, now_s, wall_s)
    model = scheduler.models.known(request.model)
    if model is None:
        _record(scheduler, made, PlannedRequest(arrival, _unseen(request), Choice(False, made.reason)))
        return False
    group, block_tokens = model.group(request.group, scheduler.registry)
    policy_request = scheduler.policy_request(arrival, model, group, block_tokens, "")
    choice = _choice(scheduler, model, made, policy_request)
    fleet = model.book.view(now_s)
    planned = PlannedRequest(arrival, policy_request, choice, fleet, block_tokens, made.store_node)
    _record(scheduler, made, planned)
    record = scheduler.records.find(made.decision_id)
    if record is None or choice.decode == NO_ROW or record.state is not DecisionState.RUNNING:
        return False
    if not request.offline:
        model.offered_load.add(crowding.cost_s(choice), now_s)
    decision = new_decision(planned, record)
    scheduler.set_waits(model, decision)
    scheduler.take_on(arrival, model, decision, fleet)
    return True


def _record(scheduler: Scheduler, made: MadeDecision, planned: PlannedRequest) -> None:
    """The record of the decision, unless it is kept already."""
    known = scheduler.records.find(made.decision_id)
    if known is not None and known.decision_id == made.decision_id:
        return
    request = made.request
    earlier = scheduler.records.earlier(request.request_id) if request.attempt > 1 else []
    record = new_record(planned, made.decision_id, earlier)
    record.head = made.head or record.head
    record.message = made.message or record.message
    record.state = DecisionState.RUNNING if made.admitted else DecisionState.REFUSED
    scheduler.records.add(record)


def _choice(scheduler: Scheduler, model: ServedModel, made: MadeDecision, request: Request) -> Choice:
    """The choice with rows for names; without rows where an instance is not known here."""
    book = model.book
    decode = book.row(made.decode)
    prefill = book.row(made.prefill) if made.prefill else NO_ROW
    if not made.admitted or decode == NO_ROW or (made.prefill and prefill == NO_ROW):
        return Choice(made.admitted, made.reason)
    running = scheduler.in_flight.get(made.awaited) if made.awaited else None
    prefix_tokens = min(made.prefix_tokens, request.prompt_tokens)
    awaited = None
    if running is not None:
        awaited = Awaited(
            prefix_tokens, made.ready_s, book.row(running.instance_id), made.awaited, running.pool
        )
    return Choice(
        True,
        made.reason,
        prefill=prefill,
        decode=decode,
        branch=made.branch,
        prefix_tokens=prefix_tokens,
        fetch_tokens=min(made.fetch_tokens, prefix_tokens),
        awaited=awaited,
        ttft_s=made.ttft_s,
        queue_s=made.queue_s,
        ready_s=made.ready_s,
        compute_s=made.compute_s,
        handover_s=made.handover_s,
        wait_s=made.wait_s,
    )


def _unseen(request: SchedulingRequest) -> Request:
    """The request as no policy saw it."""
    return Request(prompt_tokens=request.prompt_tokens, local=np.zeros(0, dtype=np.int64))


class AdoptedDecisions:
    """Open decisions of a former leader, by the gateway that asked: those that no gateway knows of are closed.

    A gateway's list of its requests under way may be overtaken by word of their ends: those are not adopted.
    """

    def __init__(self) -> None:
        self._gateway_of: dict[str, str] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._gateway_of)

    def add(self, decision_id: str, gateway_id: str) -> None:
        """A decision was adopted."""
        self._gateway_of[decision_id] = gateway_id
        if len(self._gateway_of) > OPEN_MAX:
            del self._gateway_of[next(iter(self._gateway_of))]

    def ended(self, decision_id: str) -> None:
        """It has ended."""
        self._gateway_of.pop(decision_id, None)

    def ended_before(self, decision_id: str) -> None:
        """A decision that is not known here has ended."""
        self._ended[decision_id] = None
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def has_ended(self, decision_id: str) -> bool:
        """Whether word of its end came before the decision itself."""
        return decision_id in self._ended

    def unknown_to(self, gateway_id: str, open_ids: frozenset[str]) -> list[str]:
        """Take out the decisions of a gateway; return those that it does not know to be open."""
        mine = [name for name, gateway in self._gateway_of.items() if gateway == gateway_id]
        for name in mine:
            del self._gateway_of[name]
        return [name for name in mine if name not in open_ids]

    def take_rest(self) -> list[str]:
        """Take all out: their gateways have not been heard of."""
        rest, self._gateway_of = list(self._gateway_of), {}
        return rest


class CarriedDecisions:
    """Open decisions that a standby has from before its leader's term: those that the leader does not know.

    A leader may take in word of an end, and die before a standby has heard of it; a leader that starts anew never hears
    of that request. So what a gateway names to a new term's leader closes the same here as there: a decision of an
    older term, made for that process of the gateway, that is not named has ended.
    """

    def __init__(self) -> None:
        self._term = 0
        self._run_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._run_of)

    def begin(self, term: int, run_of: Mapping[str, int]) -> None:
        """A leader's term is followed from now on. run_of: the open decisions, and the process of the gateway of each.

        Nothing of this term may have been heard before; following in it again changes nothing.
        """
        if term != self._term:
            self._term, self._run_of = term, dict(run_of)

    def known_there(self, decision_id: str) -> None:
        """The leader knows this one, and will say how it ends."""
        self._run_of.pop(decision_id, None)

    def unnamed(self, term: int, gateway_run: int, open_ids: frozenset[str]) -> list[str]:
        """Take out the decisions for a gateway's process; return those that it did not name in this term.

        What was named in an older term than the one that is followed says nothing.
        """
        if term < self._term or not gateway_run:
            return []
        mine = [name for name, run in self._run_of.items() if run == gateway_run]
        for name in mine:
            del self._run_of[name]
        return [name for name in mine if name not in open_ids]
