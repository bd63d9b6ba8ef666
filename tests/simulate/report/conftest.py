"""Two small runs of different policies, made once."""

from __future__ import annotations

import random

import pytest

from mooncache.simulate import Result, SimOptions, paper_cluster, simulate
from mooncache.simulate.report.summary import Summary, summarise
from mooncache.traces import GenerateOptions, generate


@pytest.fixture(scope="session")
def results() -> list[Result]:
    """The same requests under two policies, more of them than the cluster can serve."""
    trace = generate(GenerateOptions(requests=250), random.Random(3)).speed(4.0)
    return [simulate(trace, paper_cluster(3, 2), SimOptions(policy=name)) for name in ("mooncache", "random")]


@pytest.fixture(scope="session")
def summaries(results: list[Result]) -> list[Summary]:
    return [summarise(result) for result in results]


@pytest.fixture(scope="session")
def about(results: list[Result]) -> dict[str, object]:
    return {
        "cluster": "3P+2D <b>",
        "instances": {"prefill": 3, "decode": 2},
        "model": "m",
        "trace": "generated",
        "requests": len(results[0]),
        "speed": 4.0,
        "seed": 1,
        "ttft_slo_s": results[0].ttft_slo_s,
        "tbt_slo_s": results[0].tbt_slo_s,
    }
