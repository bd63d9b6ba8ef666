"""ReportWrongBlocks: an engine computed other blocks than the pool holds.

The blocks go from every node, whoever is right: they are computed again. Their writers are what the nodes say; where
two nodes name different ones, none is accused, because it is not known whose copy the engine read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from mooncache import errors
from mooncache.client.keys import split_keys
from mooncache.master.core.membership import Node
from mooncache.master.messages import tenant_of
from mooncache.master.shell.fan_out import all_gone, ask_node
from mooncache.master.shell.quarantining import change
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2, store_node_pb2
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.quarantine import QuarantineEntry
from mooncache.runtime.rpc import CallContext

KEYS_MAX: Final = 256
_SHOWN_MAX: Final = 4
"""Keys in a line of the log."""
_UNKNOWN: Final = (0, "", "")

log = get_logger(__name__)
Writer = tuple[int, str, str]


async def handle(
    state: MasterState, request: master_pb2.ReportWrongBlocksRequest, context: CallContext
) -> master_pb2.ReportWrongBlocksResponse:
    """Remove the blocks and hear the verifier. Raises NotLeader, InvalidArgument, TooLarge, PermissionDenied."""
    state.require_leading()
    name, tenant = tenant_of(request.tenant, context)
    keys = split_keys(request.keys, KEYS_MAX)
    if not request.verifier_id or not request.verifier:
        raise errors.InvalidArgument("verifier and verifier_id must say who computed the blocks.")
    nodes = _holders(state, tenant, keys)
    answers = await asyncio.gather(*(_origins(state, node, name, keys) for node in nodes))
    writers = [_one([each[at] for each in answers]) for at in range(len(keys))]
    term, timeout_s = state.membership.term, state.limits.node_call_timeout_s

    async def drop(node: Node) -> list[int]:
        asked = store_node_pb2.DropBlocksRequest(
            tenant_id=tenant, keys=request.keys, reason=store_node_pb2.DROP_REASON_REMOVED
        )
        return await ask_node(state, node, "DropBlocks", asked, len(keys), timeout_s, term)

    gone = await asyncio.gather(*map(drop, nodes))
    codes = [all_gone([each[at] for each in gone]) for at in range(len(keys))]
    state.instruments.wrong_blocks.inc(len(keys))
    accused = [
        await _accuse(
            state, request, writer, [key for key, by in zip(keys, writers, strict=True) if by == writer]
        )
        for writer in dict.fromkeys(writers)
    ]
    return master_pb2.ReportWrongBlocksResponse(codes=codes, writers=accused)


def _holders(state: MasterState, tenant: int, keys: Sequence[bytes]) -> list[Node]:
    """Nodes that hold one of the blocks; all that live when the directory does not know of any yet."""
    held = {index for holders in state.holders(tenant, keys) for index in holders}
    living = [node for node in state.membership.nodes.values() if node.alive]
    return [node for node in living if node.index in held] or living


async def _origins(state: MasterState, node: Node, tenant: str, keys: Sequence[bytes]) -> list[Writer | None]:
    """Of each block who wrote what the node has of it; None: it has none, or did not say."""
    asked = store_node_pb2.GetWritersRequest(tenant=tenant, keys=b"".join(keys))
    try:
        answer = await state.nodes.call(
            node, "GetWriters", asked, store_node_pb2.GetWritersResponse, state.limits.node_call_timeout_s
        )
    except errors.MooncacheError:
        return [None] * len(keys)
    names = {row.writer_id: (row.writer_id, row.instance, row.build) for row in answer.writers}
    found: list[Writer | None] = [
        names.get(origin.writer_id, (origin.writer_id, "", "")) if origin.writer_id else None
        for origin in answer.origins
    ]
    return found if len(found) == len(keys) else [None] * len(keys)


def _one(said: Sequence[Writer | None]) -> Writer:
    """The writer that all nodes name who know one."""
    known = {writer[0]: writer for writer in said if writer is not None}
    return next(iter(known.values())) if len(known) == 1 else _UNKNOWN


async def _accuse(
    state: MasterState, request: master_pb2.ReportWrongBlocksRequest, writer: Writer, keys: Sequence[bytes]
) -> master_pb2.AccusedWriter:
    number, instance, build = writer
    log.warning(
        Event.BLOCKS_WRONG,
        writer=f"{number:016x}" if number else "",
        instance=instance,
        verifier=request.verifier,
        keys=[key.hex() for key in keys[:_SHOWN_MAX]],
        blocks=len(keys),
        dtype=request.dtype,
        distance=request.distance,
        tolerance=request.tolerance,
    )
    verifiers: tuple[str, ...] = ()
    if number:
        verifiers = state.accusations.accuse(number, request.verifier, request.verifier_id, state.quarantine)
    if verifiers:
        found = f"{len(keys)} blocks differ by {request.distance:.3g}"
        values = {
            "writer_id": number,
            "changed_wall_ms": state.next_change_ms(number),
            "instance": instance,
            "build": build,
            "verifiers": verifiers,
            "reason": f"{found}, {request.tolerance:.3g} is allowed ({request.dtype})",
        }
        state.instruments.quarantines.inc()
        await change(state, QuarantineEntry.checked(values))
    return master_pb2.AccusedWriter(
        writer_id=number, instance=instance, build=build, quarantined=number in state.quarantine.quarantined
    )
