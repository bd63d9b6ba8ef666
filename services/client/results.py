"""What the client hands back: plain frozen values. Batches carry one stable code for each key.

A miss is not an error: single `get` answers None, batches answer NOT_FOUND, and `raise_for_errors` lets misses pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from mooncache.errors import OK, FewerReplicas, NotFound, error_for

STORED = frozenset({OK, FewerReplicas.code})
"""Codes of a put whose block is in the pool now."""
_NO_FAILURES = STORED | {NotFound.code}
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Outcome of a batch: `codes[i]` is the stable code of key i (0 means done)."""

    codes: tuple[int, ...]
    staged_bytes: int = field(default=0, kw_only=True)
    """Of the bytes that moved between host memory and nodes, those that passed through staging memory, because RDMA
    devices cannot use them where they lie. All others went straight between that memory and the transport."""

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def ok(self) -> bool:
        """True when every key succeeded or was a plain miss."""
        return all(code in _NO_FAILURES for code in self.codes)

    @property
    def errors(self) -> dict[int, int]:
        """Position -> code, for every key that failed. Misses are no failures, nor are blocks with FEWER_REPLICAS."""
        return {i: code for i, code in enumerate(self.codes) if code not in _NO_FAILURES}

    def raise_for_errors(self) -> None:
        """Raise the first failure as its typed error; do nothing when `ok`.

        Raises:
            MooncacheError: the subclass of the first failing code; the text says how many keys failed.
        """
        errors = self.errors
        if errors:
            position, code = next(iter(errors.items()))
            raise error_for(code, f"{len(errors)} of {len(self.codes)} keys failed, the first at {position}.")


@dataclass(frozen=True, slots=True)
class PutResult(BatchResult):
    """Outcome of a batch put. A block that is already there counts as done: equal keys mean equal bytes.

    `codes[i]` is FEWER_REPLICAS for a block that is stored, but in fewer copies than asked for: no failure, so nothing
    is raised for it.
    """

    created: tuple[bool, ...] = ()
    """`created[i]` is False when block i was there before."""
    node_ids: tuple[str, ...] = ()
    """Name of the node that answered for block i; empty when none did."""


@dataclass(frozen=True, slots=True)
class GetResult(BatchResult):
    """Outcome of a batch get into buffers."""

    sizes_bytes: tuple[int, ...] = ()
    """`sizes_bytes[i]` bytes were written to destination i (0 for a miss)."""
    node_ids: tuple[str, ...] = ()
    """Name of the node that served block i; empty for a miss."""

    @property
    def hits(self) -> int:
        """Number of keys that were found."""
        return self.codes.count(OK)


@dataclass(frozen=True, slots=True)
class _Fetched(BatchResult, Generic[Value]):
    """Outcome of a batch get that brings its own memory: `values[i]` is None for a miss or a failure (see `codes`)."""

    values: tuple[Value | None, ...] = ()

    @property
    def hits(self) -> int:
        """Number of keys that were found."""
        return self.codes.count(OK)

    def __iter__(self) -> Iterator[Value | None]:
        return iter(self.values)

    def __getitem__(self, position: int) -> Value | None:
        return self.values[position]


class GetValues(_Fetched[bytes]):
    """Outcome of a batch get that allocates: `values[i]` is None for a miss or a failure (see `codes`)."""

    __slots__ = ()


class GetViews(_Fetched[memoryview]):
    """Outcome of a batch get into memory that the client lends: `values[i]` is None for a miss or a failure."""

    __slots__ = ()


class BlockCopy(NamedTuple):
    """One copy of a block."""

    node_id: str
    tier: str
    """SSD: it is on a disk of the node alone, SHARED: in the shared directory alone; else the node's memory."""


@dataclass(frozen=True, slots=True)
class MatchResult:
    """How much of a key chain the pool holds."""

    leading_blocks: int
    """Number of blocks, from the first one on, that are there without a gap."""
    present: tuple[bool, ...]
    """`present[i]` tells whether block i is there."""
    unreachable_nodes: int = 0
    """Number of nodes that could not be asked: what they hold counts as absent."""
    copies: tuple[tuple[BlockCopy, ...], ...] = ()
    """`copies[i]`: copies of block i, four at most, in the order in which they would be read; empty when it is nowhere.
    Blocks that lie alike share one tuple."""


class Prefetched(NamedTuple):
    """What comes up from disks now, and did not before."""

    blocks: int
    size_bytes: int


class Deviation(NamedTuple):
    """How far blocks of the pool are from what this process computed, and how far they may be."""

    distance: float
    tolerance: float
    dtype: str


class AccusedWriter(NamedTuple):
    """A writer of wrong blocks; `writer_id` 0: of no known writer, or of different ones at different nodes."""

    writer_id: int
    instance: str
    build: str
    quarantined: bool


class WrongBlocks(NamedTuple):
    """What became of wrong blocks: a code for each key (0: no node has it now), and their writers."""

    codes: tuple[int, ...]
    writers: tuple[AccusedWriter, ...]


@dataclass(frozen=True, slots=True)
class BlockStat:
    """One block, as the node holds it from which it would be read."""

    size_bytes: int
    crc32c: int
    tier: str
    pins: int
    hits: int
    age_s: float
    node_ids: tuple[str, ...] = ()
    """Nodes that hold a copy, of those that were asked, in the order in which they would be read."""
    tiers: tuple[str, ...] = ()
    """`tiers[i]` is the tier of the copy on `node_ids[i]`."""


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """One line of a listing: `key` is the 32-byte block key (names given as str are not kept by the pool)."""

    key: bytes
    size_bytes: int
    tier: str
    hits: int
    node_id: str


