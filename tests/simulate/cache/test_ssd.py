"""The SSD tier of a simulated node: what memory evicts goes down when it is worth it, and comes back when asked for."""

from __future__ import annotations

from collections.abc import Sequence

from mooncache.simulate.cache import LEARNT, make
from mooncache.simulate.cache.reuse import Reuse
from mooncache.simulate.cache.ssd import SsdTier

BLOCK_BYTES = 1 << 20


def use(tier: SsdTier, dram: object, blocks: Sequence[int], now_s: float) -> list[int]:
    """What a node does with a chain; returns the blocks that are nowhere any more."""
    tier.used(blocks)
    gone = dram.use(blocks, now_s)  # type: ignore[attr-defined]
    return tier.take((*gone, *(block for block in blocks if block not in dram)), now_s)  # type: ignore[operator]


def test_what_memory_evicts_is_on_the_disk() -> None:
    dram = make("lru", 4)
    tier = SsdTier(dram, 100, BLOCK_BYTES)
    assert use(tier, dram, [1, 2, 3, 4], 0.0) == []
    assert use(tier, dram, [5, 6], 1.0) == []
    assert 3 in tier
    assert 4 in tier
    assert 1 not in tier
    use(tier, dram, [1, 2, 3, 4], 2.0)
    assert 3 in tier, "it came up, and its copy stays below"
    written = tier.counts()["written_bytes"]
    use(tier, dram, [5, 6, 7], 3.0)
    assert 3 in tier
    assert tier.counts()["admitted_blocks"] - written // (BLOCK_BYTES + 128) <= 3, (
        "its eviction costs nothing"
    )


def test_what_the_disk_gives_up_is_nowhere() -> None:
    dram = make("lru", 2)
    tier = SsdTier(dram, 64, BLOCK_BYTES)
    nowhere: list[int] = []
    for block in range(500):
        nowhere += use(tier, dram, [block], float(block))
    held = [block for block in range(500) if block in tier or block in dram]
    assert sorted(nowhere + held) == list(range(500))
    assert len(tier) <= 64
    assert held == list(range(500 - len(held), 500)), "the oldest went first"


def test_what_is_hardly_used_again_is_not_written() -> None:
    dram = make(LEARNT, 2, tells_chances=True)
    assert isinstance(dram, Reuse)
    tier = SsdTier(dram, 1_000, BLOCK_BYTES)
    dram.chances |= {5: 0.001, 6: 0.3}
    assert tier.take([5, 6, 7], 0.0) == [5], "of 7 nothing is known, and there is no budget to save"
    assert 6 in tier
    assert tier.counts()["refused_blocks"] == 1


def test_a_write_budget_is_kept() -> None:
    dram = make("lru", 2)
    tier = SsdTier(dram, 1_000, BLOCK_BYTES, write_bytes_per_s=BLOCK_BYTES)
    for second in range(200):
        for block in range(10 * second, 10 * second + 10):
            tier.used([block])
            tier.take([block], float(second))
    assert 200 * BLOCK_BYTES < tier.counts()["written_bytes"] <= 262 * (BLOCK_BYTES + 128)
    assert tier.counts()["dropped_blocks"] + tier.counts()["refused_blocks"] > 1_000


def test_chances_are_those_of_evicted_blocks() -> None:
    dram = make(LEARNT, 10, tells_chances=True)
    assert isinstance(dram, Reuse)
    for turn in range(4):
        dram.use(range(100 * turn, 100 * turn + 8), 60.0 * turn)
    assert len(dram.chances) == 4 * 8 - 10
    assert all(0.0 <= chance < 1.0 for chance in dram.chances.values())
    assert len(set(dram.chances.values())) > 1
