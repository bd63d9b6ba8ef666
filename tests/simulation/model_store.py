"""A small model of the native store: what its Python service and its clients see of it, in the service's own terms.

It stands for `mooncache._native.StoreServer` (`NodeCore`) and keeps what matters to the control plane: an arena of
extents, a block index, reservations and pins that belong to connections, pins with a time limit, eviction, tenants'
quotas, a bounded event log with sequence numbers, and disks that a restart finds again, or that lie. A block's bytes
are the pair (tenant, key), so wrong bytes are seen at once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mooncache import errors
from mooncache.auth import DEFAULT_TENANT, tenant_id
from mooncache.kvcache.block_index import ADD, BLOCK_RECORD, REMOVE, TIER_DRAM

BLOCK_BYTES = 4096
Bytes = tuple[int, bytes] | None
"""Content of an extent: the block that was written there last."""
BlockName = tuple[int, bytes]
DRAINED = 4
TENANTS = (DEFAULT_TENANT, "acme")


@dataclass(slots=True)
class Held:
    """A committed block."""

    extent: int
    pins: Counter[str] = field(default_factory=Counter)  # by connection
    pinned_until_s: float = 0.0


def record(kind: int, name: BlockName) -> bytes:
    return BLOCK_RECORD.pack(kind, TIER_DRAM, 0, 0, 0, name[0], BLOCK_BYTES, name[1])


class ModelStore:
    """One life of a node's store. `lost` hears of each block that goes, with the reason."""

    def __init__(
        self,
        extents: int,
        log_events: int,
        now_s: Callable[[], float],
        lost: Callable[[BlockName, str], None],
        quotas: dict[int, int],
    ) -> None:
        self._now_s, self._lost, self._log_max = now_s, lost, log_events
        self.arena: list[Bytes] = [None] * extents
        self.free = list(range(extents - 1, -1, -1))
        self.held: OrderedDict[BlockName, Held] = OrderedDict()
        self.reserved: dict[tuple[str, BlockName], int] = {}
        self.quotas = quotas  # tenant -> blocks
        self.used: Counter[int] = Counter()  # tenant -> blocks, reservations included
        self.names = {tenant_id(name): name for name in TENANTS}
        self.log: deque[bytes] = deque()
        self.seq = 0
        self.overflow = False
        self.is_draining = False
        self.closed: set[str] = set()  # connections that have ended
        self._read_by: dict[str, list[Held]] = {}  # connection -> blocks that it has pinned

    # --- NodeCore

    def stats(self) -> dict[str, int]:
        return {
            "store_capacity_bytes": len(self.arena) * BLOCK_BYTES,
            "store_used_bytes": len(self.held) * BLOCK_BYTES,
            "store_pinned_bytes": 0,
            "store_blocks": len(self.held),
        }

    def tenants(self) -> dict[int, str]:
        return self.names

    def event_seq(self) -> int:
        return self.seq

    def rails(self) -> list[dict[str, Any]]:
        return []

    def drain_events(self, max_events: int, /) -> tuple[int, int, bool, bytes]:
        first = self.seq - len(self.log) + 1
        taken = [self.log.popleft() for _ in range(min(max_events, len(self.log)))]
        overflow, self.overflow = self.overflow, False
        return first, first + len(taken) - 1, overflow, b"".join(taken)

    def snapshot(self, cursor: int, max_records: int, /) -> tuple[int, bytes]:
        # In the order of extents, as a block that stays keeps its own: no block is passed over when others go.
        left = sorted((held.extent, name) for name, held in self.held.items() if held.extent >= cursor)
        page = left[:max_records]
        more = len(left) > len(page)
        return (page[-1][0] + 1 if more else 0), b"".join(record(ADD, name) for _, name in page)

    def set_draining(self, draining: bool, /) -> None:
        self.is_draining = draining

    def remove(self, tenant: int, keys: bytes, reason: int, /) -> list[int]:
        return [
            self._remove_one((tenant, key), "drained" if reason == DRAINED else "removed")
            for key in split(keys)
        ]

    def pin(self, tenant: int, keys: bytes, ttl_ms: int, /) -> list[int]:
        codes = []
        for key in split(keys):
            held = self.held.get((tenant, key))
            codes.append(errors.OK if held else errors.NotFound.code)
            if held:  # a repeat sets a new end, earlier or later
                held.pinned_until_s = self._now_s() + ttl_ms / 1e3
        return codes

    def unpin(self, tenant: int, keys: bytes, /) -> list[int]:
        codes = []
        for key in split(keys):
            held = self.held.get((tenant, key))
            codes.append(errors.OK if held else errors.NotFound.code)
            if held:
                held.pinned_until_s = 0.0
        return codes

    # --- what clients do over the data plane; `line` is the connection

    def reserve(self, line: str, name: BlockName) -> bool:
        """Room for a block; False when it is there already. Raises Draining, QuotaExceeded, NoSpace, ConnectionLost."""
        self._check(line)
        if name in self.held:
            return False
        if self.is_draining:
            raise errors.Draining("The node is draining.")
        if (line, name) in self.reserved:
            return True
        if self.used[name[0]] >= self.quotas.get(name[0], 1 << 30) and not self._evict(name[0]):
            raise errors.QuotaExceeded("The tenant has as much as it may have.")
        if not self.free and not self._evict():
            raise errors.NoSpace("Everything is pinned.")
        self.reserved[line, name] = self.free.pop()
        self.used[name[0]] += 1
        return True

    def write(self, line: str, name: BlockName, data: Bytes) -> None:
        """Fill a reservation. Raises ReservationUnknown."""
        self._check(line)
        if (line, name) not in self.reserved:
            raise errors.ReservationUnknown("There is no such reservation.")
        self.arena[self.reserved[line, name]] = data

    def commit(self, line: str, name: BlockName) -> None:
        """Make it visible. Raises ReservationUnknown."""
        self._check(line)
        extent = self.reserved.pop((line, name), None)
        if extent is None:
            raise errors.ReservationUnknown("There is no such reservation.")
        if name in self.held:  # another writer was first
            self._give_back(name, extent)
            return
        self.held[name] = Held(extent)
        self._note(ADD, name)

    def begin_read(self, line: str, name: BlockName) -> int:
        """Pin a block for a connection, and say where it lies. Raises NotFound."""
        self._check(line)
        held = self.held.get(name)
        if held is None:
            raise errors.NotFound("The block is not here.")
        held.pins[line] += 1  # until the connection gives it back, or ends
        self._read_by.setdefault(line, []).append(held)
        return held.extent

    def read(self, line: str, extent: int) -> Bytes:
        """The bytes of an extent."""
        self._check(line)
        return self.arena[extent]

    def quarantine(self, name: BlockName) -> None:
        """A reader found other bytes than the checksum's."""
        if name in self.held:
            self._drop(name, "corrupt")

    def close_line(self, line: str) -> None:
        """A connection has ended: what it held is released, and a late message of it is refused."""
        self.closed.add(line)
        for key in [key for key in self.reserved if key[0] == line]:
            self._give_back(key[1], self.reserved.pop(key))
        for held in self._read_by.pop(line, ()):
            held.pins.pop(line, None)

    def close_lines(self, client: str) -> None:
        """A client's process has died: all of its connections end."""
        lines = {key[0] for key in self.reserved} | {
            line for held in self.held.values() for line in held.pins
        }
        for line in sorted(lines):
            if line.partition("#")[0].partition("!")[0] == client:
                self.close_line(line)

    # --- for itself

    def adopt(self, name: BlockName, data: Bytes) -> None:
        """A block that a disk, or kept memory, brought over a restart."""
        if self.free and name not in self.held:
            extent = self.free.pop()
            self.arena[extent] = data
            self.held[name] = Held(extent)
            self.used[name[0]] += 1
            self._note(ADD, name)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        extents = [held.extent for held in self.held.values()] + list(self.reserved.values()) + self.free
        assert sorted(extents) == list(range(len(self.arena))), "an extent is in use twice, or lost"
        counted: Counter[int] = Counter()
        for name in [*self.held, *(key[1] for key in self.reserved)]:
            counted[name[0]] += 1
        assert counted == +self.used, "a tenant's use is counted wrongly"
        for tenant, blocks in self.quotas.items():
            assert 0 <= self.used[tenant] <= blocks, (
                f"tenant {tenant} holds {self.used[tenant]} of {blocks} blocks"
            )

    def is_pinned(self, name: BlockName) -> bool:
        """Whether a block may not be evicted now."""
        held = self.held[name]
        return any(held.pins.values()) or held.pinned_until_s > self._now_s()

    def _check(self, line: str) -> None:
        if line in self.closed:
            raise errors.ConnectionLost("The connection has ended.")

    def _remove_one(self, name: BlockName, reason: str) -> int:
        if name not in self.held:
            return errors.NotFound.code
        if self.is_pinned(name):
            return errors.Pinned.code
        self._drop(name, reason)
        return errors.OK

    def _evict(self, tenant: int | None = None) -> bool:
        for name in self.held:
            if (tenant is None or name[0] == tenant) and not self.is_pinned(name):
                self._drop(name, "evicted")
                return True
        return False

    def _drop(self, name: BlockName, reason: str) -> None:
        held = self.held.pop(name)
        self._give_back(name, held.extent)
        self._note(REMOVE, name)
        self._lost(name, reason)

    def _give_back(self, name: BlockName, extent: int) -> None:
        self.free.append(extent)
        self.used[name[0]] -= 1

    def _note(self, kind: int, name: BlockName) -> None:
        self.seq += 1
        self.log.append(record(kind, name))
        if len(self.log) > self._log_max:
            self.log.popleft()
            self.overflow = True


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + 32] for at in range(0, len(keys), 32)]


def short_name(name: object) -> str:
    """A block's name as it is reported."""
    return f"{name[0] % 1000}/{name[1].hex()[:8]}" if isinstance(name, tuple) else repr(name)
