"""ListHotPrefixes: which blocks of the pool are read most, and how many copies of them were ordered."""

from __future__ import annotations

from typing import Final

from mooncache.conductor.core.hot_prefixes import HotPrefix
from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CallContext

COUNT_MAX: Final = 256


async def handle(
    state: ConductorState, request: pb.ListHotPrefixesRequest, context: CallContext
) -> pb.ListHotPrefixesResponse:
    """The hottest, or the named one with its keys. A standby answers, too: it counts what the leader tells it."""
    answer = pb.ListHotPrefixesResponse(counted=state.hot.counts)
    if request.name:
        found = state.hot.find(request.name, context.now_s)
        if found is not None:
            prefix, keys = found
            answer.prefixes.append(_message(prefix))
            answer.prefixes[0].keys = keys
        return answer
    count = min(request.count or COUNT_MAX, COUNT_MAX)
    answer.prefixes.extend(_message(prefix) for prefix in state.hot.hottest(count, context.now_s))
    return answer


def _message(prefix: HotPrefix) -> pb.HotPrefix:
    return pb.HotPrefix(
        name=prefix.name,
        parent=prefix.parent,
        model=prefix.model,
        pool_tenant=prefix.pool_tenant,
        first_block=prefix.begin,
        block_count=prefix.blocks,
        tokens=prefix.tokens,
        reads=prefix.reads,
        copies=prefix.copies,
        hosts=prefix.hosts,
    )
