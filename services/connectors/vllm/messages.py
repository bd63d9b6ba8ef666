"""What the connector's two halves tell each other. vLLM carries it: once per step in each direction."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from mooncache.connectors.vllm.core.book import Transfer


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Worker to scheduler, once: the passport of the worker's shard and the bytes of its part of a block."""

    passport: str
    block_bytes: int


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, each step.

    idle: the step computes nothing, so waiting a moment for a transfer costs nothing. pinned: saved blocks stay as they
    are until the save is reported; without it the worker has to finish saves within the step.
    """

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    idle: bool = False
    pinned: bool = True


@dataclass
class LoadEnd:
    """One shard's end of a load; merged over shards the worst counts. `shards` counts the reports merged so far."""

    loaded: int
    loaded_bytes: int
    seconds: float
    reason: str
    shards: int = 1


@dataclass
class SaveEnd:
    """One shard's end of a save: positions that the pool holds. `shards` counts the reports merged so far."""

    stored: frozenset[int]
    shards: int = 1


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler: what ended. Merged over shards by vLLM with `aggregate`."""

    loads: dict[str, LoadEnd] = field(default_factory=dict)
    saves: dict[str, SaveEnd] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        loads, saves = dict(self.loads), dict(self.saves)
        for name, load in other.loads.items():
            loads[name] = merge_loads(loads[name], load) if name in loads else load
        for name, save in other.saves.items():
            saves[name] = merge_saves(saves[name], save) if name in saves else save
        return StepReport(loads, saves)


def merge_loads(a: LoadEnd, b: LoadEnd) -> LoadEnd:
    """A block is loaded when every shard has its part."""
    return LoadEnd(
        min(a.loaded, b.loaded),
        a.loaded_bytes + b.loaded_bytes,
        max(a.seconds, b.seconds),
        a.reason or b.reason,
        a.shards + b.shards,
    )


def merge_saves(a: SaveEnd, b: SaveEnd) -> SaveEnd:
    """A block is saved when every shard's part is."""
    return SaveEnd(a.stored & b.stored, a.shards + b.shards)
