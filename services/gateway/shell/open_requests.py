"""Requests that a conductor scheduled and that have not ended, so that it or the next leader can hear of them.

The conductor's standby knows nearly all of them already; what the leader had not passed on yet is known here alone.
Keys are left out: who would wait for blocks of these prompts finds them in the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.clock import Clock

OPEN_MAX: Final = 65_536
REPORTS_MAX: Final = 4  # that are kept of one request
_AT_ONCE: Final = 256
ENDS: Final = frozenset(
    {pb.REQUEST_PHASE_FINISHED, pb.REQUEST_PHASE_FAILED, pb.REQUEST_PHASE_ABORTED},
)


class OpenRequests:
    """The requests under way, by decision. Beyond OPEN_MAX the oldest are forgotten."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: OrderedDict[str, tuple[pb.OpenRequest, float]] = OrderedDict()
        self._of_request: dict[tuple[str, str], str] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, asked: pb.ScheduleRequest, plan: pb.ScheduleResponse) -> None:
        """A request was scheduled; another attempt takes the place of the one before. `asked` loses its keys."""
        name = asked.tenant, asked.request_id
        if asked.attempt > 1:
            self._end(self._of_request.get(name, ""))
        asked.ClearField("keys")
        asked.ClearField("content_keys")
        kept = pb.OpenRequest(request=asked, plan=plan)
        self._open[plan.decision_id] = kept, self._clock.now_s()
        self._of_request[name] = plan.decision_id
        if len(self._open) > OPEN_MAX:
            self._end(next(iter(self._open)))

    def reported(self, report: pb.ReportProgressRequest) -> None:
        """Something happened to a request."""
        if report.phase in ENDS:
            self._end(report.decision_id)
            return
        found = self._open.get(report.decision_id)
        if found is not None and len(found[0].reports) < REPORTS_MAX:
            found[0].reports.append(report)

    def requests(self, me: pb.Gateway) -> Iterator[pb.ResumeRequestsRequest]:
        """The messages to a new leader, in calls of a size that it takes; the last one lists all that are open then."""
        names = list(self._open)
        for begin in range(0, len(names), _AT_ONCE):
            part = pb.ResumeRequestsRequest(gateway=me)
            now_s = self._clock.now_s()
            for name in names[begin : begin + _AT_ONCE]:
                found = self._open.get(name)
                if found is not None:
                    found[0].age_ms = max(0, round((now_s - found[1]) * 1e3))
                    part.requests.append(found[0])
            yield part
        yield self.named(me)

    def named(self, me: pb.Gateway) -> pb.ResumeRequestsRequest:
        """The message that lists all that are open now."""
        return pb.ResumeRequestsRequest(gateway=me, open_decision_ids=list(self._open), last=True)

    def _end(self, decision_id: str) -> None:
        found = self._open.pop(decision_id, None)
        if found is None:
            return
        name = found[0].request.tenant, found[0].request.request_id
        if self._of_request.get(name) == decision_id:
            del self._of_request[name]
