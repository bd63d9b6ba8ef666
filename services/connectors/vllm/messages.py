"""What the connector's two halves tell each other. vLLM carries it: once per step in each direction."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from mooncache.connectors.vllm.core.refusals import PoolRefusal
from mooncache.connectors.vllm.core.request import BlockTransfer, PoolQuery
from mooncache.kvcache.core.weighing import ShardLoad
from mooncache.kvcache.lookup import TIMEOUT_S, LookupRequest
from mooncache.kvcache.transfers import MoveFailure
from mooncache.runtime.tracing import TRACEPARENT


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Worker to scheduler, once."""

    passports: tuple[str, ...]  # by its files, of what the worker has: each group of KV cache, or each part
    block_bytes: int  # that it saves of a block, of all groups together; 0: another worker has the same
    weights: str  # fingerprint of what lies in its memory
    facts: dict[str, object]  # what else goes into the hand-over file
    verifies: bool = False  # it can compare what it computed with the pool's blocks
    as_loaded: str = ""  # the fingerprint as long as the files say what the weights are; "": they need not
    refusal: PoolRefusal | None = (
        None  # why this worker does not take part; the other fields say nothing then
    )


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, each step."""

    loads: list[BlockTransfer] = field(default_factory=list)
    saves: list[BlockTransfer] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    idle: bool = False
    """The step computes nothing, so waiting a moment for a transfer costs nothing."""
    pinned: bool = True
    """Saved blocks stay as they are until the save is reported. Without it the worker has to finish saves within the
    step."""
    weights: tuple[str, ...] = ()
    """For each shard the fingerprint that the orders' keys were made for. A worker with others in its memory does not
    carry them out."""
    step: int = 0
    """Number of a step that is measured, which comes back with its report; 0: it is not."""


@dataclass
class LoadEnd:
    """One shard's end of a load; merged over shards the worst counts. `shards` counts the reports merged so far."""

    loaded: int
    loaded_bytes: int
    seconds: float  # of moving bytes
    reason: MoveFailure
    shards: int = 1
    waited_s: float = 0.0  # for blocks of another instance
    hidden_s: float = 0.0  # of `seconds`, within that wait
    by_shard: dict[int, ShardLoad] = field(default_factory=dict)
    staged_bytes: int = 0  # of `loaded_bytes`


@dataclass
class SaveEnd:
    """One shard's end of a save: positions that the pool holds. `shards` counts the reports merged so far."""

    stored: frozenset[int]
    shards: int = 1


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler: what ended, and by shard the fingerprint of weights that the scheduler did not know.

    `step` is the number of the step, if it is measured.
    Merged over shards by vLLM with `aggregate`.
    """

    loads: dict[str, LoadEnd] = field(default_factory=dict)
    saves: dict[str, SaveEnd] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)
    step: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        loads, saves = dict(self.loads), dict(self.saves)
        for name, load in other.loads.items():
            loads[name] = merge_loads(loads[name], load) if name in loads else load
        for name, save in other.saves.items():
            saves[name] = merge_saves(saves[name], save) if name in saves else save
        return StepReport(loads, saves, self.weights | other.weights, max(self.step, other.step))


def merge_loads(a: LoadEnd, b: LoadEnd) -> LoadEnd:
    """A block is loaded when every shard has its part. Of two reasons the one holds that ended the load sooner."""
    sooner, later = (b, a) if b.reason and (b.loaded < a.loaded or not a.reason) else (a, b)
    return LoadEnd(
        min(a.loaded, b.loaded),
        a.loaded_bytes + b.loaded_bytes,
        max(a.seconds, b.seconds),
        sooner.reason or later.reason,
        a.shards + b.shards,
        max(a.waited_s, b.waited_s),
        min(a.hidden_s, b.hidden_s),
        a.by_shard | b.by_shard,
        a.staged_bytes + b.staged_bytes,
    )


def merge_saves(a: SaveEnd, b: SaveEnd) -> SaveEnd:
    """A block is saved when every shard's part is."""
    return SaveEnd(a.stored & b.stored, a.shards + b.shards)


def lookup_of(query: PoolQuery, *, with_places: bool) -> LookupRequest:
    """The book's question as the thread that asks takes it."""
    return LookupRequest(
        query.request_id,
        query.keys,
        query.awaited,
        query.deadline_s,
        node=query.node,
        limit_s=TIMEOUT_S if query.limit_s is None else query.limit_s,
        with_places=with_places,
        session_token=query.session_token,
    )


def traced(transfer: BlockTransfer, request: object) -> BlockTransfer:
    """The order with the request's trace, which vLLM keeps when it records traces itself."""
    headers = getattr(request, "trace_headers", None)
    return replace(transfer, traceparent=headers.get(TRACEPARENT, "")) if headers else transfer
