"""Bad input: every wrong value is named with its place, its unit and what was probably meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.errors import (
    ModelDoesNotFit,
    PlanInfeasible,
    PlanInvalid,
    ProfileInvalid,
    SloUnreachable,
)
from mooncache.plan import example, loading
from mooncache.plan.core import limits, machine
from mooncache.plan.core.spec import SearchSpec, SloSpec, Spec
from mooncache.plan.workload import busiest, made, reusable
from mooncache.prices.core.hardware import Dram, Nic
from tests.plan.builders import demand, node, searcher, spec, trace


def read(tmp_path: Path, text: str, **overrides: Any) -> loading.Question:
    path = tmp_path / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return loading.read(path, {name.replace("__", "."): value for name, value in overrides.items()})


NODE = """
[[gpu_node]]
name = "A800"
gpus = 8
gpu_memory_gb = 80
gpu_memory_gb_per_s = 2040
gpu_tflops = 312
host_gb_per_s = 128
price_per_hour = 14
"""
REST = "[[dram]]\ngb = 500\nprice_per_hour = 0.5\n[[nic]]\ngbps = 400\nincluded = true\n"


def test_the_example_loads_and_says_that_its_prices_are_examples(tmp_path: Path) -> None:
    text = example.toml()
    assert "ALL PRICES ARE EXAMPLES" in text
    question = read(tmp_path, text)
    assert question.spec == example.spec()
    assert question.from_example == ()
    assert loading.read(None).from_example == ("gpu_node", "dram", "ssd", "nic")


def test_options_of_the_command_line_win_over_the_file(tmp_path: Path) -> None:
    question = read(
        tmp_path, "[slo]\nttft_s = 5\ntbt_s = 0.05\n" + NODE + REST, slo__ttft_s=8.0, slo__tbt_s=None
    )
    assert (question.spec.slo.ttft_s, question.spec.slo.tbt_s) == (8.0, 0.05)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[slo]\ntbt_s = 100\n", ["slo.tbt_s", "milliseconds", "0.1 s"]),
        ("[slo]\nttft_s = 30000\n", ["slo.ttft_s", "milliseconds", "30 s"]),
        ("[slo]\nattainment = 95\n", ["slo.attainment", "percent", "0.95"]),
        ("[slo]\ntbt_s = nan\n", ["slo.tbt_s", "nan"]),
        ("[slo]\ntbt_s = -1\n", ["slo.tbt_s", "greater than 0"]),
        ("[slo]\ntbt_s = '100ms'\n", ["slo.tbt_s", "100ms"]),
        ("[slo]\nttft = 3\n", ["ttft", "did you mean ttft_s"]),
        ("[slos]\nttft_s = 3\n", ["slos", "did you mean slo"]),
        ("[gpu_node]\nname = 'x'\n", ["[[gpu_node]]"]),
        (
            NODE.replace("price_per_hour = 14", "price_per_hour = 0"),
            ["gpu_node[1].price_per_hour", "greater than 0"],
        ),
        (NODE.replace("price_per_hour = 14", "price_per_hour = -3"), ["gpu_node[1].price_per_hour", "-3"]),
        (
            NODE.replace("price_per_hour = 14", "price_per_hour = nan"),
            ["gpu_node[1].price_per_hour", "finite"],
        ),
        (NODE.replace("price_per_hour = 14", "price_per_hour = inf"), ["gpu_node[1].price_per_hour"]),
        (NODE.replace("gpu_memory_gb_per_s = 2040", "gpu_memory_gb_per_s = 0"), ["gpu_memory_gb_per_s"]),
        (NODE.replace("gpu_memory_gb_per_s = 2040", "gpu_memory_gb_per_s = 2.04"), ["TB/s", "2040"]),
        (NODE.replace("gpu_memory_gb = 80", "gpu_memory_gb = 80e9"), ["gpu_memory_gb", "bytes"]),
        (NODE + "count_min = 9\ncount_max = 3\n", ["count_min 9", "count_max 3"]),
        (NODE + NODE, ["two entries", "A800"]),
        (NODE + "roles = ['prefill']\n", ["no entry of gpu_node may do decode"]),
        ("[[nic]]\ngbps = 0\nincluded = true\n", ["nic[1].gbps", "greater than 0"]),
        ("[[nic]]\ngbps = 100000\nincluded = true\n", ["nic[1].gbps", "Mbit/s", "100"]),
        ("[[nic]]\ngbps = 400\n", ["price_per_hour has to be above 0", "included = true"]),
        ("[[dram]]\ngb = 500\nincluded = true\nprice_per_hour = 1\n", ["contradict"]),
        ("[[ssd]]\ngb = 4000\nprice_per_hour = 1\n", ["read_gb_per_s"]),
        ("speed = 0\n", ["speed", "greater than 0"]),
        ("this is not TOML", ["not TOML"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(PlanInvalid) as caught:
        read(tmp_path, text)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.code == 730


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanInvalid, match="cannot be read"):
        loading.read(tmp_path / "nothing.toml")


@given(st.recursive(st.one_of(st.none(), st.booleans(), st.floats(), st.text(max_size=5)), st.lists))
def test_no_value_at_all_brings_a_traceback(value: Any) -> None:
    for name in ("slo.tbt_s", "model.profile", "search.nodes_max", "workload.rate_per_s"):
        try:
            question = loading.read(None, {name: value})
        except PlanInvalid:
            continue
        assert isinstance(question.spec, Spec)


def test_an_unknown_profile_names_the_nearest() -> None:
    with pytest.raises(ProfileInvalid, match="did you mean llama3-70b-8xa800"):
        loading.measured(loading.read(None, {"model.profile": "llama3-70b-8xa80"}).spec)


def test_a_model_that_does_not_fit_says_how_many_gigabytes_are_missing() -> None:
    small = spec(gpu_node=(node(gpus=2),), search=SearchSpec(gpus_per_instance=(1, 2)))
    measured = loading.measured(small)
    with pytest.raises(ModelDoesNotFit, match=r"141.0 GB.*2 GPUs of A800.*lack 5\.0 GB") as caught:
        machine.engines(measured, (node(gpus=2, gpu_memory_gb=75.56),), (1, 2), 0.9)
    assert caught.value.code == 731
    with pytest.raises(ModelDoesNotFit, match="no machine type"):
        machine.engines(measured, small.gpu_node, (16,), 0.9)


@pytest.mark.parametrize(
    ("slo", "words"),
    [
        (SloSpec(tbt_s=0.02), ["TBT 20 ms", "an empty batch on A800 x8 takes 26.3 ms", "6.3 ms too long"]),
        (SloSpec(tbt_s=0.027), ["TBT 27 ms", "each alone", "ms too long"]),
        (SloSpec(ttft_s=0.1), ["TTFT 0.1 s", "each alone", "s too long"]),
    ],
)
def test_an_slo_beyond_an_idle_cluster_says_which_limit_binds_and_by_how_much(
    slo: SloSpec, words: list[str]
) -> None:
    question = spec(slo=slo)
    finder = searcher(question, demand())
    engines = [finder.families[0].prefill]
    with pytest.raises(SloUnreachable) as caught:
        limits.check_reachable(question, engines, finder.estimator)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.code == 732


def test_prompts_that_no_gpu_holds_are_told_in_gigabytes() -> None:
    question = spec(gpu_node=(node(gpu_memory_gb=20),), slo=SloSpec())
    load = demand()
    finder = searcher(question, load)
    with pytest.raises(SloUnreachable, match=r"KV memory: .* GB are missing"):
        limits.check_reachable(question, [finder.families[0].decode], finder.estimator)


def infeasible(question: Spec, rate_per_s: float) -> PlanInfeasible:
    finder = searcher(question, demand(120, rate_per_s))
    assert not finder.solve(question.slo.attainment)
    return limits.explain_infeasible(question, [finder.families[0].prefill], finder.estimator)


def test_a_budget_that_is_too_small_says_how_much_is_missing() -> None:
    error = infeasible(spec(search=SearchSpec(pipeline_stages=(1,), price_per_hour_max=15.0)), 1.0)
    assert "The budget of 15 per hour binds" in str(error)
    assert "more (" in str(error)
    assert error.code == 733


def test_too_few_machines_says_how_many_are_needed() -> None:
    error = infeasible(spec(gpu_node=(node(count_max=2),)), 20.0)
    assert "The number of machines binds" in str(error)
    assert "for prefill" in str(error)


def test_the_busiest_stretch_is_the_shortest_in_time() -> None:
    calm, busy = trace(60, 0.5), trace(60, 20.0)
    assert busiest(calm, 100) is calm
    cut = busiest(busy, 20)
    assert len(cut) == 20
    windows = [busy.arrival_s[at + 19] - busy.arrival_s[at] for at in range(len(busy) - 19)]
    assert cut.span_s == pytest.approx(min(windows))
    with pytest.raises(PlanInvalid, match="at least 2"):
        busiest(trace(1), 100)


def test_a_made_trace_has_the_rate_lengths_and_reuse_that_were_asked_for() -> None:
    workload = loading.read(
        None,
        {
            "workload.rate_per_s": 3.0,
            "workload.input_tokens_mean": 6000.0,
            "workload.output_tokens_mean": 200.0,
            "workload.reuse": 0.4,
        },
    ).spec.workload
    assert workload is not None
    got = made(workload)
    assert (len(got) - 1) / got.span_s == pytest.approx(3.0, rel=0.01)
    assert got.input_tokens.mean() == pytest.approx(6000, rel=0.05)
    assert got.output_tokens.mean() == pytest.approx(200, rel=0.1)
    assert reusable(got) == pytest.approx(0.4, abs=0.03)
    assert (made(workload).hash_ids == got.hash_ids).all()


def test_options_of_zero_gigabytes_have_no_price() -> None:
    with pytest.raises(ValueError, match="0 GB"):
        Dram(gb=0, price_per_hour=1)
    assert Nic(gbps=100, included=True).bytes_per_s == pytest.approx(100e9 / 8 * 0.87)


POINTS = """
name = "mine"
kv_bytes_per_token = 131072
weights_bytes = 16e9
[prefill]
points = [[1000, 0, 0.11], [4000, 0, 0.42], [16000, 0, 1.9], [16000, 8000, 1.05]]
[decode]
points = [[1, 1000, 0.012], [16, 30000, 0.016], [64, 200000, 0.031]]
"""


def test_a_profile_of_measured_points_can_be_planned_with(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(POINTS, encoding="utf-8")
    question = loading.read(None, {"model.profile": str(path)})
    with pytest.raises(PlanInvalid, match=r"profile mine: gpus is 0; a plan needs to know"):
        loading.measured(question.spec)
    hardware = "gpus = 1\ngpu_tflops = 312\ngpu_memory_bytes = 80e9\ngpu_memory_bytes_per_s = 2.04e12\n"
    path.write_text(hardware + "host_to_device_bytes_per_s = 20e9\n" + POINTS, encoding="utf-8")
    measured = loading.measured(question.spec)["A800"]
    made = machine.engine(measured, node(), 1, 0.9)
    assert made is not None
    assert made.per_node == 8
    assert made.measured
    assert machine.sizes(node(), (), measured) == (1, 8)
