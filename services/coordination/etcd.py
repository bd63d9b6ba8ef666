"""Election through etcd: one lease for each master, one key that only one lease can hold.

    <prefix>/masters/<id>   a live master, tied to its lease
    <prefix>/leader         the leader, created only when absent, tied to its lease
    <prefix>/term           the term of the last election that was won

The fencing term is one more than the last one, in the same transaction as the win, and at least the wall clock in
milliseconds, like that of a master without etcd. So it grows within one store whatever clocks say, and also when the
store was lost, restored from a backup, or took the place of none, as long as clocks are right. The lease
is counted from the moment a renewal was *sent*, by the local monotonic clock, less a margin; when that time is
over leadership ends here, whether or not etcd can be asked. Since etcd counts from when it *received* the
renewal, no other master can win before. A stopped etcd therefore ends leadership, and cannot wedge anything: every
call has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable
from typing import Final, TypeVar

from mooncache.config import CoordinationSection, TlsSection
from mooncache.coordination.base import Leadership, MasterRecord
from mooncache.coordination.etcd_api import EtcdApi, prefix_end
from mooncache.coordination.records import MASTERS_MAX, record_bytes, record_of
from mooncache.errors import Closed, MasterUnavailable, MooncacheError
from mooncache.proto.etcd import etcd_pb2 as pb
from mooncache.runtime import tls as tls_files
from mooncache.runtime.clock import Clock
from mooncache.runtime.logs import Event, get_logger

T = TypeVar("T")
_MARGIN: Final = 0.1  # share of the lease given up for clock drift and late wake-ups
_RENEWALS: Final = 4  # renewals in one lease's time
_POLL_MAX_S: Final = 0.5
_CALL_TIMEOUT_S = 2.0

log = get_logger(__name__)


class EtcdCoordinator:
    """A coordinator that elects the leader through etcd."""

    def __init__(self, section: CoordinationSection, tls: TlsSection, clock: Clock) -> None:
        credentials = tls_files.channel_credentials(tls.model_copy(update={"enabled": section.etcd_tls}))
        self._api = EtcdApi(section.etcd_endpoints, credentials, section.etcd_user, section.etcd_password)
        self._clock = clock
        self._ttl_s = max(1, math.ceil(section.lease_s))
        self._call_timeout_s = min(_CALL_TIMEOUT_S, self._ttl_s / 2)
        prefix = section.prefix.rstrip("/").encode()
        self._leader_key = prefix + b"/leader"
        self._term_key = prefix + b"/term"
        self._masters_prefix = prefix + b"/masters/"
        self._me: MasterRecord | None = None
        self._lease = 0
        self._lease_until_s = 0.0
        self._has_lease = asyncio.Event()
        self._leadership: Leadership | None = None
        self._won_revision = 0
        self._keeper: asyncio.Task[None] | None = None
        self._reachable = False

    @property
    def reachable(self) -> bool:
        return self._reachable

    async def start(self, me: MasterRecord) -> None:
        """Connect, and return at once; a background task gets the lease, and a new one when it is lost."""
        if self._keeper is None:
            self._me = me
            self._keeper = asyncio.create_task(self._keep(), name="etcd lease")

    async def campaign(self, floor: int = 0) -> Leadership:
        """Try to become the leader; the contract is `Coordinator.campaign`."""
        if self._me is None or self._keeper is None:
            raise Closed("The coordinator is not started.")
        if self._leadership is not None:
            await self._leadership.lost.wait()
        log.info(Event.ELECTION_CAMPAIGN, master_id=self._me.master_id)
        poll_s = min(_POLL_MAX_S, self._ttl_s / 10)
        while True:
            await self._has_lease.wait()
            try:
                won = await self._try_to_win(floor)
            except MooncacheError as error:
                self._note(error)
                won = None
            if won is not None:
                log.info(Event.ELECTION_WON, term=won.term, master_id=self._me.master_id)
                return won
            await self._clock.sleep(poll_s)

    async def leader(self) -> MasterRecord | None:
        answer = await self._call(
            self._api.range(pb.RangeRequest(key=self._leader_key), self._call_timeout_s)
        )
        return record_of(answer.kvs[0].value) if answer.kvs else None

    async def masters(self) -> list[MasterRecord]:
        request = pb.RangeRequest(
            key=self._masters_prefix, range_end=prefix_end(self._masters_prefix), limit=MASTERS_MAX
        )
        answer = await self._call(self._api.range(request, self._call_timeout_s))
        records = [record_of(pair.value) for pair in answer.kvs]
        return [record for record in records if record is not None]

    async def resign(self) -> None:
        leadership = self._leadership
        if leadership is None:
            return
        self._end_leadership("resigned")
        request = pb.TxnRequest(
            compare=[
                pb.Compare(target=pb.Compare.MOD, key=self._leader_key, mod_revision=self._won_revision)
            ],
            success=[pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=self._leader_key))],
        )
        with contextlib.suppress(MooncacheError):  # the lease's end does the same, only later
            await self._call(self._api.txn(request, self._call_timeout_s))

    async def close(self) -> None:
        if self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            await self.resign()
            if self._lease:
                with contextlib.suppress(MooncacheError):
                    await self._api.lease_revoke(self._lease, self._call_timeout_s)
        self._drop_lease("closed")
        await self._api.close()

    # the election

    async def _try_to_win(self, floor: int) -> Leadership | None:
        """One attempt: create the leader key under our lease when it is absent or, from a lost answer, ours already."""
        lease = self._lease
        if not lease:  # it ended since it was waited for; a key without one would never end
            return None
        answer = await self._call(
            self._api.range(pb.RangeRequest(key=self._leader_key), self._call_timeout_s)
        )
        # No leader has a key without a lease: an earlier version left it, and it would never end.
        if answer.kvs and answer.kvs[0].lease not in (lease, 0):
            return None
        if answer.kvs:
            unchanged = pb.Compare(
                target=pb.Compare.MOD, key=self._leader_key, mod_revision=answer.kvs[0].mod_revision
            )
        else:
            unchanged = pb.Compare(target=pb.Compare.CREATE, key=self._leader_key, create_revision=0)
        last = await self._call(self._api.range(pb.RangeRequest(key=self._term_key), self._call_timeout_s))
        before = last.kvs[0] if last.kvs else pb.KeyValue()
        same_term = pb.Compare(
            target=pb.Compare.MOD, key=self._term_key, mod_revision=before.mod_revision
        )  # 0 when there is none
        term = max(_number(before.value) + 1, floor + 1, int(self._clock.wall_s() * 1000))
        assert self._me is not None
        puts = (
            pb.PutRequest(key=self._leader_key, value=record_bytes(self._me), lease=lease),
            pb.PutRequest(key=self._term_key, value=str(term).encode()),
        )
        success = [pb.RequestOp(request_put=put) for put in puts]
        request = pb.TxnRequest(compare=[unchanged, same_term], success=success)
        outcome = await self._call(self._api.txn(request, self._call_timeout_s))
        if not outcome.succeeded or lease != self._lease or self._clock.now_s() >= self._lease_until_s:
            return None
        self._won_revision = outcome.header.revision
        self._leadership = Leadership(term, until_s=self._lease_until_s)
        return self._leadership

    # the lease

    async def _keep(self) -> None:
        """Hold a lease forever: fetch one, renew it, and when its time is over give up leadership and begin again."""
        while True:
            try:
                if not self._lease:
                    await self._fetch_lease()
                else:
                    await self._renew_lease()
            except MooncacheError as error:
                self._note(error)
            except Exception as error:
                log.error(Event.COORDINATION_UNREACHABLE, error=repr(error), exc_info=error)
            if self._lease and self._clock.now_s() >= self._lease_until_s:
                self._drop_lease("etcd did not renew the lease in time")
            await self._clock.sleep(self._pause_s())

    def _pause_s(self) -> float:
        regular_s = self._ttl_s / _RENEWALS
        if not self._lease or not self._reachable:
            regular_s = min(regular_s, _POLL_MAX_S)
        if not self._lease:
            return regular_s
        return max(0.0, min(regular_s, self._lease_until_s - self._clock.now_s()))

    async def _fetch_lease(self) -> None:
        assert self._me is not None
        sent_s = self._clock.now_s()
        granted = await self._call(self._api.lease_grant(self._ttl_s, self._call_timeout_s))
        key = self._masters_prefix + self._me.master_id.encode()
        put = pb.PutRequest(key=key, value=record_bytes(self._me), lease=granted.id)
        await self._call(self._api.put(put, self._call_timeout_s))
        self._lease = granted.id
        self._lease_until_s = sent_s + self._ttl_s * (1 - _MARGIN)
        self._has_lease.set()

    async def _renew_lease(self) -> None:
        sent_s = self._clock.now_s()
        left_s = self._lease_until_s - sent_s
        if left_s <= 0:
            return
        try:
            async with asyncio.timeout(left_s):  # not a moment longer: leadership ends then
                ttl_s = await self._call(
                    self._api.lease_keep_alive(self._lease, min(self._call_timeout_s, left_s))
                )
        except TimeoutError:
            raise MasterUnavailable("etcd did not renew the lease in time") from None
        if ttl_s <= 0:
            self._drop_lease("etcd ended the lease")
            return
        self._lease_until_s = sent_s + min(ttl_s, self._ttl_s) * (1 - _MARGIN)
        if self._leadership is not None:
            self._leadership.until_s = self._lease_until_s

    def _drop_lease(self, reason: str) -> None:
        """Forget the lease: it is never renewed again, so that etcd ends it and with it the keys."""
        self._lease = 0
        self._has_lease.clear()
        self._end_leadership(reason)

    def _end_leadership(self, reason: str) -> None:
        leadership, self._leadership = self._leadership, None
        if leadership is not None:
            log.warning(Event.ELECTION_LOST, term=leadership.term, reason=reason)
            leadership.end(reason)

    async def _call(self, call: Awaitable[T]) -> T:
        answer = await call
        if not self._reachable:
            self._reachable = True
            log.info(Event.COORDINATION_RECOVERED, endpoint=self._api.endpoint)
        return answer

    def _note(self, error: MooncacheError) -> None:
        if self._reachable:
            log.warning(Event.COORDINATION_UNREACHABLE, code=error.name, reason=error.message)
        self._reachable = False


def _number(value: bytes) -> int:
    """A term as a master wrote it; 0 for bytes that none wrote."""
    return int(value) if value.isdigit() and len(value) < 19 else 0
