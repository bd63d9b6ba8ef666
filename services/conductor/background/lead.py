"""Duty: lead, or follow the conductor that leads and know what it knows; core/leadership.py decides which.

A leader asks the others all the time whether a newer one leads. A standby asks its leader for what has happened: the
answer is the leader's sign of life, too. One that refuses connections has ended, and is followed at once; one that is
silent only after `conductor.takeover_s`.
"""

from __future__ import annotations

import asyncio
from typing import Final

from mooncache.conductor.core.leadership import LeadStep, Standing, decide
from mooncache.conductor.messages import STANDINGS
from mooncache.conductor.ops.resume_requests import close_lost
from mooncache.conductor.shell.peers import Peers
from mooncache.conductor.shell.replay import replay
from mooncache.conductor.state import ConductorState
from mooncache.errors import MooncacheError
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.logs import Event, get_logger

SEEK_PAUSE_S: Final = 0.05
GATHER_S: Final = 0.02  # so that much that happens makes few calls
ASKS: Final = 4  # of a leader or a standby, within `takeover_s`
RESUME_S: Final = 10.0  # a gateway that has not named its requests under way by then is gone
_AT_ONCE: Final = 50  # entries that are taken in before other calls get their turn

log = get_logger(__name__)


async def run(state: ConductorState, peers: Peers) -> None:
    """Until cancelled."""
    book = state.leadership
    while not book.has_retired():
        asked_s = state.clock.now_s()
        book.tick(asked_s)
        views = await peers.look(state.run, book.newest, book.takeover_s / ASKS)
        now_s = state.clock.now_s()
        book.tick(now_s)
        if now_s - asked_s > book.takeover_s:
            continue  # this process was stopped meanwhile: what the others said is old
        granted = book.is_granted(now_s) if book.elected else None
        if book.leads and granted is False:
            book.seek(now_s)
            state.announce_leader()
        own_term, patient = book.term if book.leads else 0, book.is_patient(now_s)
        verdict = decide(views, own_term, leading=book.leads, patient=patient, granted=granted)
        book.hear(verdict.term)
        if book.has_retired():  # meanwhile
            break
        book.views = tuple(views)
        match verdict.step:
            case LeadStep.FOLLOW:
                if book.leads:
                    log.warning(Event.ELECTION_LOST, term=book.term, reason=f"term {verdict.term} is newer")
                await _follow(state, peers, verdict.leader, views[verdict.leader].term)
                continue
            case LeadStep.LEAD if book.leads and book.newest > book.term:
                # Whoever led in that term may lead still, though it did not answer now: as at the start.
                book.seek(now_s)
                state.announce_leader()
            case LeadStep.LEAD if not book.leads:
                state.begin_term()
                log.info(Event.CONDUCTOR_LEADS, term=book.term, adopted=len(state.adopted))
            case LeadStep.LEAD:
                book.confirm(asked_s)
                if len(state.adopted) and now_s - book.began_s > RESUME_S:
                    close_lost(state, state.adopted.take_rest(), now_s)
            case LeadStep.WAIT:
                pass
        await state.clock.sleep(book.takeover_s / ASKS if book.leads else SEEK_PAUSE_S)
    await asyncio.get_running_loop().create_future()  # until the service cancels its duties


async def _follow(state: ConductorState, peers: Peers, leader: int, term: int) -> None:
    """Follow one leader until it leads no longer, or does not answer."""
    book = state.leadership
    book.follow(leader, term, state.clock.now_s())
    state.announce_leader()
    log.info(Event.CONDUCTOR_FOLLOWS, target=peers.targets[leader], term=term)
    request = pb.FollowConductorRequest(run=state.run, wait_ms=int(book.takeover_s / ASKS * 1e3))
    try:
        while True:
            request.known_term = book.newest
            answer = await peers.follow(leader, request, book.takeover_s * (1 - 1 / ASKS))
            complete = await _take_in(state, answer)
            if (
                STANDINGS.get(answer.role) is not Standing.LEADER
                or answer.term < book.newest
                or book.has_retired()
                or book.is_granted(state.clock.now_s())
            ):
                break
            book.follow(leader, answer.term, state.clock.now_s())
            # An instance that is not known here was forgotten, or its registration missed: all of them are asked for.
            request.known_run = answer.run if complete or answer.anew else 0
            request.cursor = answer.cursor
            del request.want_full[:]
            if answer.anew:
                request.want_full.extend(instance.info.instance_id for instance in state.core.registry)
            else:
                request.want_full.extend(
                    instance.info.instance_id for instance in state.core.registry if instance.want_full
                )
            await state.clock.sleep(0.0 if answer.more else GATHER_S)
    except MooncacheError as error:
        log.warning(
            Event.CONDUCTOR_LEADER_LOST, target=peers.targets[leader], code=error.name, reason=error.message
        )
    book.seek()
    state.announce_leader()


async def _take_in(state: ConductorState, answer: pb.FollowConductorResponse) -> bool:
    """Take the entries in; False when one of them is of an instance that is not known here."""
    if STANDINGS.get(answer.role) is Standing.LEADER:
        state.carried.begin(answer.term, state.core.work.gateway_runs())
    complete = True
    for at, entry in enumerate(answer.entries):
        complete = replay(state, entry, state.clock.now_s()) and complete
        if at % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
    state.leadership.behind_s = answer.entries[-1].age_ms / 1e3 if answer.more else 0.0
    return complete
