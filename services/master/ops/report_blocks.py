"""ReportBlocks: block changes of a node, or all of its blocks."""

from __future__ import annotations

from mooncache import errors
from mooncache.master.core.reports import RECORD_BYTES, Ack, NodeReports
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.rpc import CallContext

log = get_logger(__name__)


async def handle(
    state: MasterState, request: master_pb2.ReportBlocksRequest, context: CallContext
) -> master_pb2.ReportBlocksResponse:
    """Take a report in. Raises UnknownNode, StaleIncarnation, InvalidArgument, TooLarge, LimitExceeded."""
    state.require_leading()
    node = state.membership.fence(request.node_id, request.incarnation, context.now_s)
    if len(request.records) > state.limits.report_bytes_max:
        raise errors.TooLarge(
            f"{len(request.records)} bytes of records in one report; send at most {state.limits.report_bytes_max}"
        )
    reports = state.reports_of(node)
    was_complete = reports.complete
    ack = _take_in(reports, request, context.now_s)
    state.instruments.report_messages.labels(_label(request.kind)).inc()
    state.instruments.report_records.inc(len(request.records) // RECORD_BYTES)
    if was_complete and ack.need_full:
        state.instruments.report_gaps.inc()
        log.warning(
            Event.REPORT_GAP, node_id=node.node_id, acked_seq=ack.acked_seq, first_seq=request.first_seq
        )
    if not was_complete and reports.complete:
        state.instruments.full_reports.inc()
        log.info(Event.REPORT_FULL_FINISHED, node_id=node.node_id, acked_seq=ack.acked_seq)
    state.after_report(node, context.now_s)
    return master_pb2.ReportBlocksResponse(
        acked_seq=ack.acked_seq, need_full=ack.need_full, next_part_index=ack.next_part_index
    )


def _take_in(reports: NodeReports, request: master_pb2.ReportBlocksRequest, now_s: float) -> Ack:
    match request.kind:
        case master_pb2.REPORT_KIND_DELTA:
            return reports.delta(request.first_seq, request.last_seq, request.records, now_s)
        case master_pb2.REPORT_KIND_FULL_BEGIN:
            return reports.full_begin(request.report_id, request.last_seq, now_s)
        case master_pb2.REPORT_KIND_FULL_PART:
            return reports.full_part(request.report_id, request.part_index, request.records, now_s)
        case master_pb2.REPORT_KIND_FULL_END:
            return reports.full_end(request.report_id, request.part_index, now_s)
    raise errors.InvalidArgument(f"report kind {request.kind} is not known")


def _label(kind: master_pb2.ReportKind) -> str:
    """The kind as the metric's label has it, for example full_begin."""
    return master_pb2.ReportKind.Name(kind).removeprefix("REPORT_KIND_").lower()
