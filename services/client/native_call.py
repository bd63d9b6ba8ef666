"""Calls into the native core, with what it refuses as typed errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mooncache.client.results import ClusterView, MapNodeState
from mooncache.errors import InvalidArgument, error_for

P = ParamSpec("P")
T = TypeVar("T")


def call_native(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the native core and type what it refuses: ValueError(sentence), RuntimeError(code, name, message)."""
    try:
        return call(*args, **kwargs)
    except ValueError as error:
        raise InvalidArgument(_sentence(str(error))) from None
    except RuntimeError as error:
        if len(error.args) != 3 or not isinstance(error.args[0], int):
            raise
        code, _, message = error.args
        raise error_for(code, _sentence(message)) from None


def map_rows(view: ClusterView) -> list[dict[str, object]]:
    """The nodes of a cluster map as the native core wants them."""
    return [
        {
            "index": node.index,
            "node_id": node.node_id if node.named else "",
            "host_id": node.host_id,
            "incarnation": node.incarnation,
            "tcp_host": node.tcp_host,
            "tcp_port": node.tcp_port,
            "unix_path": node.unix_path,
            "free_bytes": node.free_bytes,
            "weight": node.weight,
            "state": str(node.state),
            "arena": node.arena,
            "rdma": bool(node.rails),
        }
        for node in view.nodes
        if node.state != MapNodeState.DEAD
    ]


def _sentence(text: str) -> str:
    """Native messages begin small and end open; people read sentences."""
    text = text.strip()
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
