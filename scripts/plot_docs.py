"""Draw the pictures of docs/images: `.venv/bin/python scripts/plot_docs.py`. Equal code gives equal files.

All of them come from one simulated workload that is made up here, so that no trace is needed to draw them again.
"""

from __future__ import annotations

import random
from pathlib import Path

from mooncache.simulate import SimOptions, paper_cluster, simulate
from mooncache.simulate.report import figures, plots
from mooncache.simulate.report.summary import summarise
from mooncache.simulate.sim_request import BRANCHES
from mooncache.traces import GenerateOptions, generate

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
POLICIES = ("mooncache", "algorithm1", "least_load", "random")


def main() -> None:
    trace = generate(GenerateOptions(requests=1200), random.Random(1)).speed(2.0)
    results = [simulate(trace, paper_cluster(), SimOptions(policy=name)) for name in POLICIES]
    summaries = [summarise(result, BRANCHES) for result in results]
    FOLDER.mkdir(exist_ok=True)
    drawings = {
        "simulate-ttft": plots.ttft(results, summaries),
        "simulate-queue": plots.queue(results),
        "simulate-hit-ratio": plots.hit_ratio(results, summaries),
        "simulate-copies": plots.replicas(results[0]),
    }
    for name, drawing in drawings.items():
        if drawing is not None:
            figures.save_svg(drawing.plot, FOLDER / f"{name}.svg", drawing.alt)


if __name__ == "__main__":
    main()
