"""An etcd in memory: keys under leases and transactions, as far as elections use them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from mooncache.errors import MasterUnavailable
from mooncache.proto.etcd import etcd_pb2 as pb
from mooncache.runtime.clock import Clock


class PausableClock:
    """The clock of a process that SIGSTOP can stop: it sleeps on until it is woken, and time has passed then."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stopped_s: float | None = None
        self._going = asyncio.Event()
        self._going.set()

    def now_s(self) -> float:
        return self._clock.now_s() if self._stopped_s is None else self._stopped_s

    def wall_s(self) -> float:
        return self._clock.wall_s()

    async def sleep(self, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        await self._going.wait()

    def stop(self) -> None:
        self._stopped_s = self._clock.now_s()
        self._going.clear()

    def go_on(self) -> None:
        self._stopped_s = None
        self._going.set()


class MemoryEtcd:
    """`cut`: masters that do not reach it; `mute`: that do not hear it; `late_s`: that hear it so much later."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pairs: dict[bytes, pb.KeyValue] = {}
        self._leases: dict[int, tuple[int, float]] = {}  # id -> (seconds, until)
        self._revision = 0
        self.cut: set[str] = set()
        self.mute: set[str] = set()
        self.late_s: dict[str, float] = {}

    def api(self, name: str, clock: Clock) -> EtcdLine:
        """Return what `EtcdApi` is to a master."""
        return EtcdLine(self, name, clock)

    def expire(self) -> None:
        """End the leases whose time is over, and their keys."""
        now_s = self._clock.now_s()
        for lease in [lease for lease, (_, until_s) in self._leases.items() if until_s <= now_s]:
            self.revoke(lease)

    def grant(self, ttl_s: int) -> pb.LeaseGrantResponse:
        self._revision += 1
        self._leases[self._revision] = ttl_s, self._clock.now_s() + ttl_s
        return pb.LeaseGrantResponse(id=self._revision, ttl=ttl_s)

    def keep_alive(self, lease: int) -> int:
        if lease not in self._leases:
            return 0
        ttl_s = self._leases[lease][0]
        self._leases[lease] = ttl_s, self._clock.now_s() + ttl_s
        return ttl_s

    def revoke(self, lease: int) -> None:
        self._leases.pop(lease, None)
        for key in [key for key, pair in self._pairs.items() if pair.lease == lease]:
            del self._pairs[key]

    def range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        end = request.range_end or request.key + b"\0"
        return pb.RangeResponse(
            kvs=[self._pairs[key] for key in sorted(self._pairs) if request.key <= key < end]
        )

    def put(self, request: pb.PutRequest) -> pb.PutResponse:
        if request.lease and request.lease not in self._leases:
            raise MasterUnavailable("etcdserver: requested lease not found")
        self._revision += 1
        before = self._pairs.get(request.key)
        self._pairs[request.key] = pb.KeyValue(
            key=request.key,
            value=request.value,
            lease=request.lease,
            create_revision=before.create_revision if before is not None else self._revision,
            mod_revision=self._revision,
        )
        return pb.PutResponse()

    def txn(self, request: pb.TxnRequest) -> pb.TxnResponse:
        holds = all(self._holds(compare) for compare in request.compare)
        leases = {step.request_put.lease for step in request.success if step.HasField("request_put")} - {0}
        if holds and leases - self._leases.keys():
            raise MasterUnavailable("etcdserver: requested lease not found")
        for step in request.success if holds else ():
            if step.HasField("request_put"):
                self.put(step.request_put)
            else:
                self._pairs.pop(step.request_delete_range.key, None)
        return pb.TxnResponse(header=pb.ResponseHeader(revision=self._revision), succeeded=holds)

    def _holds(self, compare: pb.Compare) -> bool:
        pair = self._pairs.get(compare.key, pb.KeyValue())
        if compare.target == pb.Compare.CREATE:
            return bool(pair.create_revision == compare.create_revision)
        assert compare.target == pb.Compare.MOD
        return bool(pair.mod_revision == compare.mod_revision)


class EtcdLine:
    """One master's line to etcd, with the methods of `EtcdApi`."""

    endpoint = "etcd"

    def __init__(self, etcd: MemoryEtcd, name: str, clock: Clock) -> None:
        self._etcd, self._name, self._clock = etcd, name, clock

    async def _answer(self, timeout_s: float, call: Callable[..., Any], *given: Any) -> Any:
        await self._clock.sleep(0.001)
        if self._name in self._etcd.cut:
            await self._clock.sleep(timeout_s)
            raise MasterUnavailable("etcd does not answer")
        self._etcd.expire()
        answer = call(*given)
        if self._name in self._etcd.late_s:
            await self._clock.sleep(self._etcd.late_s[self._name])
        if self._name in self._etcd.mute:
            await self._clock.sleep(timeout_s)
            raise MasterUnavailable("etcd does not answer")
        return answer

    async def range(self, request: pb.RangeRequest, timeout_s: float) -> Any:
        return await self._answer(timeout_s, self._etcd.range, request)

    async def put(self, request: pb.PutRequest, timeout_s: float) -> Any:
        return await self._answer(timeout_s, self._etcd.put, request)

    async def txn(self, request: pb.TxnRequest, timeout_s: float) -> Any:
        return await self._answer(timeout_s, self._etcd.txn, request)

    async def lease_grant(self, ttl_s: int, timeout_s: float) -> Any:
        return await self._answer(timeout_s, self._etcd.grant, ttl_s)

    async def lease_keep_alive(self, lease: int, timeout_s: float) -> Any:
        return await self._answer(timeout_s, self._etcd.keep_alive, lease)

    async def lease_revoke(self, lease: int, timeout_s: float) -> None:
        await self._answer(timeout_s, self._etcd.revoke, lease)

    async def close(self) -> None:
        """Nothing is open."""
