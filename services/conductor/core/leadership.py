"""Which of several conductors leads, as a pure decision: what one of them does next, by what the others say.

By default there is no third party and no majority: what a conductor knows is soft, so two that lead for a moment cost a
worse choice and never a wrong byte. So any one that is left can lead. Where `conductor.election` names a third party,
only the one that it elected leads, and only while that lasts. Each leadership has a term that is larger than all
before it and at least the wall clock in milliseconds; whoever hears of a newer term leads no longer, and gateways,
workers and masters refuse what an older one says (docs/decisions/0045-standby-conductors.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from mooncache.errors import NotLeader

PATIENCE_S: Final = 15.0  # for which a conductor that knows nothing lets others be elected
TERM_MAX: Final = 1 << 62  # a larger number is damage: no clock and no count gets near it


class ElectionGrant(Protocol):
    """A leadership that a third party gave."""

    @property
    def term(self) -> int:
        """Its fencing number."""
        ...

    def holds(self, now_s: float) -> bool:
        """Whether no other process can have been elected yet."""
        ...


class Standing(StrEnum):
    """Where a conductor stands."""

    LEADER = "leader"
    STANDBY = "standby"  # follows a leader, and knows what it knows
    SEEKING = "seeking"
    UNREACHABLE = "unreachable"  # of another one: nothing listens there
    SILENT = "silent"  # of another one: it does not answer in time


@dataclass(frozen=True, slots=True)
class PeerView:
    """What another conductor answered, or that it did not."""

    standing: Standing
    term: int = 0
    is_self: bool = False  # the address is this conductor's own


NOT_THERE = PeerView(Standing.UNREACHABLE)
NO_ANSWER = PeerView(Standing.SILENT)


class LeadStep(StrEnum):
    """What a conductor does next."""

    LEAD = "lead"
    FOLLOW = "follow"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class LeadVerdict:
    """The step, the leader to follow by its place in the list, and the newest term that anyone knows."""

    step: LeadStep
    leader: int = -1
    term: int = 0


def decide(
    views: Sequence[PeerView],
    own_term: int,
    *,
    leading: bool,
    patient: bool = False,
    granted: bool | None = None,
) -> LeadVerdict:
    """What to do. views: of all conductors in the order in which they are configured, this one among them.

    patient: one that is silent may lead: it has not been silent for long. granted: whether a third party elected this
    one; None where there is none.
    """
    others = [(at, view) for at, view in enumerate(views) if not view.is_self]
    me = next((at for at, view in enumerate(views) if view.is_self), len(views))
    newest = max([own_term, *(view.term for _, view in others)])
    if granted:  # whoever leads besides has not noticed yet that it does no longer
        return LeadVerdict(LeadStep.LEAD, me, newest)
    leaders = [(view.term, -at) for at, view in others if view.standing is Standing.LEADER]
    if leaders:
        term, place = max(leaders)
        if not leading or (term, place) > (own_term, -me):
            return LeadVerdict(LeadStep.FOLLOW, -place, newest)
    if granted is not None:
        return LeadVerdict(LeadStep.WAIT, term=newest)
    if leading:
        # A newer term than the own one is that of a leader that is gone already: it is passed.
        return LeadVerdict(LeadStep.LEAD, me, newest)
    if patient and any(view.standing is Standing.SILENT for _, view in others):
        return LeadVerdict(LeadStep.WAIT, term=newest)
    # Who follows a leader that does not answer here is connected better; who stands first goes first.
    if any(view.standing is Standing.STANDBY for _, view in others):
        return LeadVerdict(LeadStep.WAIT, term=newest)
    if any(at < me and view.standing is Standing.SEEKING for at, view in others):
        return LeadVerdict(LeadStep.WAIT, term=newest)
    return LeadVerdict(LeadStep.LEAD, me, newest)


def next_term(newest: int, wall_s: float) -> int:
    """The term of a leadership that begins now."""
    return max(newest + 1, int(wall_s * 1000))


class LeadershipBook:
    """Where this conductor stands. Times are seconds of one monotonic clock.

    A leader that was stopped for longer than `takeover_s`, as its own pauses show, serves nothing before it has asked
    the others again. A conductor that is `alone` leads from its first term on.
    """

    def __init__(
        self, targets: Sequence[str], takeover_s: float, now_s: float = 0.0, *, elected: bool = False
    ) -> None:
        self.elected = elected  # by a third party
        self.grant: ElectionGrant | None = None
        self.targets, self.takeover_s = tuple(targets), takeover_s
        self.views: tuple[PeerView, ...] = ()
        self.standing = Standing.SEEKING
        self._retired = False
        self.term = 0  # in which it leads, or of the leader that it follows
        self.newest = 0  # that it has heard of
        self.leader = -1  # the place of the leader in the list
        self.began_s = 0.0
        self.behind_s = 0.0  # of a standby: age of the last entry that it has
        self._made_s = now_s
        self._heard_s = now_s  # of a leader, or when this process began
        self._ticked_s = 0.0
        self._unsure_s: float | None = None  # since when it is not known whether it still leads

    @property
    def alone(self) -> bool:
        """Whether there are no others, and no third party that has to be asked."""
        return len(self.targets) < 2 and not self.elected

    def has_retired(self) -> bool:
        """Whether this process ends."""
        return self._retired

    @property
    def leads(self) -> bool:
        """Whether it was the leader when it last asked."""
        return self.standing is Standing.LEADER

    def leads_at(self, now_s: float) -> bool:
        """Whether it is the leader, as far as can be known at this moment: what only a leader does asks this."""
        return self.alone or not self._refusal(now_s)

    def is_granted(self, now_s: float) -> bool:
        """Whether a third party elected this one, in a term that is not passed."""
        return self.grant is not None and self.grant.holds(now_s) and self.grant.term >= self.newest

    def may_campaign(self, now_s: float) -> bool:
        """Whether this one is a candidate: one that knows nothing yet lets go first who followed the last leader."""
        if self._retired or not self.views:
            return False
        waiting = (Standing.STANDBY, Standing.SEEKING)
        knowing = any(view.term and view.standing in waiting for view in self.views if not view.is_self)
        return bool(self.term) or not knowing or now_s - self._made_s > PATIENCE_S

    def hear(self, term: int) -> None:
        """A leadership with this term exists, or existed."""
        self.newest = max(self.newest, min(term, TERM_MAX))

    def lead(self, term: int, now_s: float) -> None:
        """A leadership begins."""
        self.standing, self.term, self.leader, self.began_s = Standing.LEADER, term, -1, now_s
        self.hear(term)
        self._ticked_s, self._unsure_s = now_s, None

    def tick(self, now_s: float) -> None:
        """This process runs; called several times within `takeover_s`, or it was stopped meanwhile."""
        if now_s - self._ticked_s > self.takeover_s:
            self._unsure_s = now_s
        self._ticked_s = now_s

    def confirm(self, asked_s: float) -> None:
        """The others were asked at that moment, and this conductor still led."""
        if self._unsure_s is not None and asked_s >= self._unsure_s:
            self._unsure_s = None

    def is_patient(self, now_s: float) -> bool:
        """Whether a leader may be silent for a moment only."""
        return now_s - self._heard_s < self.takeover_s

    def follow(self, leader: int, term: int, now_s: float) -> None:
        """Another one leads, and is followed: it answered at that moment."""
        self._heard_s = now_s
        if self._retired:
            return
        self.standing, self.leader, self.term = Standing.STANDBY, leader, term
        self.hear(term)

    def retire(self) -> None:
        """This process ends: it neither leads nor keeps others from leading."""
        self._retired, self.standing, self.leader = True, Standing.UNREACHABLE, -1

    def seek(self, now_s: float | None = None) -> None:
        """It is not known who leads. now_s: a leader may be there that has not answered yet."""
        if self._retired:
            return
        self._heard_s = self._heard_s if now_s is None else now_s
        self.standing, self.leader = Standing.SEEKING, -1

    def require(self, known_term: int, now_s: float) -> None:
        """The call is for a leader. Raises NotLeader."""
        self.hear(known_term)
        if not self.alone and (refusal := self._refusal(now_s)):
            raise NotLeader(refusal)

    def _refusal(self, now_s: float) -> str:
        """Why this one serves no call for a leader; "" when it does."""
        if not self.leads:
            where = self.targets[self.leader] if 0 <= self.leader < len(self.targets) else ""
            who = f"the conductor at {where} leads" if where else "it is not known yet which conductor leads"
            return f"This conductor does not lead: {who}."
        if self.newest > self.term:
            return f"This conductor led in term {self.term}; there was a leader of term {self.newest}."
        if self._unsure_s is not None or now_s - self._ticked_s > self.takeover_s:
            return "This conductor was silent, and asks whether it still leads."
        if self.elected and not self.is_granted(now_s):
            return f"This conductor led in term {self.term}, which is over: its lease was not renewed."
        return ""
