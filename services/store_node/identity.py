"""Who a store node is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Who the node is. `incarnation` is drawn at every start: a new one means that the memory is new."""

    node_id: str
    host_id: str
    incarnation: int
    software_version: str
    started_wall_ms: int
    labels: Mapping[str, str] = field(default_factory=dict)
    host_name: str = ""
    pid: int = 0
