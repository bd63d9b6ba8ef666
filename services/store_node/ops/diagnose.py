"""Diagnose: what the node's host is like, and which other nodes it reaches.

Each peer is tried over both ports as work would be: a control call with a proof of the token, and a round trip
through the native client. All are tried at once, each within its time, so that a dead one holds nothing up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final

from mooncache.errors import DeadlineExceeded, InvalidArgument, MooncacheError
from mooncache.proto.v1 import common_pb2
from mooncache.proto.v1 import store_node_pb2 as pb
from mooncache.runtime.rpc import CallContext
from mooncache.store_node.state import StoreNodeState
from mooncache.topology.core.host_facts import to_json

PEERS_MAX: Final = 256
_TIMEOUT_MS_MAX: Final = 10_000
_ANSWER_S: Final = 0.5  # of the caller's time, kept for the answer


async def handle(
    state: StoreNodeState, request: pb.DiagnoseRequest, context: CallContext
) -> pb.DiagnoseResponse:
    """Raises InvalidArgument for too many peers, Unsupported for a node that cannot try them (as in simulations)."""
    if len(request.peers) > PEERS_MAX:
        raise InvalidArgument(f"At most {PEERS_MAX} peers; got {len(request.peers)}.")
    surroundings = state.require_surroundings()
    asked_ms = request.timeout_ms or _TIMEOUT_MS_MAX
    timeout_s = min(asked_ms, _TIMEOUT_MS_MAX) / 1e3
    timeout_s = max(0.1, min(timeout_s, context.timeout_s - _ANSWER_S))

    async def reach(peer: common_pb2.NodeInfo) -> pb.PeerReach:
        found = pb.PeerReach(node_id=peer.node_id)
        control, data = await asyncio.gather(
            _outcome(surroundings.call(peer, timeout_s), timeout_s),
            _outcome(surroundings.ping(peer, timeout_s), timeout_s),
        )
        if isinstance(control, MooncacheError):
            found.control_code, found.control_message = control.code, control.message
        if isinstance(data, MooncacheError):
            found.data_code, found.data_message = data.code, data.message
        else:
            found.data_ms = data * 1e3
        return found

    describing = asyncio.create_task(asyncio.to_thread(surroundings.describe))
    reached = await asyncio.gather(*(reach(peer) for peer in request.peers))
    description = await describing
    return pb.DiagnoseResponse(
        node_id=state.identity.node_id,
        host_json=to_json(description),
        peers=reached,
    )


async def _outcome(trial: Awaitable[float], timeout_s: float) -> float | MooncacheError:
    """What came of one trial: seconds, or why not; it ends in time also where a library does not."""
    try:
        async with asyncio.timeout(timeout_s + _ANSWER_S / 2):
            return await trial
    except TimeoutError:
        return DeadlineExceeded(f"It did not answer within {timeout_s:g} s.")
    except MooncacheError as error:
        return error
