"""Reports of requests on their way to the conductor: kept and sent again until the one that leads has taken them in.

Two lanes, so that one slow call does not hold up all; those of one decision share a lane and keep their order. All that
wait in a lane go in one call. First tokens and good ends, which is nearly all there is, go with what comes within a
moment; but not those of batches, which offer their next request then. A repeat does no harm at the conductor: it knows
a report by its decision and number.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Final

from mooncache.client.conductor_link import ConductorLink
from mooncache.errors import DecisionUnknown, InvalidArgument, MooncacheError, Unauthenticated
from mooncache.gateway.core.report_queue import Loss, ReportQueue, WaitingReport
from mooncache.gateway.metrics import GatewayMetrics
from mooncache.gateway.shell.open_requests import ENDS
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.clock import Clock
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.plain_structlog import structlog
from mooncache.runtime.tasks import wait_for_event

if TYPE_CHECKING:
    import random

LANES: Final = 2
REPORT_TIMEOUT_S: Final = 5.0
_LINGERING: Final = frozenset({pb.REQUEST_PHASE_FIRST_TOKEN, pb.REQUEST_PHASE_FINISHED})

log = get_logger(__name__)


class ReportLanes:
    """The reports that wait. Made in the event loop in which its lanes run.

    Args:
        rng: spreads the waits before another try, so that many gateways do not come back at one moment.
        resume: tells the leader of this term what is under way, before it hears how that went.
    """

    def __init__(
        self,
        link: ConductorLink,
        clock: Clock,
        stats: GatewayMetrics,
        rng: random.Random,
        resume: Callable[[int], Awaitable[None]],
    ) -> None:
        self._link, self._clock, self._stats, self._resume = link, clock, stats, resume
        self._queues = [ReportQueue[pb.ReportProgressRequest](rng) for _ in range(LANES)]
        self._filled = [asyncio.Event() for _ in range(LANES)]
        self._numbers = itertools.count(1)
        stats.updates_waiting.set_function(lambda: len(self))

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def add(self, request_id: str, report: pb.ReportProgressRequest, *, at_once: bool = False) -> None:
        """Send a report soon, and again until it is acknowledged; never waits. at_once: a question follows it."""
        report.sequence = next(self._numbers)
        lane, now_s = zlib.crc32(report.decision_id.encode()) % LANES, self._clock.now_s()
        waiting = WaitingReport(
            report,
            report.decision_id,
            request_id,
            report.phase in ENDS,
            report.ByteSize(),
            now_s,
            lingers=report.phase in _LINGERING and not at_once,
        )
        queue = self._queues[lane]
        awaited_s = queue.due_in_s(now_s)
        self._note(queue.add(waiting), "too many reports wait")
        if queue.due_in_s(now_s) != awaited_s:  # or the lane wakes up in time by itself
            self._filled[lane].set()

    def open_ends(self) -> Iterator[str]:
        """Decisions whose end the conductor has not acknowledged yet."""
        return itertools.chain.from_iterable(queue.open_ends() for queue in self._queues)

    async def run(self, lane: int) -> None:
        """Send the reports of one lane until cancelled."""
        queue, filled = self._queues[lane], self._filled[lane]
        while True:
            filled.clear()
            due_s = queue.due_in_s(self._clock.now_s())
            if due_s is None:
                await filled.wait()
                continue
            if due_s:
                await wait_for_event(filled, due_s)
                continue
            batch = queue.batch()
            wait_s = await self._send(queue, batch)
            if wait_s:
                self._stats.updates_resent.inc(len(batch))
                await self._clock.sleep(wait_s)

    async def _send(
        self,
        queue: ReportQueue[pb.ReportProgressRequest],
        batch: list[WaitingReport[pb.ReportProgressRequest]],
    ) -> float:
        """Send a batch once; return the seconds until it has to be sent again, 0.0 when that is done with."""
        await self._resume(self._link.term)
        request = self._message(batch)
        try:
            with structlog.contextvars.bound_contextvars(request_id=batch[0].request_id):
                await self._link.call("ReportProgress", request, pb.ReportProgressResponse, REPORT_TIMEOUT_S)
        except DecisionUnknown:  # it counts no such request; the others are taken in
            queue.acknowledged()
        except InvalidArgument as error:
            queue.acknowledged()
            self._note(Loss(1, is_first=True), error.message)
        except MooncacheError as error:
            if error.retryable or isinstance(error, Unauthenticated):
                return queue.failed()
            self._note(queue.refused(), error.message)
        else:
            queue.acknowledged()
        return 0.0

    def _message(self, batch: list[WaitingReport[pb.ReportProgressRequest]]) -> pb.ReportProgressRequest:
        now_s = self._clock.now_s()
        for waiting in batch:
            waiting.report.waited_ms = max(0, round((now_s - waiting.made_s) * 1e3))
        request = pb.ReportProgressRequest()
        request.CopyFrom(batch[0].report)
        request.more.extend(waiting.report for waiting in batch[1:])
        return request

    def _note(self, loss: Loss, reason: str) -> None:
        """Count what was dropped, if anything, and say it once until all others have been sent."""
        if not loss.count:
            return
        self._stats.updates_dropped.inc(loss.count)
        if loss.is_first:
            log.warning(Event.GATEWAY_REPORTS_DROPPED, count=loss.count, waiting=len(self), reason=reason)
