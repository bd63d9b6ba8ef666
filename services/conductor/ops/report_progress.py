"""ReportProgress: what became of a scheduled request."""

from __future__ import annotations

from mooncache import errors
from mooncache.conductor.config import REPORTS_MAX
from mooncache.conductor.messages import progress_of
from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CallContext


async def handle(
    state: ConductorState, request: pb.ReportProgressRequest, context: CallContext
) -> pb.ReportProgressResponse:
    """Take it in with all that follow; repeats are harmless.

    Raises:
        InvalidArgument, DecisionUnknown: of the first that is wrong; the others are taken in all the same.
        TooLarge: too many in one call; none is taken in.
    """
    if len(request.more) >= REPORTS_MAX:
        raise errors.TooLarge(f"{1 + len(request.more)} reports in one call; at most {REPORTS_MAX} are taken")
    wrong: errors.MooncacheError | None = None
    for report in (request, *request.more):
        try:
            _take_in(state, report, context.now_s)
        except errors.MooncacheError as error:
            wrong = wrong or error
    state.give_up()
    if wrong is not None:
        raise wrong
    return pb.ReportProgressResponse()


def _take_in(state: ConductorState, report: pb.ReportProgressRequest, now_s: float) -> None:
    progress = progress_of(report)
    learned = state.core.report_progress(report.decision_id, progress, now_s)
    state.instruments.learned(progress.phase, learned)
    if learned.learn is not None:
        state.remember_later(learned.learn)
        learned.learn.keys = learned.learn.content_keys = b""  # up to megabytes that are not asked for again
