"""ReportProgress: what became of a scheduled request."""

from __future__ import annotations

from functools import partial
from typing import Final

from mooncache import errors
from mooncache.client.keys import KEY_BYTES, count_keys
from mooncache.conductor.config import NAME_CHARS_MAX, REPORTS_MAX
from mooncache.conductor.core.hot_prefixes import SHARD_KEYS_MAX
from mooncache.conductor.messages import progress_of
from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CallContext

_WAITED_MAX_S: Final = 86_400.0
_ENDS: Final = frozenset(
    {pb.REQUEST_PHASE_FINISHED, pb.REQUEST_PHASE_FAILED, pb.REQUEST_PHASE_ABORTED},
)


async def handle(
    state: ConductorState, request: pb.ReportProgressRequest, context: CallContext
) -> pb.ReportProgressResponse:
    """Take it in with all that follow, each as of when it was made; repeats change nothing.

    Raises:
        NotLeader: another conductor leads; none is taken in.
        InvalidArgument, DecisionUnknown: of the first that is wrong; the others are taken in all the same.
        TooLarge: too many in one call; none is taken in.
    """
    if len(request.more) >= REPORTS_MAX:
        raise errors.TooLarge(f"{1 + len(request.more)} reports in one call; at most {REPORTS_MAX} are taken")
    state.leadership.require(request.known_term, context.now_s)
    wrong: errors.MooncacheError | None = None
    for report in (request, *request.more):
        at_s = context.now_s - min(report.waited_ms / 1e3, _WAITED_MAX_S)
        try:
            take_in(state, report, at_s)
            state.note(partial(_alone, report), at_s)
        except errors.DecisionUnknown as error:
            if report.phase in _ENDS:
                state.adopted.ended_before(report.decision_id[:NAME_CHARS_MAX])
                state.note(partial(_alone, report), at_s)  # a standby that led before may count it
            wrong = wrong or error
        except errors.MooncacheError as error:
            wrong = wrong or error
    state.give_up()
    if wrong is not None:
        raise wrong
    return pb.ReportProgressResponse(term=state.leadership.term)


def _alone(report: pb.ReportProgressRequest) -> pb.JournalEntry:
    """The report without those that follow it."""
    entry = pb.JournalEntry(progress=report)
    entry.progress.ClearField("more")
    return entry


def take_in(state: ConductorState, report: pb.ReportProgressRequest, now_s: float) -> None:
    """Take one report in, as a leader or as a standby. Raises InvalidArgument, DecisionUnknown, TooLarge."""
    progress = progress_of(report)
    if report.shard_keys:
        _learn_shards(state, report, now_s)
    learned = state.core.report_progress(report.decision_id, progress, now_s)
    if learned.ended:
        state.adopted.ended(report.decision_id)
    if state.leads:  # standbys take in the same, and count nothing twice
        state.instruments.learned(progress.phase, learned)
    if learned.learn is not None:
        state.remember_later(learned.learn)
        learned.learn.keys = learned.learn.content_keys = b""  # up to megabytes that are not asked for again


def _learn_shards(state: ConductorState, report: pb.ReportProgressRequest, now_s: float) -> None:
    """The keys of a hot prefix's other parts. Raises InvalidArgument."""
    active = state.core.work.get(report.decision_id)
    others = state.shards_of(active.model) - 1 if active is not None else 0
    if active is None or not active.keys or others < 1:
        return
    each, rest = divmod(count_keys(report.shard_keys, SHARD_KEYS_MAX, "shard keys"), others)
    if rest:
        raise errors.InvalidArgument(f"{others} other shards need as many keys each")
    size = each * KEY_BYTES
    parts = [report.shard_keys[at * size : (at + 1) * size] for at in range(others)]
    state.hot.learn_shards(active.keys, parts, now_s)
