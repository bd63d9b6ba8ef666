"""An entry of the quarantine comes into force: at this master, and at every node that lives."""

from __future__ import annotations

import asyncio

from mooncache.errors import MooncacheError
from mooncache.master.core.membership import Node
from mooncache.master.messages import fence
from mooncache.master.state import MasterState
from mooncache.proto.v1 import store_node_pb2
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.quarantine import QuarantineEntry
from mooncache.runtime.quarantine_messages import quarantine_message

log = get_logger(__name__)


async def change(state: MasterState, entry: QuarantineEntry) -> list[str]:
    """Take over an entry and give it to the nodes. Returns those that know it; a heartbeat brings it to the others."""
    state.quarantine = state.quarantine.joined([entry])
    event = Event.WRITER_RELEASED if entry.released else Event.WRITER_QUARANTINED
    log.warning(
        event,
        writer=f"{entry.writer_id:016x}",
        instance=entry.instance,
        build=entry.build,
        verifiers=list(entry.verifiers),
        reason=entry.reason,
    )
    table, term = quarantine_message(state.quarantine), state.membership.term

    async def give(node: Node) -> str:
        asked = store_node_pb2.NodeSetQuarantineRequest(table=table, fence=fence(term, node))
        answer = store_node_pb2.NodeSetQuarantineResponse
        try:
            await state.nodes.call(node, "SetQuarantine", asked, answer, state.limits.node_call_timeout_s)
        except MooncacheError:
            return ""
        return node.node_id

    living = [node for node in state.membership.nodes.values() if node.alive]
    return sorted(filter(None, await asyncio.gather(*map(give, living))))
