"""GetWorkerStatus: what the worker and its engine are doing."""

from __future__ import annotations

from mooncache.kvcache.instance_messages import load_message
from mooncache.proto.v1 import worker_pb2 as pb
from mooncache.runtime.rpc import CallContext
from mooncache.worker.state import WorkerState


async def handle(
    state: WorkerState, request: pb.GetWorkerStatusRequest, context: CallContext
) -> pb.GetWorkerStatusResponse:
    return pb.GetWorkerStatusResponse(
        instance=state.instance(),
        load=load_message(state.load),
        engine_pid=state.process.pid if state.process is not None and state.process.exited is None else 0,
        engine_starts=state.supervision.starts,
        doing=state.doing,
        events_seen=state.stream.seen,
        events_lost=state.stream.lost,
        events_replayed=state.stream.replayed,
    )
