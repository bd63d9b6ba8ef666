"""Election by a Lease of Kubernetes: one object that candidates change only as they have read it.

The leader writes the Lease several times within its time. The others look at it, and measure by their own monotonic
clock how long ago they saw it change: no clock of another host is trusted. When it has not changed for the time that
the leader wrote into it, one of them takes it; the API server refuses all but the first write (409), and who was
refused has lost. The leader counts from the moment at which its renewal was *sent*, less a margin, so its leadership
ends here before another one can win, whether or not the API answers. The fencing term grows as with etcd: one more than
the last one, and at least the wall clock in milliseconds, which covers a Lease that was deleted.

Candidates publish themselves in the same object. That write of a standby makes a renewal of the leader fail once in a
while; the leader then reads the Lease again, sees that it still holds it, and renews what it has read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
from collections.abc import Awaitable
from typing import Final, TypeVar

from mooncache.config import CoordinationSection
from mooncache.coordination.base import Leadership, MasterRecord
from mooncache.coordination.lease_api import LeaseApi, LeaseChangedError
from mooncache.coordination.lease_object import (
    LEADER,
    TERM,
    Lease,
    changed,
    member_name,
    micro_time,
    new_lease,
    released_spec,
    won_spec,
)
from mooncache.coordination.records import MASTERS_MAX, record_bytes, record_of
from mooncache.errors import Closed, MasterUnavailable, MooncacheError
from mooncache.runtime.clock import Clock
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.tasks import wait_for_event

T = TypeVar("T")
_MARGIN: Final = 0.1  # share of the lease given up for clock drift and late wake-ups
_RENEWALS: Final = 4  # renewals in one lease's time
_POLL_MAX_S: Final = 1.0
_RETRY_S: Final = 0.5
_CALL_TIMEOUT_S: Final = 2.0
_WRITES_MAX: Final = 3  # of one renewal, when others write the object at the same time
_MEMBER_LIVES: Final = 3  # lease times without a sign after which a candidate is gone

log = get_logger(__name__)


class LeaseCoordinator:
    """A coordinator that elects the leader by a Lease. kind: "masters" or "conductors", the end of its name."""

    def __init__(self, section: CoordinationSection, kind: str, clock: Clock) -> None:
        self._api = LeaseApi(section, f"{section.lease_name}-{kind}")
        self._clock = clock
        self._ttl_s = max(1, math.ceil(section.lease_s))
        self._call_timeout_s = min(_CALL_TIMEOUT_S, self._ttl_s / 2)
        self._poll_s = min(_POLL_MAX_S, self._ttl_s / 10)
        self._me: MasterRecord | None = None
        self._identity = ""
        self._keeper: asyncio.Task[None] | None = None
        self._wanted: asyncio.Future[Leadership] | None = None
        self._floor = 0
        self._wake = asyncio.Event()
        self._changing_hands = asyncio.Lock()  # a resignation must not free what was won since
        self._leadership: Leadership | None = None
        self._lease: Lease | None = None  # as it was seen last, at `_looked_s`
        self._looked_s = -math.inf
        self._busy_until_s = -math.inf  # another one may lead until then
        self._blank_since_s: float | None = None  # since when the Lease says nothing of any election
        self._signs: dict[str, tuple[str, float]] = {}  # of candidates: what they wrote, and since when
        self._newest = 0  # term that the Lease ever had, as far as seen
        self._beats = 0
        self._published_s = -math.inf
        self._written_us = 0
        self._reachable = False

    @property
    def reachable(self) -> bool:
        return self._reachable

    async def start(self, me: MasterRecord) -> None:
        """Return at once; a background task looks at the Lease, publishes this candidate, and renews."""
        if self._keeper is None:
            self._me = me
            self._identity = f"{me.master_id}_{secrets.token_hex(4)}"  # another one after each start
            self._keeper = asyncio.create_task(self._keep(), name="kubernetes lease")

    async def campaign(self, floor: int = 0) -> Leadership:
        """Try to become the leader; the contract is `Coordinator.campaign`."""
        if self._me is None or self._keeper is None:
            raise Closed("The coordinator is not started.")
        if self._leadership is not None:
            await self._leadership.lost.wait()
        log.info(Event.ELECTION_CAMPAIGN, master_id=self._me.master_id)
        self._wanted, self._floor = asyncio.get_running_loop().create_future(), floor
        self._wake.set()
        try:
            won = await self._wanted
        except asyncio.CancelledError:
            self._end_leadership("the candidacy was given up")  # the keeper gives the Lease back
            raise
        finally:
            self._wanted = None
        log.info(Event.ELECTION_WON, term=won.term, master_id=self._me.master_id)
        return won

    async def leader(self) -> MasterRecord | None:
        lease = await self._fresh()
        if lease is None or not lease.holder:
            return None
        if lease.holder != self._identity and self._clock.now_s() >= self._busy_until_s:
            return None
        return lease.leader

    async def masters(self) -> list[MasterRecord]:
        lease = await self._fresh()
        if lease is None:
            return []
        records = [record_of(text.encode()) for name, text in lease.members.items() if self._lives(name)]
        found = [record for record in records if record is not None][:MASTERS_MAX]
        return sorted(found, key=lambda record: record.master_id)

    async def resign(self) -> None:
        if self._leadership is not None:
            self._end_leadership("resigned")
            await self._give_back(leaving=False)

    async def close(self) -> None:
        if self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            self._end_leadership("closed")
            await self._give_back(leaving=True)
        await self._api.close()

    # the election

    async def _keep(self) -> None:
        """Forever: renew while leading, else look, publish, and win when that is wanted and possible."""
        while True:
            try:
                if self._leadership is not None:
                    await self._renew(self._leadership)
                else:
                    await self._look_and_try()
            except LeaseChangedError:
                pass  # another candidate was faster; the next look tells which
            except MooncacheError as error:
                self._note(error)
            except Exception as error:
                log.error(Event.COORDINATION_UNREACHABLE, error=repr(error), exc_info=error)
            if self._leadership is not None and not self._leadership.holds(self._clock.now_s()):
                self._end_leadership("the Kubernetes API did not renew the lease in time")
            self._wake.clear()
            await wait_for_event(self._wake, self._pause_s())

    def _pause_s(self) -> float:
        if self._leadership is None:
            return self._poll_s if self._reachable else min(self._poll_s, _RETRY_S)
        regular_s = self._ttl_s / _RENEWALS if self._reachable else min(self._ttl_s / _RENEWALS, _RETRY_S)
        return max(0.0, min(regular_s, self._leadership.until_s - self._clock.now_s()))

    async def _look_and_try(self) -> None:
        lease = await self._look()
        wanted = self._wanted is not None and not self._wanted.done()
        if wanted and self._is_free(lease):
            async with self._changing_hands:
                await self._take(lease)
        elif lease is not None and lease.holder == self._identity and self._leadership is None:
            await self._give_back(
                leaving=False
            )  # of a candidacy that was given up, or a leadership that ended
        elif lease is not None and self._clock.now_s() >= self._published_s + self._ttl_s:
            await self._write(lease, None, self._member())

    def _is_free(self, lease: Lease | None) -> bool:
        """Whether no other process can lead. A Lease that was made anew says nothing of who led until then."""
        if lease is not None and lease.holder == self._identity:
            return True
        if self._blank_since_s is not None:
            return self._clock.now_s() >= max(self._busy_until_s, self._blank_since_s + self._ttl_s)
        return (lease is not None and not lease.holder) or self._clock.now_s() >= self._busy_until_s

    async def _take(self, lease: Lease | None) -> None:
        assert self._me is not None
        before = lease or new_lease(self._api.name, self._api.namespace)
        term = max(self._newest + 1, self._floor + 1, int(self._clock.wall_s() * 1000))
        notes = self._member() | {TERM: str(term), LEADER: record_bytes(self._me).decode()}
        sent_s = self._clock.now_s()
        spec = won_spec(before, self._identity, self._ttl_s, self._stamp_us())
        taken = await self._write(before, spec, notes)
        until_s = self._end_of(sent_s)
        if taken.holder != self._identity or self._clock.now_s() >= until_s:
            return
        if self._wanted is not None and not self._wanted.done():
            self._leadership = Leadership(term, until_s=until_s)
            self._wanted.set_result(self._leadership)

    async def _renew(self, leadership: Leadership) -> None:
        left_s = leadership.until_s - self._clock.now_s()
        if left_s <= 0:
            return
        try:
            async with asyncio.timeout(left_s):  # not a moment longer: leadership ends then
                for _ in range(_WRITES_MAX):
                    if self._lease is None or not self._is_still(leadership, self._lease):
                        self._end_leadership("another one wrote the Lease, or it was deleted")
                        return
                    sent_s = self._clock.now_s()
                    try:
                        await self._write_renewal(self._lease, leadership.term)
                    except LeaseChangedError:
                        await self._look()
                    else:
                        leadership.until_s = self._end_of(sent_s)
                        return
        except TimeoutError:
            raise MasterUnavailable("The Kubernetes API did not renew the lease in time.") from None
        raise MasterUnavailable("Others change the Lease all the time.")

    def _is_still(self, leadership: Leadership, lease: Lease) -> bool:
        return lease.holder == self._identity and lease.term <= leadership.term

    async def _write_renewal(self, lease: Lease, term: int) -> None:
        assert self._me is not None
        spec: dict[str, object] = {
            "leaseDurationSeconds": self._ttl_s,
            "renewTime": micro_time(self._stamp_us()),
        }
        notes = {name: None for name in lease.members if not self._lives(name)} | self._member()
        notes |= {TERM: str(term), LEADER: record_bytes(self._me).decode()}
        renewed = await self._write(lease, spec, notes)
        if renewed.holder != self._identity:
            raise LeaseChangedError

    async def _give_back(self, *, leaving: bool) -> None:
        """Free the Lease if it is this process's, and take the record back. The lease's end does the same, later."""
        async with self._changing_hands:
            lease = self._lease
            for _ in range(_WRITES_MAX):
                if lease is None or self._leadership is not None:
                    return
                mine = lease.holder == self._identity
                notes: dict[str, str | None] = {LEADER: None} if mine else {}
                if leaving and self._me is not None and member_name(self._me.master_id) in lease.members:
                    notes[member_name(self._me.master_id)] = None
                if not mine and not notes:
                    return
                with contextlib.suppress(MooncacheError):
                    try:
                        await self._write(lease, released_spec(self._stamp_us()) if mine else None, notes)
                    except LeaseChangedError:
                        lease = await self._look()
                        continue
                return

    def _end_leadership(self, reason: str) -> None:
        leadership, self._leadership = self._leadership, None
        if leadership is not None:
            log.warning(Event.ELECTION_LOST, term=leadership.term, reason=reason)
            leadership.end(reason)

    # the object

    async def _fresh(self) -> Lease | None:
        """The Lease as it was a moment ago."""
        if self._clock.now_s() - self._looked_s <= max(self._poll_s, self._ttl_s / _RENEWALS):
            return self._lease
        return await self._look()

    async def _look(self) -> Lease | None:
        return self._saw(await self._call(self._api.get(self._call_timeout_s)))

    async def _write(
        self, lease: Lease, spec: dict[str, object] | None, notes: dict[str, str | None]
    ) -> Lease:
        made, put = changed(lease, spec, notes), self._api.replace if lease.version else self._api.create
        written = await self._call(put(made, self._call_timeout_s))
        self._published_s = self._clock.now_s()
        self._saw(written)
        return written

    def _saw(self, lease: Lease | None) -> Lease | None:
        """Take in what the Lease says now: whether it changed, by the local clock."""
        now_s = self._clock.now_s()
        if lease is not None and (self._lease is None or lease.sign != self._lease.sign):
            if lease.holder not in ("", self._identity):
                self._busy_until_s = now_s + (lease.duration_s or self._ttl_s)
            elif lease.holder or lease.term:
                self._busy_until_s = -math.inf
        blank = lease is None or not (lease.holder or lease.term)
        if not blank:
            self._blank_since_s = None
        elif self._blank_since_s is None or now_s - self._looked_s > self._ttl_s / 2:
            self._blank_since_s = (
                now_s  # in a longer pause one could have been elected, and its Lease deleted
            )
        if lease is not None:
            self._newest = max(self._newest, lease.term)
            self._signs = {
                name: known if (known := self._signs.get(name, ("", 0.0)))[0] == text else (text, now_s)
                for name, text in list(lease.members.items())[:MASTERS_MAX]
            }
        self._lease, self._looked_s = lease, now_s
        return lease

    def _lives(self, name: str) -> bool:
        _, since_s = self._signs.get(name, ("", -math.inf))
        return self._clock.now_s() - since_s <= _MEMBER_LIVES * self._ttl_s

    def _member(self) -> dict[str, str | None]:
        """The annotation with this candidate's record; the count in it is its sign of life."""
        assert self._me is not None
        self._beats += 1
        text = json.dumps(json.loads(record_bytes(self._me)) | {"beat": self._beats})
        return {member_name(self._me.master_id): text}

    def _stamp_us(self) -> int:
        """The wall clock for renewTime; it never repeats, since others only see whether it changed."""
        self._written_us = max(self._written_us + 1, int(self._clock.wall_s() * 1e6))
        return self._written_us

    def _end_of(self, sent_s: float) -> float:
        return sent_s + self._ttl_s * (1 - _MARGIN)

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            answer = await call
        except LeaseChangedError:
            self._answered()
            raise
        self._answered()
        return answer

    def _answered(self) -> None:
        if not self._reachable:
            self._reachable = True
            log.info(Event.COORDINATION_RECOVERED, endpoint=self._api.endpoint)

    def _note(self, error: MooncacheError) -> None:
        if self._reachable:
            log.warning(Event.COORDINATION_UNREACHABLE, code=error.name, reason=error.message)
        self._reachable = False
