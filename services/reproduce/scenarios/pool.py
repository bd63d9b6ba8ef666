"""The pool and the network: FAST'25 Figures 10 (global against local), 11 (copies), 13 (bandwidth), 15 (P:D)."""

from __future__ import annotations

import dataclasses
from typing import Final

from mooncache.reproduce import setting
from mooncache.reproduce.experiment import Run, RunSummary, simulated
from mooncache.reproduce.finding import Figure, Sheet, measured, published
from mooncache.reproduce.lab import Lab
from mooncache.reproduce.scenario import Scenario
from mooncache.reproduce.workloads import CONVERSATION, SYNTHETIC, TOOLAGENT
from mooncache.simulate.cluster import PoolScope

GLOBAL, WEAK, GOOD = "global", "local, by load", "local, by cache and load"
FIGURE_10: Final = {  # hit ratio local, global; prefill GPU seconds local, global
    CONVERSATION: (0.169, 0.375, 1.379, 1.051),
    TOOLAGENT: (0.420, 0.581, 0.703, 0.521),
    SYNTHETIC: (0.264, 0.622, 1.497, 0.783),
}


def figure_10(lab: Lab, sheet: Sheet) -> None:
    for workload, (hit_local, hit_global, gpu_local, gpu_global) in FIGURE_10.items():
        base = Run(workload, prefill=10, decode=6, outputs=1)
        runs = {
            WEAK: dataclasses.replace(base, policy="least_load", pool=PoolScope.LOCAL),
            GOOD: dataclasses.replace(base, policy="local", pool=PoolScope.LOCAL),
            GLOBAL: base,
        }
        got = dict(zip(runs, lab.map(simulated, list(runs.values())), strict=True))
        found = [
            published(f"{workload}: hit ratio, {WEAK}", got[WEAK].hit_ratio, "", hit_local),
            measured(f"{workload}: hit ratio, {GOOD}", got[GOOD].hit_ratio, ""),
            published(f"{workload}: hit ratio, {GLOBAL}", got[GLOBAL].hit_ratio, "", hit_global),
            published(f"{workload}: prefill GPU time, {WEAK}", got[WEAK].prefill_gpu_s, "s", gpu_local),
            measured(f"{workload}: prefill GPU time, {GOOD}", got[GOOD].prefill_gpu_s, "s"),
            published(f"{workload}: prefill GPU time, {GLOBAL}", got[GLOBAL].prefill_gpu_s, "s", gpu_global),
        ]
        papers = (hit_global / hit_local, gpu_global / gpu_local)
        found += _gains(workload, got[GLOBAL], got[WEAK], WEAK, papers)
        found += _gains(workload, got[GLOBAL], got[GOOD], GOOD, None)
        sheet.findings += lab.mark(workload, found)
    sheet.notes.append(
        "The paper's local router is not described. Its hit ratios lie between a router that looks at load only "
        "and of one that looks at caches and load: most of its gain is what looking at caches gives without a pool"
    )


def _gains(
    workload: str, pool: RunSummary, local: RunSummary, name: str, papers: tuple[float, float] | None
) -> list[Figure]:
    hits = pool.hit_ratio / local.hit_ratio if local.hit_ratio else float("inf")
    gpu = pool.prefill_gpu_s / local.prefill_gpu_s
    labels = (f"{workload}: hit ratio, global / {name}", f"{workload}: GPU time, global / {name}")
    if papers is None:
        return [measured(label, value, "x") for label, value in zip(labels, (hits, gpu), strict=True)]
    return [
        published(label, value, "x", paper)
        for label, value, paper in zip(labels, (hits, gpu), papers, strict=True)
    ]


# Figure 11: most copies of the block of this rank by hits, and seconds until there were so many.
FIGURE_11: Final[dict[str, dict[int, tuple[int, float | None]]]] = {
    CONVERSATION: {10: (8, 1110.0), 100: (7, 2430.0), 1000: (6, 660.0), 10_000: (3, None)},
    TOOLAGENT: {10: (8, 60.0), 100: (7, 2100.0), 1000: (5, None), 10_000: (3, None)},
    SYNTHETIC: {10: (5, None), 100: (4, None), 1000: (5, None), 10_000: (2, None)},
}


