"""A leader key that has no lease would never end: none is written, and one that is there is taken over."""

from __future__ import annotations

import asyncio

from mooncache.config import CoordinationSection, TlsSection
from mooncache.coordination.base import MasterRecord
from mooncache.coordination.etcd import EtcdCoordinator
from mooncache.proto.etcd import etcd_pb2 as pb
from mooncache.runtime.clock import LoopClock
from tests.conditions import WAIT_S, until
from tests.master.stories.memory_etcd import MemoryEtcd

LEADER = b"/masters/leader"


def candidate(etcd: MemoryEtcd) -> EtcdCoordinator:
    clock = LoopClock()
    made = EtcdCoordinator(CoordinationSection(backend="etcd", prefix="/masters"), TlsSection(), clock)
    made._api = etcd.api("m", clock)  # type: ignore[assignment]
    return made


async def test_a_candidate_whose_lease_has_just_ended_writes_no_key() -> None:
    """It was stopped between the wait for its lease and the campaign: both masters of a cluster never led again."""
    etcd = MemoryEtcd(LoopClock())
    made = candidate(etcd)
    await made.start(MasterRecord("m", "127.0.0.1:1"))
    try:
        await until(made._has_lease.is_set, "a lease")
        made._drop_lease("etcd did not renew the lease in time")
        assert await made._try_to_win(0) is None
        assert LEADER not in etcd._pairs
    finally:
        await made.close()


async def test_a_key_without_a_lease_is_taken_over() -> None:
    etcd = MemoryEtcd(LoopClock())
    etcd.put(pb.PutRequest(key=LEADER, value=b"left by an earlier version"))
    made = candidate(etcd)
    await made.start(MasterRecord("m", "127.0.0.1:1"))
    try:
        async with asyncio.timeout(WAIT_S):
            won = await made.campaign()
        assert won.term > 0 and etcd._pairs[LEADER].lease == made._lease != 0
    finally:
        await made.close()
