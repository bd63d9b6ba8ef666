"""How much a cache of a size holds of what is asked for: arXiv Table 1, FAST'25 Figure 9, and our eviction policy.

One cache takes all requests in order. A request hits the blocks at its beginning that are there without a gap,
then uses all its blocks. Exact: nothing but the trace and the policy is in these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mooncache.reporting.rows import Row, bar_row
from mooncache.reproduce.finding import Figure, Sheet, measured, published
from mooncache.reproduce.lab import Lab
from mooncache.reproduce.scenario import Scenario
from mooncache.reproduce.setting import HIT_BLOCKS_BAR
from mooncache.reproduce.workloads import ALL, CONVERSATION, SYNTHETIC, TOOLAGENT, Sources, load
from mooncache.simulate.cache import UNLIMITED, UseInfo, make
from mooncache.traces import Trace

CAPACITIES: Final = (UNLIMITED, 100_000, 50_000, 30_000, 10_000, 1_000)
TABLE_1: Final = {
    "lru": (0.51, 0.51, 0.50, 0.48, 0.40, 0.30),
    "lfu": (0.51, 0.51, 0.49, 0.43, 0.35, 0.30),
    "length_aware": (0.51, 0.50, 0.48, 0.42, 0.35, 0.30),
}
# FAST'25 Figure 9, read off the drawing: tokens of capacity, share of input tokens.
FIGURE_9_TOKENS: Final = (1e6, 2e6, 4e6, 5e6, 8e6, 1e7, 5e7, 1e8)
FIGURE_9: Final = {
    CONVERSATION: (0.087, 0.12, 0.215, 0.247, 0.30, 0.326, 0.398, 0.401),
    TOOLAGENT: (0.386, 0.414, 0.484, 0.505, 0.544, 0.561, 0.595, 0.595),
    SYNTHETIC: (0.146, 0.235, 0.38, 0.435, 0.545, 0.589, 0.658, 0.658),
    ALL: (0.227, 0.242, 0.274, 0.296, 0.352, 0.381, 0.53, 0.536),
}
# The share of the maximum that one node's 3 M tokens reach, as the text prints it.
ONE_NODE: Final = {CONVERSATION: 0.41, TOOLAGENT: 0.75, SYNTHETIC: 0.46, ALL: 0.48}
OURS: Final = "mooncache"


@dataclass(frozen=True, slots=True)
class HitShares:
    """Shares of block references and of input tokens that were hits; halves are by time, one run."""

    blocks: float
    tokens: float
    first_half: float
    second_half: float


def hit_ratio(sources: Sources, item: tuple[str, str, int]) -> HitShares:
    """One run of (workload, policy, capacity in blocks)."""
    workload, policy, capacity = item
    return measure(load(sources, workload), policy, capacity)


def measure(trace: Trace, policy: str, capacity_blocks: int) -> HitShares:
    """The hit ratios of a policy on a trace, from an empty cache on."""
    cache = make(policy, capacity_blocks)
    middle_s = (float(trace.arrival_s[0]) + float(trace.arrival_s[-1])) / 2
    hits, uses, tokens = [0, 0], [0, 0], 0
    for row, (now_s, length) in enumerate(
        zip(trace.arrival_s.tolist(), trace.input_tokens.tolist(), strict=True)
    ):
        blocks = trace.blocks(row)
        held = cache.leading(blocks, now_s)
        cache.use(blocks, now_s, UseInfo(last_partial=length % trace.block_tokens != 0))
        half = int(now_s >= middle_s)
        hits[half] += held
        uses[half] += len(blocks)
        tokens += min(held * trace.block_tokens, length)
    total = int(trace.input_tokens.sum())
    shares = [hit / max(1, use) for hit, use in zip(hits, uses, strict=True)]
    return HitShares(sum(hits) / max(1, sum(uses)), tokens / max(1, total), shares[0], shares[1])


def label(capacity_blocks: int) -> str:
    """How a capacity is written in a row's name."""
    return "no limit" if capacity_blocks >= UNLIMITED else f"{capacity_blocks:,} blocks"


