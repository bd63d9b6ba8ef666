"""A slow, obvious block index: the reference beside the native one, and what simulations run on."""

from __future__ import annotations

import struct
from collections.abc import Sequence

RECORD = struct.Struct("<BBBBIQQ32s")
ADD, REMOVE, MOVE = 1, 2, 3
DRAM = 1
NO_DOMAIN = 0xFFFF
AUDIT = struct.Struct("<Q32sQHBB")


def record(kind: int, tenant_id: int, key: bytes, size_bytes: int = 4096, tier: int = DRAM) -> bytes:
    return RECORD.pack(kind, tier, 0, 0, 0, tenant_id, size_bytes, key)


class ModelIndex:
    """holder -> {(tenant, key): (tier, size)}; marks as a set of what a full report has not named yet."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[tuple[int, bytes], tuple[int, int]]] = {}
        self.unseen: dict[int, set[tuple[int, bytes]]] = {}

    def apply(self, holder: int, records: bytes) -> None:
        mine = self.blocks.setdefault(holder, {})
        for kind, tier, _, _, _, tenant_id, size_bytes, key in RECORD.iter_unpack(records):
            block = (tenant_id, key)
            self.unseen.get(holder, set()).discard(block)
            if kind == REMOVE:
                mine.pop(block, None)
            else:
                mine[block] = (tier, size_bytes)

    def begin_full(self, holder: int) -> None:
        self.unseen[holder] = set(self.blocks.get(holder, {}))

    def end_full(self, holder: int) -> int:
        gone = self.unseen.pop(holder, set())
        for block in gone:
            self.blocks[holder].pop(block, None)
        return len(gone)

    def drop_holder(self, holder: int) -> int:
        self.unseen.pop(holder, None)
        return len(self.blocks.pop(holder, {}))

    def locate(self, tenant_id: int, keys: bytes) -> bytes:
        out = bytearray()
        for at in range(0, len(keys), 32):
            block = (tenant_id, keys[at : at + 32])
            found = [(holder, mine[block]) for holder, mine in sorted(self.blocks.items()) if block in mine]
            out += struct.pack("<H", len(found))
            for holder, (tier, size_bytes) in found:
                out += struct.pack("<HBBQ", holder, tier, 0, size_bytes)
        return bytes(out)

    def present(self, tenant_id: int, keys: bytes) -> bytes:
        held = {block for mine in self.blocks.values() for block in mine}
        bits = sum(1 << n for n in range(len(keys) // 32) if (tenant_id, keys[n * 32 : n * 32 + 32]) in held)
        return bits.to_bytes((len(keys) // 32 + 7) // 8, "little")

    def match(self, tenant_id: int, keys: bytes) -> list[tuple[int, int]]:
        chain = [(tenant_id, keys[at : at + 32]) for at in range(0, len(keys), 32)]
        runs = []
        for holder, mine in sorted(self.blocks.items()):
            leading = next((n for n, block in enumerate(chain) if block not in mine), len(chain))
            if leading:
                runs.append((holder, leading))
        return runs

    def tenant_usage(self) -> dict[int, tuple[int, int]]:
        """Bytes of all copies, distinct blocks."""
        used: dict[int, int] = {}
        blocks: dict[int, set[bytes]] = {}
        for mine in self.blocks.values():
            for (tenant_id, key), (_, size_bytes) in mine.items():
                used[tenant_id] = used.get(tenant_id, 0) + size_bytes
                blocks.setdefault(tenant_id, set()).add(key)
        return {tenant_id: (used[tenant_id], len(keys)) for tenant_id, keys in blocks.items()}

    def holder_usage(self) -> dict[int, tuple[int, int]]:
        sizes = {holder: [size for _, size in mine.values()] for holder, mine in self.blocks.items()}
        return {holder: (sum(mine), len(mine)) for holder, mine in sizes.items()}

    def audit(
        self,
        wanted: Sequence[tuple[int, int]],
        wanted_of_others: int,
        domains: Sequence[int],
        domain_count: int,
        start: int,
        entries_max: int,
        found_max: int,
    ) -> tuple[int, int, int, int, int, bytes]:
        """All blocks in one page, in the order of their keys; it stops behind `found_max` found ones."""
        everywhere = sorted({block for mine in self.blocks.values() for block in mine})
        figures, found = [0, 0, 0, 0], bytearray()
        for number, block in enumerate(everywhere[start:], start + 1):
            copies = [
                (domains[holder], *mine[block])
                for holder, mine in sorted(self.blocks.items())
                if block in mine and holder < len(domains) and domains[holder] != NO_DOMAIN
            ]
            count = dict(wanted).get(block[0], wanted_of_others)
            if not copies or count < 2:
                continue
            is_short, size_bytes = len(copies) < count, copies[0][2]
            if not is_short and len({domain for domain, _, _ in copies}) >= min(count, domain_count):
                continue
            kind = 0 if is_short else 2
            figures[kind] += 1
            figures[kind + 1] += size_bytes * (count - len(copies) if is_short else 1)
            if found_max:
                fastest = min(tier for _, tier, _ in copies)
                found += AUDIT.pack(*block, size_bytes, len(copies), fastest, not is_short)
                if len(found) == found_max * AUDIT.size:
                    return (number, *figures, bytes(found))
        return (0, *figures, bytes(found))

    def stats(self) -> dict[str, int]:
        return {
            "blocks": len({block for mine in self.blocks.values() for block in mine}),
            "memory_bytes": 0,
        }
