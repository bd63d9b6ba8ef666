"""The options of `mooncache bench store`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StoreBenchOptions:
    """Sizes in bytes, counts without unit. `quick` shrinks what takes minutes; its figures are not comparable."""

    peer: str | None = None
    peer_build: Path | None = None
    """Folder with another build of the original than the installed one."""
    repeats: int = 9
    block_bytes: int = MIB
    block_count: int = 64
    small_bytes: int = 4096
    small_operations: int = 300
    chain_keys: int = 500
    chain_repeats: int = 100
    index_blocks: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    index_instances: int = 1_000
    node_counts: tuple[int, ...] = (4, 64)
    rebuild_blocks: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    rebuild_nodes: int = 4
    memory_blocks: int = 1_000_000
    memory_block_bytes: int = 512
    eviction_requests: int = 4_000
    eviction_blocks: tuple[int, ...] = (3_000, 10_000)
    eviction_repeats: int = 5

    def quick(self) -> StoreBenchOptions:
        """The same cases over less data: a minute instead of several."""
        return StoreBenchOptions(
            peer=self.peer,
            peer_build=self.peer_build,
            repeats=5,
            small_operations=100,
            chain_repeats=20,
            index_blocks=(10_000, 100_000),
            rebuild_blocks=(10_000, 100_000),
            memory_blocks=100_000,
            eviction_requests=1_500,
            eviction_blocks=(1_000, 3_000),
            eviction_repeats=1,
        )
