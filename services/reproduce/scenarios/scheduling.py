"""Which instance: FAST'25 Figure 5 and arXiv Figure 8, the mean time to the first token under four schedulers."""

from __future__ import annotations

import dataclasses
from typing import Final

from mooncache.reproduce import setting
from mooncache.reproduce.experiment import Run, RunSummary, simulated
from mooncache.reproduce.finding import Figure, Sheet, measured, published
from mooncache.reproduce.lab import Lab
from mooncache.reproduce.scenario import Scenario
from mooncache.reproduce.workloads import CONVERSATION, TOOLAGENT

# The paper's names for our policies, and its mean TTFT in seconds.
SCHEDULERS: Final = {
    "random": "random",
    "least_load": "load balancing",
    "local": "local",
    "algorithm1": "global",
}
FIGURE_5: Final = {"random": 19.65, "least_load": 5.27, "local": 3.58, "algorithm1": 3.07}
FIGURE_5_MEDIAN: Final = {"random": 13.7, "least_load": 3.56, "local": 2.16, "algorithm1": 1.72}
FIGURE_8: Final = {"random": 92.07, "least_load": 60.41, "local": 14.36, "algorithm1": 6.26}
RATIO_BAR: Final = 0.2
SPEEDS: Final = (1.25,)
THRESHOLDS: Final = (1.0, 3.0)


def _four(lab: Lab, run: Run) -> dict[str, RunSummary]:
    runs = [dataclasses.replace(run, policy=policy) for policy in SCHEDULERS]
    return dict(zip(SCHEDULERS, lab.map(simulated, runs), strict=True))


def _ratios(
    got: dict[str, RunSummary], papers: dict[str, float], label: str, within: float | None
) -> list[Figure]:
    best = got["algorithm1"].ttft.mean
    return [
        published(
            f"{SCHEDULERS[policy]} / global{label}",
            got[policy].ttft.mean / best,
            "x",
            papers[policy] / papers["algorithm1"],
            within=within,
        )
        for policy in ("random", "least_load", "local")
    ]


def figure_5(lab: Lab, sheet: Sheet) -> None:
    run = Run(CONVERSATION)
    got = _four(lab, run)
    found: list[Figure] = []
    for policy, name in SCHEDULERS.items():
        found.append(published(f"{name}: TTFT mean", got[policy].ttft.mean, "s", FIGURE_5[policy]))
        found.append(published(f"{name}: TTFT median", got[policy].ttft.p50, "s", FIGURE_5_MEDIAN[policy]))
    found += _ratios(got, FIGURE_5, "", RATIO_BAR)
    ours = lab.map(simulated, [dataclasses.replace(run, policy=setting.OUR_POLICY)])[0]
    found.append(measured("our policy: TTFT mean", ours.ttft.mean, "s"))
    for threshold in () if lab.quick else THRESHOLDS:
        other = lab.map(simulated, [dataclasses.replace(run, threshold=threshold)])[0]
        found.append(measured(f"global, threshold {threshold:g}: TTFT mean", other.ttft.mean, "s"))
    for speed in () if lab.quick else SPEEDS:
        found += _ratios(_four(lab, run.at(speed)), FIGURE_5, f", {speed:g}x speed", None)
    sheet.findings += lab.mark(CONVERSATION, found)
    sheet.notes.append(
        f"{setting.PREFILL_NODES}P+{setting.DECODE_NODES}D at the trace's own speed, no request is refused. The paper "
        "gives neither its split nor its speed; its own times are longer throughout, the ratios are what compares"
    )


def arxiv_figure_8(lab: Lab, sheet: Sheet) -> None:
    got = _four(lab, Run(TOOLAGENT, speed=setting.OVERLOAD_SPEED))
    found = [
        published(f"{name}: TTFT mean", got[policy].ttft.mean, "s", FIGURE_8[policy])
        for policy, name in SCHEDULERS.items()
    ]
    found += _ratios(got, FIGURE_8, "", None)
    sheet.findings += lab.mark(TOOLAGENT, found)
    sheet.notes.append(
        f"The paper's speed is not published; this is {setting.OVERLOAD_SPEED:g}x, as in its Table 3. In overload the "
        "ratios depend on the speed and the length of the run, so only the order compares"
    )


SCENARIOS: Final = (
    Scenario("fig5-scheduling", "four schedulers", "FAST'25, Figure 5", figure_5, "minutes"),
    Scenario(
        "fig8-scheduling",
        "four schedulers in overload",
        "arXiv 2407.00079, Figure 8",
        arxiv_figure_8,
        "minutes",
    ),
)
