"""The cluster's processes as messages: a process that announces itself, and those that the master names."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from mooncache._version import __version__
from mooncache.client.conductor_link import ConductorLink
from mooncache.client.host import host_id, host_name
from mooncache.errors import MooncacheError
from mooncache.proto.v1 import common_pb2, master_pb2
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.clock import Clock
from mooncache.runtime.logs import Event, get_logger

_CALL_S: Final = 2.0
_LEAVE_S: Final = 0.5
_AGAIN_S: Final = 2.0  # after a call that failed
_INTERVAL_MAX_S: Final = 60.0
_NODE_STATES: Final = {
    common_pb2.NODE_STATE_ACTIVE: "ready",
    common_pb2.NODE_STATE_SUSPECT: "suspect",
    common_pb2.NODE_STATE_DRAINING: "draining",
    common_pb2.NODE_STATE_DEAD: "dead",
}

log = get_logger(__name__)


def this_process(kind: pb.MemberKind, name: str, address: str, started_ms: int, host: str = "") -> pb.Member:
    """This process as a member; `host`: another id of the machine than its own."""
    return pb.Member(
        kind=kind,
        name=name,
        address=address,
        host_id=host or host_id(),
        host_name=host_name(),
        software_version=__version__,
        started_ms=started_ms,
        pid=os.getpid(),
    )


class ClockComparison(NamedTuple):
    """Our clock minus another one's, and how far from that the truth may be: half of the round trip."""

    offset_ms: int
    bound_ms: int


def compare_clocks(their_wall_ms: int, our_wall_s: float, round_trip_s: float) -> ClockComparison:
    """The clocks, by an answer that was given somewhere within a round trip which began at `our_wall_s`."""
    middle_ms = (our_wall_s + round_trip_s / 2) * 1e3
    return ClockComparison(round(middle_ms - their_wall_ms), round(round_trip_s * 500) + 1)


class Announcer:
    """Tells the leading conductor, again and again, that this process is there.

    Without a conductor, or with one of an earlier version, nothing else changes: no work needs an announcement.
    """

    def __init__(self, link: ConductorLink, clock: Clock, describe: Callable[[], pb.Member]) -> None:
        """describe: the process as it is then."""
        self._link, self._clock, self._describe = link, clock, describe
        self._compared: ClockComparison | None = None
        self._failed = ""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(await self.announce())

    async def announce(self) -> float:
        """One announcement; returns the seconds until the next. Never raises MooncacheError."""
        request = pb.AnnounceMemberRequest(member=self._describe())
        if self._compared is not None:
            request.member.clock_offset_ms = self._compared.offset_ms
            request.member.clock_bound_ms = self._compared.bound_ms
        began_s, wall_s = self._clock.now_s(), self._clock.wall_s()
        try:
            answer: pb.AnnounceMemberResponse = await self._link.call(
                "AnnounceMember", request, pb.AnnounceMemberResponse, _CALL_S
            )
        except MooncacheError as error:
            if error.name != self._failed:
                self._failed = error.name
                log.warning(Event.MEMBER_NOT_ANNOUNCED, code=error.name, reason=error.message)
            return _AGAIN_S
        self._failed = ""
        self._compared = compare_clocks(answer.wall_ms, wall_s, self._clock.now_s() - began_s)
        return min(max(answer.interval_ms / 1e3, _AGAIN_S / 2), _INTERVAL_MAX_S)

    async def leave(self) -> None:
        """Say that this process ends, within a moment; never raises MooncacheError."""
        request = pb.AnnounceMemberRequest(member=self._describe(), leaving=True)
        with contextlib.suppress(MooncacheError, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._link.call("AnnounceMember", request, pb.AnnounceMemberResponse, _LEAVE_S)


def members_of_pool(status: master_pb2.GetStatusResponse) -> Iterator[tuple[pb.Member, float]]:
    """Masters and store nodes that a master names, each with the seconds since it was heard of."""
    for master in status.masters:
        answers = master.master_id == status.master_id
        yield (
            pb.Member(
                kind=pb.MEMBER_KIND_MASTER,
                name=master.master_id,
                address=master.grpc_target,
                host_id=master.host_id,
                host_name=master.host_name,
                software_version=master.software_version or (status.software_version if answers else ""),
                started_ms=master.started_ms,
                state="leader" if master.leader else "standby",
                pid=master.pid,
            ),
            0.0,
        )
    for item in status.nodes:
        node = item.node
        yield (
            pb.Member(
                kind=pb.MEMBER_KIND_STORE_NODE,
                name=node.node_id,
                address=node.endpoints.grpc_target or node.node_id,
                host_id=node.host_id,
                host_name=item.host_name,
                software_version=node.software_version,
                started_ms=item.started_ms,
                state=_NODE_STATES.get(node.state, "unknown"),
                reason="the memory of its blocks does not answer" if item.arena_gone else "",
                pid=item.pid,
            ),
            item.heartbeat_age_ms / 1e3,
        )
