"""Our policy beside every baseline: latency at the load where Algorithm 1 attains 90 %, and effective capacity.

Both searches are bisections over the speed of the trace. Every policy has the same nodes; ours may also change their
roles, which the published policies do not know, and has memory on its decode nodes for that (the row without both is
beside it, on the halves too). Latency is compared with no request refused, since refusing slow requests would make a
policy look fast. The capacity of ours is that with its own gate; Algorithm 1's is the better of two, without a gate and
with its own (a request refused is one not served in time, but it leaves the queue to others). A baseline that does not
keep the share at Algorithm 1's capacity without a gate is below it without a search of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from mooncache.conductor.core.policy import NAMES
from mooncache.conductor.core.policy.types import AdmissionMode
from mooncache.reporting.rows import Row, bar_row
from mooncache.reproduce import setting
from mooncache.reproduce.experiment import Run, SpeedSearch, capacity, simulated
from mooncache.reproduce.finding import Figure, Sheet, measured
from mooncache.reproduce.lab import Lab
from mooncache.reproduce.scenario import Scenario
from mooncache.reproduce.workloads import CONVERSATION
from mooncache.traces import TracePart

OURS, PAPERS, FIXED = setting.OUR_POLICY, setting.PAPERS_POLICY, f"{setting.OUR_POLICY}, fixed roles"
GATED: Final = f"{PAPERS}, its own gate"
POLICIES: Final = {FIXED: OURS, GATED: PAPERS}
MEAN_BAR, P99_BAR, CAPACITY_BAR = 0.8, 0.7, 1.3
ATTAINS: Final = 0.9
GATES: Final = {
    OURS: AdmissionMode.LEARNED,
    PAPERS: AdmissionMode.NONE,
    GATED: AdmissionMode.TTFT_TBT,
    FIXED: AdmissionMode.LEARNED,
}
MEANS: Final = (
    f"{OURS} may change the roles of its nodes, which no other row may, and its decode nodes have the DRAM that they "
    "need as prefill nodes (theirs have none): such means, not decisions, are the difference between it and the row "
    "with fixed roles, which has the nodes and the memory of all others"
)
BASE: Final = Run(CONVERSATION, policy=PAPERS)


def run_of(name: str, run: Run) -> Run:
    """The run under the policy of that name; ours also plans the roles."""
    return dataclasses.replace(run, policy=POLICIES.get(name, name), roles=name == OURS)


def latency(lab: Lab, sheet: Sheet) -> None:
    """All policies at the speed at which Algorithm 1 keeps both promises for 90 % of the requests."""
    speed = lab.map(capacity, [SpeedSearch(BASE, share=ATTAINS)])[0]
    for part in lab.parts:
        suffix = "" if part is TracePart.WHOLE else f", {part}"
        found = (
            [measured(f"speed at which {PAPERS} attains {ATTAINS:.0%}", speed, "x")]
            if part is TracePart.WHOLE
            else []
        )
        names = (*NAMES, FIXED) if part is TracePart.WHOLE else (PAPERS, OURS, FIXED)
        runs = [run_of(name, dataclasses.replace(BASE, part=part, speed=speed)) for name in names]
        got = dict(zip(names, lab.map(simulated, runs), strict=True))
        theirs = got[PAPERS]
        for name, one in got.items():
            for what, value, reference, bar in (
                ("TTFT mean", one.ttft.mean, theirs.ttft.mean, MEAN_BAR),
                ("TTFT P90", one.ttft.p90, theirs.ttft.p90, None),
                ("TTFT P99", one.ttft.p99, theirs.ttft.p99, P99_BAR),
                ("TBT P90", one.tbt.p90, theirs.tbt.p90, None),
            ):
                label, bound = f"{name}: {what}{suffix}", bar if name == OURS else None
                against = None if name == PAPERS else f"{PAPERS}: {what}"
                row = bar_row(label, value, "s", against=against, reference=reference, at_most=bound)
                found.append(Figure(row))
            found.append(measured(f"{name}: effective{suffix}", one.attained, ""))
            found.append(measured(f"{name}: hit ratio{suffix}", one.hit_ratio, ""))
        sheet.findings += lab.mark(CONVERSATION, found)
    sheet.notes.append(MEANS)
    sheet.notes.append(
        "No request is refused here; constants of our policy were chosen on the first half of the trace"
    )


def effective_capacity(lab: Lab, sheet: Sheet) -> None:
    """The highest speed at which 95 % of the requests keep both promises."""
    for part in lab.parts:
        suffix = "" if part is TracePart.WHOLE else f", {part}"
        searches = [
            SpeedSearch(run_of(name, dataclasses.replace(BASE, admission=gate, part=part)))
            for name, gate in GATES.items()
        ]
        reached = dict(zip(GATES, lab.map(capacity, searches), strict=True))
        found = [measured(f"{name}: capacity{suffix}", reached[name], "x") for name in (PAPERS, GATED)]
        better = max(PAPERS, GATED, key=reached.__getitem__)
        row = bar_row(
            f"{OURS}: capacity{suffix}",
            reached[OURS],
            "x",
            against=f"{better}: capacity{suffix}",
            reference=reached[better],
            at_least=CAPACITY_BAR,
        )
        found.append(Figure(row))
        found.append(measured(f"{FIXED}, its own gate: capacity{suffix}", reached[FIXED], "x"))
        if part is TracePart.WHOLE:
            found += _baselines(lab, reached)
        sheet.findings += lab.mark(CONVERSATION, found)
    sheet.notes.append(MEANS)
    sheet.notes.append(
        f"{setting.PREFILL_NODES}P+{setting.DECODE_NODES}D; {setting.CAPACITY_SHARE:.0%} of the requests within TTFT "
        f"{setting.TTFT_SLO_S:g} s and TBT {setting.TBT_SLO_S:g} s; found to 5 %"
    )


def _baselines(lab: Lab, reached: dict[str, float]) -> list[Figure]:
    """Effective share of the others at Algorithm 1's capacity; those that keep the share get a search."""
    others = [*(name for name in NAMES if name not in GATES), FIXED]
    runs = [run_of(name, BASE.at(reached[PAPERS])) for name in others]
    shares = {name: one.attained for name, one in zip(others, lab.map(simulated, runs), strict=True)}
    found = [
        measured(f"{name}: effective at {PAPERS}'s capacity", share, "") for name, share in shares.items()
    ]
    good = [name for name, share in shares.items() if share >= setting.CAPACITY_SHARE]
    speeds = lab.map(capacity, [SpeedSearch(run_of(name, BASE)) for name in good])
    found += [measured(f"{name}: capacity", speed, "x") for name, speed in zip(good, speeds, strict=True)]
    rivals = [speed for name, speed in zip(good, speeds, strict=True) if name != FIXED]
    best = max([*rivals, reached[PAPERS], reached[GATED]])
    bar = "above every baseline"
    above = reached[OURS] > best
    found.append(
        Figure(
            Row(
                f"{OURS}: capacity, all beside it",
                reached[OURS],
                "x",
                reached[OURS] / best,
                "best baseline",
                bar,
                above,
            )
        )
    )
    return found


SCENARIOS: Final = (
    Scenario("policies", "every policy at one load", "no figure; ours", latency, "minutes"),
    Scenario(
        "capacity", "effective capacity of the policies", "no figure; ours", effective_capacity, "minutes"
    ),
)