def table_1(lab: Lab, sheet: Sheet) -> None:
    for workload, compared in ((TOOLAGENT, True), (CONVERSATION, False)):
        items = [(workload, policy, capacity) for policy in TABLE_1 for capacity in CAPACITIES]
        found = []
        for item, result in zip(items, lab.map(hit_ratio, items), strict=True):
            _, policy, capacity = item
            name = f"{workload}: {policy}, {label(capacity)}"
            paper = TABLE_1[policy][CAPACITIES.index(capacity)]
            found.append(
                published(name, result.blocks, "", paper) if compared else measured(name, result.blocks, "")
            )
        sheet.findings += lab.mark(workload, found)
    sheet.notes.append(
        "The published table was made of more requests than the released trace has (LRU on the released arXiv trace: "
        ".341 at 1,000 blocks to .553 without limit): ranking and slope compare, not the level"
    )


def figure_9(lab: Lab, sheet: Sheet) -> None:
    one_node = 3_000_000
    for workload, papers in FIGURE_9.items():
        size = lab.trace(workload).block_tokens
        capacities = [*(int(tokens) // size for tokens in FIGURE_9_TOKENS), one_node // size, UNLIMITED]
        results = lab.map(hit_ratio, [(workload, "lru", capacity) for capacity in capacities])
        found = [
            published(f"{workload}: {int(tokens):,} tokens", result.tokens, "", paper)
            for tokens, result, paper in zip(FIGURE_9_TOKENS, results, papers, strict=False)
        ]
        share = results[-2].tokens / results[-1].tokens
        found.append(
            published(f"{workload}: one node (3 M tokens) / no limit", share, "", ONE_NODE[workload])
        )
        sheet.findings += lab.mark(workload, found)
    sheet.notes.append(
        "The paper counts finer blocks than the published ids have (see table2): 2 to 3 points less here"
    )


def eviction(lab: Lab, sheet: Sheet) -> None:
    """Our eviction and admission beside LRU at every capacity; tuned on the first half of the conversation trace."""
    capacities = (1_000, 3_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000, UNLIMITED)
    for workload in (CONVERSATION, SYNTHETIC, TOOLAGENT):
        if lab.sources.stand_in(workload) and workload != CONVERSATION and not lab.quick:
            continue  # what generated requests say of eviction is what their generator assumed of reuse
        items = [(workload, policy, capacity) for capacity in capacities for policy in ("lru", OURS)]
        results = dict(zip(items, lab.map(hit_ratio, items), strict=True))
        found: list[Figure] = []
        for capacity in capacities:
            lru, ours = results[workload, "lru", capacity], results[workload, OURS, capacity]
            found += _beside_lru(workload, capacity, lru, ours)
            most = results[workload, OURS, UNLIMITED].blocks
            name = f"{workload}: {OURS}, {label(capacity)}, over no limit"
            found.append(measured(name, ours.blocks / most if most else 1.0, ""))
        sheet.findings += lab.mark(workload, found)
    sheet.notes.append(
        "The rule and its constants were chosen on the first half of the conversation trace only"
    )


def _beside_lru(workload: str, capacity: int, lru: HitShares, ours: HitShares) -> list[Figure]:
    name = f"{workload}: {OURS}, {label(capacity)}"
    against = f"lru, {label(capacity)}"
    found = [measured(f"{workload}: {against}", lru.blocks, "")]
    row = bar_row(name, ours.blocks, "", against=against, reference=lru.blocks, at_least=1.0)
    found.append(Figure(row))
    if capacity == 10_000:
        for half, value, base in (
            ("first half", ours.first_half, lru.first_half),
            ("second half", ours.second_half, lru.second_half),
        ):
            row = bar_row(f"{name}, {half}", value, "", against=against, reference=base, at_least=1.0)
            found.append(Figure(row))
        if workload == CONVERSATION:
            met = ours.blocks >= HIT_BLOCKS_BAR
            bar = f"at least {HIT_BLOCKS_BAR}"
            found.append(Figure(Row(f"{name}, the bar", ours.blocks, "", None, None, bar, met)))
    return found


SCENARIOS: Final = (
    Scenario("table1", "hit ratio by policy and capacity", "arXiv 2407.00079, Table 1", table_1),
    Scenario("fig9-capacity", "hit ratio by capacity, one LRU cache", "FAST'25, Figure 9", figure_9),
    Scenario("eviction", "our eviction beside LRU, all capacities", "no figure; ours", eviction),
)
