"""One wish for many keys, sent to every node that holds them.

One call for each node, codes merged for each key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from mooncache import errors
from mooncache.master.core.membership import Node
from mooncache.master.messages import fence
from mooncache.master.state import MasterState
from mooncache.proto.v1 import store_node_pb2
from mooncache.runtime.rpc import CallContext

KeysRequest = (
    store_node_pb2.CopyBlocksRequest
    | store_node_pb2.DropBlocksRequest
    | store_node_pb2.NodePinBlocksRequest
    | store_node_pb2.NodeUnpinBlocksRequest
)
KeysResponse = (
    store_node_pb2.CopyBlocksResponse
    | store_node_pb2.DropBlocksResponse
    | store_node_pb2.NodePinBlocksResponse
    | store_node_pb2.NodeUnpinBlocksResponse
)
_RESPONSES: Final[dict[str, type[KeysResponse]]] = {
    "CopyBlocks": store_node_pb2.CopyBlocksResponse,
    "DropBlocks": store_node_pb2.DropBlocksResponse,
    "PinBlocks": store_node_pb2.NodePinBlocksResponse,
    "UnpinBlocks": store_node_pb2.NodeUnpinBlocksResponse,
}


async def to_holders(
    state: MasterState,
    method: str,
    tenant_id: int,
    keys: Sequence[bytes],
    make_request: Callable[[bytes], KeysRequest],
    context: CallContext,
    beside: Sequence[Sequence[int]] = (),
) -> list[list[int]]:
    """Call `method` on every living holder with its keys; return for each key the codes of its holders.

    `beside` has for each key nodes to ask that the directory may not know of. A node that does not answer contributes
    its error's code. A key that no node holds gets an empty list.
    """
    positions: dict[int, list[int]] = {}
    for position, holders in enumerate(state.holders(tenant_id, keys)):
        for holder in {*holders, *(beside[position] if beside else ())}:
            positions.setdefault(holder, []).append(position)
    term = state.membership.term
    timeout_s = min(state.limits.node_call_timeout_s, max(0.0, context.deadline_s - state.clock.now_s()))
    members = [(state.membership.by_index(holder), where) for holder, where in positions.items()]
    living = [(node, where) for node, where in members if node is not None and node.alive]

    async def ask(node: Node, where: list[int]) -> list[int]:
        request = make_request(b"".join(keys[position] for position in where))
        return await ask_node(state, node, method, request, len(where), timeout_s, term)

    answers = await asyncio.gather(*(ask(node, where) for node, where in living))
    merged: list[list[int]] = [[] for _ in keys]
    for (_, where), codes in zip(living, answers, strict=True):
        for position, code in zip(where, codes, strict=True):
            merged[position].append(code)
    return merged


async def ask_node(
    state: MasterState, node: Node, method: str, request: KeysRequest, count: int, timeout_s: float, term: int
) -> list[int]:
    """A code for each of the request's `count` keys; a node that does not answer gives its error's code.

    `term` is the one under which it was decided what to ask.
    """
    request.fence.CopyFrom(fence(term, node))
    try:
        response = await state.nodes.call(node, method, request, _RESPONSES[method], timeout_s)
    except errors.MooncacheError as error:
        return [error.code] * count
    codes = list(response.codes)
    return codes if len(codes) == count else [errors.ProtocolError.code] * count


def any_ok(codes: Sequence[int]) -> int:
    """OK when one holder did it, otherwise the first refusal; NOT_FOUND without holders."""
    if not codes:
        return errors.NotFound.code
    return errors.OK if errors.OK in codes else codes[0]


def all_gone(codes: Sequence[int]) -> int:
    """OK when no holder still has it, otherwise the first refusal; NOT_FOUND without holders."""
    gone = (errors.OK, errors.NotFound.code)
    return next((code for code in codes if code not in gone), errors.OK if codes else errors.NotFound.code)