def figure_11(lab: Lab, sheet: Sheet) -> None:
    for workload, papers in FIGURE_11.items():
        for policy, name in ((setting.PAPERS_POLICY, "Algorithm 1"), (setting.OUR_POLICY, "ours")):
            got = lab.map(simulated, [Run(workload, policy=policy)])[0]
            found: list[Figure] = []
            for rank, copies in got.copies:
                if rank not in papers or not copies:
                    continue
                most = max(copies)
                label = f"{workload}: {name}, copies of the block of rank {rank:,}, most"
                paper, reached_s = papers[rank]
                at_s = got.copies_at_s[copies.index(most)]
                if policy != setting.PAPERS_POLICY:
                    found.append(measured(label, most, ""))
                    continue
                found.append(published(label, most, "", paper))
                label = f"{workload}: {name}, rank {rank:,}, time of the most copies"
                found.append(
                    measured(label, at_s, "s")
                    if reached_s is None
                    else published(label, at_s, "s", reached_s)
                )
            sheet.findings += lab.mark(workload, found)
    sheet.notes.append("Copies on all nodes at samples of 15 s; the paper samples 8 prefill nodes each 30 s")


FIGURE_13: Final = {24: 5.10, 40: 2.40, 80: 1.73, 100: 1.60, 160: 1.41, 320: 1.25, 400: 1.25}
RECOMPUTE_S: Final = 2.62


def figure_13(lab: Lab, sheet: Sheet) -> None:
    runs = {gbps: Run(SYNTHETIC, network_gbps=gbps * 0.87) for gbps in FIGURE_13}
    got = dict(zip(runs, lab.map(simulated, list(runs.values())), strict=True))
    best, paper_best = got[400].ttft.mean, FIGURE_13[400]
    local = Run(SYNTHETIC, pool=PoolScope.LOCAL)
    weak, good = lab.map(
        simulated,
        [dataclasses.replace(local, policy="least_load"), dataclasses.replace(local, policy="local")],
    )
    found = [
        published(f"{gbps} Gbps: TTFT mean", got[gbps].ttft.mean, "s", FIGURE_13[gbps]) for gbps in FIGURE_13
    ]
    found += [
        published(f"{gbps} Gbps / 400 Gbps", got[gbps].ttft.mean / best, "x", FIGURE_13[gbps] / paper_best)
        for gbps in FIGURE_13
    ]
    found += [
        published(f"recompute, {WEAK}: TTFT mean", weak.ttft.mean, "s", RECOMPUTE_S),
        published(f"recompute, {WEAK} / 400 Gbps", weak.ttft.mean / best, "x", RECOMPUTE_S / paper_best),
        measured(f"recompute, {GOOD}: TTFT mean", good.ttft.mean, "s"),
        measured("tokens fetched for a request, 400 Gbps, mean", got[400].fetched_tokens, "tokens"),
    ]
    sheet.findings += lab.mark(SYNTHETIC, found)
    ours = lab.map(
        simulated, [dataclasses.replace(runs[gbps], policy=setting.OUR_POLICY) for gbps in (24, 40, 400)]
    )
    sheet.findings += lab.mark(
        SYNTHETIC,
        [
            measured(f"our policy, {gbps} Gbps: TTFT mean", one.ttft.mean, "s")
            for gbps, one in zip((24, 40, 400), ours, strict=True)
        ],
    )


FIGURE_15: Final = {  # prefill nodes of 16: effective share, TTFT s, TBT s
    5: (0.777, 5.74, 0.0315),
    6: (0.972, 1.71, 0.0318),
    7: (0.991, 1.30, 0.0329),
    8: (0.990, 1.19, 0.0350),
    9: (0.992, 1.12, 0.0383),
    10: (0.984, 1.11, 0.0442),
    11: (0.861, 1.14, 0.0583),
}


def figure_15(lab: Lab, sheet: Sheet) -> None:
    runs = [
        Run(SYNTHETIC, prefill=prefill, decode=setting.NODES - prefill, ttft_slo_s=10.0, tbt_slo_s=0.1)
        for prefill in FIGURE_15
    ]
    found = []
    for run, got in zip(runs, lab.map(simulated, runs), strict=True):
        share, ttft, tbt = FIGURE_15[run.prefill]
        name = f"{run.prefill}P+{run.decode}D"
        found += [
            published(f"{name}: effective", got.attained, "", share),
            published(f"{name}: TTFT mean", got.ttft.mean, "s", ttft),
            published(f"{name}: TBT mean", got.tbt_mean_s, "s", tbt),
        ]
    sheet.findings += lab.mark(SYNTHETIC, found)
    sheet.notes.append("Effective: first token within 10 s and TBT within 0.1 s")


SCENARIOS: Final = (
    Scenario("fig10-pool", "global against local cache", "FAST'25, Figure 10", figure_10, "minutes"),
    Scenario("fig11-copies", "copies of hot blocks over time", "FAST'25, Figure 11", figure_11, "minutes"),
    Scenario("fig13-bandwidth", "network bandwidth", "FAST'25, Figure 13", figure_13, "minutes"),
    Scenario("fig15-split", "prefill and decode nodes", "FAST'25, Figure 15", figure_15, "minutes"),
)
