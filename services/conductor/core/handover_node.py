"""Through which store node a prefill leg hands its blocks to the decode leg.

By itself a put goes to the node on the writer's host, and decode would load over the network what could lie in the
memory of its own host. So a plan names a node on the decode instance's host: prefill writes there first, decode waits
there, with one call in a cluster of any size. On a host with both legs placement finds the same node; it is named all
the same, because a leg that knows no node has to wait at all of them.

Blocks that another request is making come through that request's node, and are not written a second time. A leg that
waited at another node would not hear of them, so both requests name one node or this one names none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from mooncache import _native
from mooncache.client.keys import KEY_BYTES
from mooncache.client.native_call import map_rows
from mooncache.client.results import ClusterView, MapNodeState, NodeView
from mooncache.conductor.core.in_flight import InFlight
from mooncache.conductor.core.policy.types import Awaited

NodesByHost = Mapping[str, Sequence[NodeView]]

NO_NODE: Final = ""
_GPU_ARENA: Final = "gpu"


def by_host(nodes: Iterable[NodeView]) -> NodesByHost:
    """The nodes through which instances of a host may hand over, by host.

    GPU memory is left out: placement gives its node no more of its host's blocks than of others.
    """
    found: dict[str, list[NodeView]] = {}
    for node in nodes:
        if node.host_id and node.named and node.arena != _GPU_ARENA and node.state != MapNodeState.DEAD:
            found.setdefault(node.host_id, []).append(node)
    return found


def handover_node(
    nodes: NodesByHost,
    host_id: str,
    keys: bytes,
    *,
    kept: str = NO_NODE,
    others: Iterable[str] = (),
) -> str:
    """The id of the node on the decode instance's host, NO_NODE without one that takes new blocks.

    Several nodes of a host share the requests as placement would share blocks.

    Args:
        host_id: of the decode instance.
        keys: packed keys of the prompt.
        kept: the node of the former plan, at which a decode leg waits already.
        others: the nodes of the requests that are making leading blocks of this prompt, NO_NODE for one without.
    """
    there = nodes.get(host_id, ()) if host_id else ()
    if not there or not keys:
        return NO_NODE
    rows = map_rows(ClusterView(nodes=tuple(there)))
    ranked = [there[at].node_id for at in _native.place(keys[-KEY_BYTES:], rows, host_id, len(there))]
    if not ranked:
        return NO_NODE
    if kept in ranked:
        return kept
    theirs = set(others)
    if not theirs:
        return ranked[0]
    common = theirs.pop()
    return common if not theirs and common in ranked else NO_NODE


def nodes_of_makers(
    awaited: Iterable[Awaited], in_flight: InFlight, pool_tokens: int, block_tokens: int
) -> list[str]:
    """The nodes of the requests that are making leading blocks of a prompt which the pool does not have yet.

    Args:
        awaited: leading tokens that the prompt shares with running requests.
        pool_tokens: leading tokens that the pool has.
    """
    found = []
    for each in awaited:
        running = in_flight.get(each.decision_id)
        if running is not None and each.tokens > max(pool_tokens, running.begin * block_tokens):
            found.append(running.store_node)
    return found
