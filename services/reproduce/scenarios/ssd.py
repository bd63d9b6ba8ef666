"""What an SSD tier below one node's memory brings, and what is written for it: the nodes' admission beside writing all.

One node takes all requests in order. Hits are blocks at the beginning of a prompt that are in memory or on the disk,
without a gap. Written are blocks that memory evicts and that the disk takes, and what moves inside of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mooncache.reporting.rows import bar_row
from mooncache.reproduce.finding import Figure, Sheet, measured
from mooncache.reproduce.lab import Lab
from mooncache.reproduce.scenario import Scenario
from mooncache.reproduce.workloads import CONVERSATION, SYNTHETIC, Sources, load
from mooncache.simulate.cache import LEARNT, UseInfo, make
from mooncache.simulate.cache.ssd import SsdTier

MEMORY_BLOCKS: Final = 3_000
DISK_BLOCKS: Final = (10_000, 100_000)
BLOCK_BYTES: Final = 1 << 20  # any size does: the disk's segments follow it
WRITE_ALL: Final = "all written"
BY_CHANCE: Final = "by chance of another use"


@dataclass(frozen=True, slots=True)
class TierUse:
    """Blocks of one run."""

    asked: int
    hits: int
    memory_hits: int
    written: float

    @property
    def written_per_hit(self) -> float:
        """Blocks written for each block that only the disk had."""
        return self.written / max(1, self.hits - self.memory_hits)


def tier_use(sources: Sources, item: tuple[str, str, int]) -> TierUse:
    """One run of (workload, rule, blocks on the disk)."""
    workload, rule, disk_blocks = item
    trace = load(sources, workload)
    dram = make(LEARNT, MEMORY_BLOCKS, tells_chances=rule == BY_CHANCE)
    disk = SsdTier(dram, disk_blocks, BLOCK_BYTES)
    asked = hits = memory_hits = 0
    for row, (now_s, length) in enumerate(
        zip(trace.arrival_s.tolist(), trace.input_tokens.tolist(), strict=True)
    ):
        blocks = trace.blocks(row)
        asked += len(blocks)
        for block in blocks:
            if block in dram:
                memory_hits += 1
            elif block not in disk:
                break
            hits += 1
        disk.used(blocks)
        gone = dram.use(blocks, now_s, UseInfo(last_partial=length % trace.block_tokens != 0))
        disk.take((*gone, *(block for block in blocks if block not in dram)), now_s)
    return TierUse(asked, hits, memory_hits, disk.counts()["written_bytes"] / BLOCK_BYTES)


def ssd_admission(lab: Lab, sheet: Sheet) -> None:
    for workload in (CONVERSATION, SYNTHETIC):
        if lab.sources.stand_in(workload) and workload != CONVERSATION and not lab.quick:
            continue
        items = [(workload, rule, blocks) for blocks in DISK_BLOCKS for rule in (WRITE_ALL, BY_CHANCE)]
        results = dict(zip(items, lab.map(tier_use, items), strict=True))
        found: list[Figure] = []
        for blocks in DISK_BLOCKS:
            every, ours = results[workload, WRITE_ALL, blocks], results[workload, BY_CHANCE, blocks]
            for rule, use in ((WRITE_ALL, every), (BY_CHANCE, ours)):
                name = f"{workload}: {rule}, disk of {blocks:,} blocks"
                found.append(measured(f"{name}, hits", use.hits / use.asked, ""))
                found.append(measured(f"{name}, in memory", use.memory_hits / use.asked, ""))
            name = f"{workload}: {{}}, disk of {blocks:,} blocks, written for a hit of the disk"
            against = name.format(WRITE_ALL)
            found.append(measured(against, every.written_per_hit, "blocks"))
            row = bar_row(
                name.format(BY_CHANCE),
                ours.written_per_hit,
                "blocks",
                against=against,
                reference=every.written_per_hit,
                at_most=1.0,
            )
            found.append(Figure(row))
        sheet.findings += lab.mark(workload, found)
    sheet.notes.append(f"One node with {MEMORY_BLOCKS:,} blocks of memory, no write budget")


SCENARIOS: Final = (
    Scenario(
        "ssd-admission", "what goes down to a disk, and what it brings", "no figure; ours", ssd_admission
    ),
)
