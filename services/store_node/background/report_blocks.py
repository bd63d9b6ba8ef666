"""Duty: keep the master's directory equal to what the node holds. Decisions are in core/report_planner.py."""

from __future__ import annotations

from mooncache.errors import MooncacheError, ReportGap, StaleIncarnation, UnknownNode
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.backoff import Backoff
from mooncache.runtime.logs import Event, get_logger
from mooncache.store_node.core.report_planner import (
    BlockReport,
    Drain,
    Idle,
    ReportKind,
    SendReport,
    TakeBase,
    TakePage,
)
from mooncache.store_node.state import StoreNodeState

_KINDS = {
    ReportKind.DELTA: master_pb2.REPORT_KIND_DELTA,
    ReportKind.FULL_BEGIN: master_pb2.REPORT_KIND_FULL_BEGIN,
    ReportKind.FULL_PART: master_pb2.REPORT_KIND_FULL_PART,
    ReportKind.FULL_END: master_pb2.REPORT_KIND_FULL_END,
}
_DISCARD_EVENTS = 65_536

log = get_logger(__name__)


async def run(state: StoreNodeState) -> None:
    """Until cancelled."""
    backoff = Backoff(state.rng, first_s=0.05, cap_s=2.0)
    while True:
        match state.planner.next_step():
            case Idle():
                await state.clock.sleep(state.report_interval_s)
            case Drain(max_events):
                state.planner.drained(*state.core.drain_events(max_events))
            case TakeBase():
                state.planner.base_taken(take_base(state))
                log.info(Event.REPORT_FULL_STARTED, reason=state.planner.last_full_reason)
            case TakePage(cursor, max_records):
                state.planner.page_taken(*state.core.snapshot(cursor, max_records))
            case SendReport(report):
                if await send(state, report):
                    backoff.reset()
                else:
                    await state.clock.sleep(backoff.next_s())


def take_base(state: StoreNodeState) -> int:
    """Throw away the events that the snapshot will contain, then read the newest sequence number.

    The number is read before the first snapshot page; events that come in between are in both and applied twice,
    which changes nothing. The loop is bounded by what was in the log when it began.
    """
    newest = state.core.event_seq()
    while True:
        _, last_seq, _, records = state.core.drain_events(_DISCARD_EVENTS)
        if not records or last_seq >= newest:
            return max(newest, last_seq)


async def send(state: StoreNodeState, report: BlockReport) -> bool:
    """Send one message and tell the planner what became of it. False: pause before the next one."""
    assert state.link is not None
    request = master_pb2.ReportBlocksRequest(
        node_id=state.identity.node_id,
        incarnation=state.identity.incarnation,
        kind=_KINDS[report.kind],
        report_id=report.report_id,
        first_seq=report.first_seq,
        last_seq=report.last_seq,
        part_index=report.part_index,
        records=report.records,
    )
    try:
        response = await state.link.call_once(
            "ReportBlocks", request, master_pb2.ReportBlocksResponse, state.call_timeout_s
        )
    except (UnknownNode, StaleIncarnation):
        state.forget_master()
        return False
    except ReportGap as error:
        state.planner.request_full(error.message)
        return False
    except MooncacheError:
        state.count("report_failures")
        state.planner.send_failed()
        return False
    state.count("reports")
    state.count("report_bytes", len(report.records))
    state.planner.acknowledged(response.acked_seq, response.need_full)
    if report.kind is ReportKind.FULL_END and not response.need_full:
        log.info(Event.REPORT_FULL_FINISHED, parts=report.part_index, base_seq=report.first_seq)
    # After a gap the full report begins at once, but a master that keeps asking must not turn this into a storm.
    return not response.need_full