class WatchState(StrEnum):
    """How far a watch is."""

    MORE = "more"
    """Not the end."""
    ALL = "all"
    """Every key was readable at some moment since the watch began."""
    GIVEN_UP = "given_up"
    """The writer of a missing key will not write it."""
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    """A node that it waited at is gone or refuses it: look again what is there."""


@dataclass(frozen=True, slots=True)
class WatchNews:
    """What one watch has to say; any state but MORE is its end."""

    name: str
    positions: tuple[int, ...]
    """Keys (by position) that became readable and were in no news of this watch before."""
    state: WatchState
    code: int = OK
    """Of an UNREACHABLE watch: why."""


class MapNodeState(StrEnum):
    """State of a store node in the cluster map."""

    ACTIVE = "active"
    SUSPECT = "suspect"
    """Silent for a while: last choice, also for a state that this version does not know."""
    DRAINING = "draining"
    DEAD = "dead"


class BlockTier(StrEnum):
    """Kind of memory that blocks lie in, from the fastest on; the native core numbers them in this order."""

    HBM = "hbm"
    DRAM = "dram"
    SSD = "ssd"
    SHARED = "shared"


BELOW_MEMORY = frozenset({BlockTier.SSD, BlockTier.SHARED})
"""Tiers whose blocks are read from disks or a shared directory before they are sent."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One store node as the client sees it."""

    index: int
    node_id: str
    host_id: str
    incarnation: int
    state: MapNodeState
    tcp_host: str
    tcp_port: int
    unix_path: str
    capacity_bytes: int = 0
    free_bytes: int = 0
    weight: float = 1.0
    grpc_target: str = ""
    tls: bool = False
    software_version: str = ""
    named: bool = True
    """False for a static node given by address only: `node_id` is that address, and its real name is not checked."""
    rails: tuple[str, ...] = ()
    """RDMA ports that the node answers on and that are up, as device:port; none: its bytes go over TCP."""
    tier: str = BlockTier.DRAM
    """Tier of the node's blocks: a value of BlockTier, or "tier-N" of a newer node."""
    arena: str = ""
    """Kind of memory that the blocks lie in: "memory", "gpu", "dax", ...; empty when the node did not say."""
    labels: tuple[tuple[str, str], ...] = ()
    """Where the node is, as (name, value), sorted by name: "zone", "rack" and what else people name."""


class TransportState(StrEnum):
    """Whether a client uses a transport."""

    READY = "ready"
    IDLE = "idle"
    """No node has offered it for a transfer yet."""
    OFF = "off"
    """The configuration says so."""
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class TransportView:
    """A way that blocks may take, as this client sees it."""

    name: str
    """shm, rdma or tcp."""
    state: TransportState
    reason: str
    """Why it is not ready; empty when it is."""


_TIERS = tuple(BlockTier)


def codes_of(answer: Sequence[object]) -> tuple[int, ...]:
    """The code of each item of a native answer: a number that is there in place of what was asked for."""
    return tuple(item if isinstance(item, int) else OK for item in answer)


def tier_name(tier: int) -> str:
    """Name of a native tier number; one that this version does not know goes by its number."""
    return _TIERS[tier] if 0 <= tier < len(_TIERS) else f"tier-{tier}"


def entries_of(items: Iterable[tuple[bytes, int, int, int]], node: str) -> list[BlockEntry]:
    """A page of a node's listing, of the native core's (key, size, tier, hits)."""
    return [BlockEntry(key, size, tier_name(tier), hits, node) for key, size, tier, hits in items]


def block_stat(item: dict[str, Any] | None, node_name: Callable[[int], str]) -> tuple[int, BlockStat | None]:
    """The code and the stat of one key, of the native core's answer."""
    if item is None:
        return NotFound.code, None
    if item["code"] != OK:
        return item["code"], None
    return OK, BlockStat(
        size_bytes=item["size_bytes"],
        crc32c=item["crc32c"],
        tier=tier_name(item["tier"]),
        pins=item["pins"],
        hits=item["hits"],
        age_s=item["age_s"],
        node_ids=tuple(node_name(index) for index, _ in item["copies"]),
        tiers=tuple(tier_name(tier) for _, tier in item["copies"]),
    )


def matched(
    answer: tuple[int, tuple[bool, ...], int, list[list[tuple[int, int]]], list[int]],
    node_name: Callable[[int], str],
) -> MatchResult:
    """The native core's answer with names."""
    run, present, unreachable, places, numbers = answer
    named = [tuple(BlockCopy(node_name(index), tier_name(tier)) for index, tier in place) for place in places]
    return MatchResult(run, present, unreachable, tuple(map(named.__getitem__, numbers)))


def tier_of_message(tier: int) -> str:
    """Name of a tier as messages have it: one more than the native number, because zero means "not said"."""
    return tier_name(tier - 1) if tier else BlockTier.DRAM


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster map that the client works with; `epoch` 0 with static nodes."""

    epoch: int = 0
    term: int = 0
    leader: str = ""
    nodes: tuple[NodeView, ...] = field(default_factory=tuple)

    def node_index(self, node_id: str) -> int | None:
        """Index of the node with this name; None when the map does not list it."""
        return next((node.index for node in self.nodes if node.node_id == node_id), None)

    def node_name(self, index: int | None) -> str:
        """Name of the node with this index; empty when the map does not list it."""
        for node in self.nodes:
            if node.index == index:
                return node.node_id
        return ""
