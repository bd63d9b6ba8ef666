"""Calls to the conductor: where does a request go, and what became of it.

Without an answer requests go round robin over the instances of the last list: worse placed, but served. So they do when
the answer is an error that says nothing about the request: a defect, a limit on calls, a token that does not fit. What
the conductor decides (overloaded, too long, unknown model) is no error and stays. After a silent conductor the next
request within a second does not wait for it again. Reports are sent in the background in the order
of each decision, all that wait in one call; when too many wait, they are dropped and counted - the conductor forgets
requests by itself.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Final

import structlog

from mooncache.client.conductor_link import ConductorLink
from mooncache.errors import ConductorUnavailable, DeadlineExceeded, InvalidArgument, MooncacheError, TooLarge
from mooncache.gateway.metrics import GatewayMetrics
from mooncache.gateway.shell.instance_list import InstanceList
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.clock import Clock
from mooncache.runtime.logs import Event, get_logger

REPORT_LANES: Final = 2
_BATCH_MAX: Final = 64
_QUEUE_MAX: Final = 4096
# Without an answer in this time requests go round robin over the instances that are known.
_SCHEDULE_TIMEOUT_S: Final = 1.0
_REPORT_TIMEOUT_S: Final = 5.0
_AVOID_S: Final = 1.0
_ABSENT: Final = (ConductorUnavailable, DeadlineExceeded)

log = get_logger(__name__)


class Conductor:
    """Calls to the conductor."""

    def __init__(self, link: ConductorLink, clock: Clock, stats: GatewayMetrics) -> None:
        self._link, self._clock, self._stats = link, clock, stats
        self._avoid_until_s = 0.0
        self.present = True
        self._list = InstanceList()
        self._refusal = ""
        self._queues: Sequence[asyncio.Queue[tuple[str, pb.ReportProgressRequest]]] = [
            asyncio.Queue(_QUEUE_MAX) for _ in range(REPORT_LANES)
        ]

    async def schedule(self, request: pb.ScheduleRequest) -> pb.ScheduleResponse | None:
        """Ask where a request goes; None when the conductor does not answer, or not to the question.

        When the caller is cancelled meanwhile, the plan, which will not be carried out, is given back: the conductor
        would count it as work under way until its own limit.

        Raises:
            InvalidArgument, TooLarge: what is asked makes no sense to the conductor.
        """
        started_s = self._clock.now_s()
        if started_s < self._avoid_until_s:
            return None
        call = asyncio.ensure_future(self._link.call("Schedule", request, _SCHEDULE_TIMEOUT_S))
        try:
            response: pb.ScheduleResponse = await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(partial(self._give_back, request.request_id))
            raise
        except _ABSENT as error:
            self._avoid_until_s = self._clock.now_s() + _AVOID_S
            self._note(error)
            return None
        except (InvalidArgument, TooLarge):
            raise
        except MooncacheError as error:
            self._refused(error)
            return None
        self._refusal = ""
        self._stats.schedule.observe(self._clock.now_s() - started_s)
        self._note(None)
        return response

    def _refused(self, error: MooncacheError) -> None:
        """Count an error, and log it when it is another one than the last."""
        self._stats.conductor_errors.labels(error.name).inc()
        if error.name != self._refusal:
            self._refusal = error.name
            log.error(Event.CONDUCTOR_REFUSED, code=error.name, reason=error.message)

    def _give_back(self, request_id: str, call: asyncio.Future[pb.ScheduleResponse]) -> None:
        if call.cancelled() or call.exception() is not None:
            return
        response = call.result()
        if response.admitted:
            phase = pb.REQUEST_PHASE_ABORTED
            self.report(
                request_id,
                pb.ReportProgressRequest(decision_id=response.decision_id, phase=phase, code="CLIENT_GONE"),
            )

    async def find_blocks(self, keys: bytes) -> int | None:
        """How many leading blocks of packed keys the pool has; None when the pool does not say. Never raises."""
        if self._clock.now_s() < self._avoid_until_s:
            return None
        try:
            response: pb.FindBlocksResponse = await self._link.call(
                "FindBlocks", pb.FindBlocksRequest(keys=keys), _SCHEDULE_TIMEOUT_S
            )
        except MooncacheError as error:
            self._refused(error)
            return None
        return response.leading_blocks if response.known else None

    async def list_instances(
        self, known_version: int, wait_s: float, me: pb.Gateway | None = None
    ) -> InstanceList:
        """Known instances; waits for a change. `me` tells the conductor who asks. Raises MooncacheError."""
        request = self._list.question(known_version, wait_s, me)
        try:
            response: pb.ListInstancesResponse = await self._link.call(
                "ListInstances", request, wait_s + _SCHEDULE_TIMEOUT_S + 1.0
            )
        except _ABSENT as error:
            self._note(error)
            raise
        self._avoid_until_s = 0.0
        self._note(None)
        self._list.take(response)
        return self._list

    def report(self, request_id: str, report: pb.ReportProgressRequest) -> None:
        """Report soon; never waits. There is nothing to report of decisions that no conductor made."""
        if not report.decision_id:
            return
        try:
            self._queues[zlib.crc32(report.decision_id.encode()) % REPORT_LANES].put_nowait(
                (request_id, report)
            )
        except asyncio.QueueFull:
            self._stats.updates_dropped.inc()

    async def send_reports(self, lane: int) -> None:
        """Send the reports of one lane forever; a report that does not get through is dropped."""
        queue = self._queues[lane]
        while True:
            request_id, request = await queue.get()
            while not queue.empty() and len(request.more) < _BATCH_MAX - 1:
                request.more.append(queue.get_nowait()[1])
            try:
                with structlog.contextvars.bound_contextvars(request_id=request_id):
                    await self._link.call("ReportProgress", request, _REPORT_TIMEOUT_S)
            except _ABSENT:
                self._stats.updates_dropped.inc(1 + len(request.more))
            except MooncacheError:
                self._stats.updates_dropped.inc()

    async def flush(self) -> None:
        """Wait until nothing is queued; the caller bounds it."""
        while any(queue.qsize() for queue in self._queues) and self.present:
            await self._clock.sleep(0.01)

    async def close(self) -> None:
        await self._link.close()

    def _note(self, error: MooncacheError | None) -> None:
        """Log a change between present and absent, once."""
        if error is not None and self.present:
            log.warning(Event.CONDUCTOR_LOST, reason=error.message)
        elif error is None and not self.present:
            log.info(Event.CONDUCTOR_FOUND)
        self.present = error is None
