"""Whole plans: the model against the simulator, prices that add up, files that load, the command."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.cli.app import run
from mooncache.cli.plan import show
from mooncache.config import explain, load
from mooncache.plan import files, loading, simulation, words
from mooncache.plan.answer import PlanReport, document_of
from mooncache.plan.core import variants
from mooncache.plan.core.estimate import Layout
from mooncache.plan.core.prices import cost_per_hour, token_prices
from mooncache.plan.core.search import Plan
from mooncache.plan.core.spec import Arrangement, SearchSpec, SloSpec, Spec
from mooncache.plan.example import toml
from mooncache.plan.page import page
from mooncache.plan.run import Effort, Planner
from mooncache.plan.workload import demand_of
from mooncache.prices.core.hardware import Dram, Ssd
from mooncache.simulate.description import read as read_cluster
from mooncache.simulate.description import to_toml
from mooncache.traces import write
from tests.plan.builders import node, searcher, spec, trace

MODEL_ERROR = 0.06  # the statistical model's stated error in attainment
BASES = {"A800": loading.find_profile("llama3-70b-8xa800")}


def question() -> Spec:
    return spec(
        gpu_node=(node(count_max=12),),
        search=SearchSpec(pipeline_stages=(1,), nodes_max=14),
        dram=(Dram(gb=250, included=True), Dram(gb=1000, price_per_hour=1.0)),
        slo=SloSpec(ttft_s=10, tbt_s=0.08, attainment=0.9),
    )


@cache
def answered() -> tuple[Planner, PlanReport]:
    asked = loading.Question(question(), ())
    planner = Planner(trace(400, 2.5, seed=3), asked, "a test")
    return planner, planner.answer(Effort(finalists=1, runs_max=6, seeds=2))


@pytest.mark.parametrize(
    ("rate_per_s", "prefill", "decode", "dram_gb"),
    [(1.0, 3, 1, 1000.0), (2.5, 4, 1, 250.0), (2.5, 5, 2, 1000.0), (5.0, 8, 2, 500.0)],
)
def test_the_model_agrees_with_the_simulator(
    rate_per_s: float, prefill: int, decode: int, dram_gb: float
) -> None:
    asked = spec(slo=SloSpec(ttft_s=15, tbt_s=0.1, attainment=0.9))
    played = trace(500, rate_per_s, seed=7)
    finder = searcher(asked, demand_of(played))
    layout: Layout = replace(
        finder.families[0], prefill_nodes=prefill, decode_nodes=decode, dram=Dram(gb=dram_gb, included=True)
    )
    expected = finder.estimator.estimate(layout)
    cluster = simulation.cluster_of(layout, BASES, asked.slo, played.block_tokens)
    seen, _ = simulation.run(played, cluster, asked.slo, 1)
    assert expected.attainment == pytest.approx(seen.attainment, abs=MODEL_ERROR)
    assert expected.hit_ratio == pytest.approx(seen.hit_ratio, abs=0.06)
    if seen.attainment > 0.98:
        assert seen.ttft_mean_s == pytest.approx(expected.ttft_mean_s, rel=0.5)
        assert expected.tbt_mean_s == pytest.approx(seen.tbt_mean_s, rel=0.15)


def test_the_model_is_careful_about_an_overloaded_cluster() -> None:
    asked = spec(slo=SloSpec(ttft_s=15, tbt_s=0.1, attainment=0.9))
    played = trace(500, 6.0, seed=7)
    finder = searcher(asked, demand_of(played))
    layout = replace(finder.families[0], prefill_nodes=6, decode_nodes=2)
    seen, _ = simulation.run(
        played, simulation.cluster_of(layout, BASES, asked.slo, played.block_tokens), asked.slo, 1
    )
    expected = finder.estimator.estimate(layout)
    assert expected.attainment < 0.95
    assert expected.admitted < 1
    assert expected.attainment <= seen.attainment + MODEL_ERROR


def test_prices_of_tokens_add_up_to_the_price_of_the_cluster() -> None:
    asked = question()
    finder = searcher(asked, demand_of(trace(300, 2.0)))
    for family in finder.families:
        layout = replace(
            family, prefill_nodes=4, decode_nodes=2, ssd=Ssd(gb=4000, read_gb_per_s=6, price_per_hour=0.3)
        )
        estimator = finder.estimator
        prices = token_prices(asked, layout, estimator)
        admitted, _ = estimator.admitted(layout)
        rows, hours = estimator.rows(admitted), estimator.demand.span_s / 3600
        cached = float(estimator.first_tokens(layout, admitted).cached.sum())
        tokens = float(estimator.demand.input_tokens[rows].sum())
        paid = (
            (prices.input or 0) * (tokens - cached)
            + (prices.cached or 0) * cached
            + (prices.output or 0) * float(estimator.demand.output_tokens[rows].sum())
        ) / 1e6
        assert paid / hours == pytest.approx(cost_per_hour(asked, layout))
        assert (prices.input or 0) < (prices.output or 0)


def test_machines_that_are_there_anyway_are_paid_for() -> None:
    asked = question()
    more = asked.model_copy(update={"gpu_node": (asked.gpu_node[0].model_copy(update={"count_min": 4}),)})
    layout = searcher(asked, demand_of(trace(50))).families[0]
    assert cost_per_hour(asked, layout) == pytest.approx(2 * 10.0 + 2 * 0.4)
    assert cost_per_hour(more, layout) == pytest.approx(4 * 10.0 + 2 * 0.4)


def test_the_best_plan_is_confirmed_and_its_certainty_has_numbers() -> None:
    _, answer = answered()
    assert answer.best.simulated is not None
    assert answer.best.simulated >= answer.spec.slo.attainment
    certainty = answer.certainty
    assert certainty is not None
    assert certainty.attainment_gap == pytest.approx(answer.best.estimate.attainment - answer.best.simulated)
    assert certainty.seeds_low <= answer.best.simulated <= certainty.seeds_high
    assert len(certainty.halves) == 2
    assert any("15 min" in doubt for doubt in certainty.doubts)
    assert [run.part for run in answer.best.runs] == ["whole", "whole", "first half", "second half"]


def _plan(nodes: tuple[int, int], engine: str = "same", cost: float | None = None) -> Plan:
    finder = searcher(question(), demand_of(trace(50)))
    family = finder.families[0]
    other = replace(family.decode, node=node(engine)) if engine != "same" else family.decode
    layout = replace(family, prefill_nodes=nodes[0], decode_nodes=nodes[1], decode=other)
    return Plan(layout, float(sum(nodes)) if cost is None else cost, 1.0)


@given(st.integers(2, 8), st.integers(1, 4), st.floats(2.0, 12.0))
def test_variants_are_never_dearer_and_end_at_the_first_that_misses(
    prefill: int, decode: int, needed: float
) -> None:
    best = _plan((prefill, decode))
    plans = [_plan((prefill + 2, decode + 1)), best]
    tried: list[Layout] = []

    def simulate(layout: Layout) -> float:
        tried.append(layout)
        return 1.0 if layout.nodes >= needed else 0.0

    def plan_of(layout: Layout) -> Plan:
        return Plan(layout, float(layout.nodes), 0.0)

    done = variants.explore(("switching", "both"), plans, best, 0.9, plan_of, simulate)
    assert [plan.layout for plan, _ in done] == tried
    for kind in ("switching", "both"):
        nodes = [layout.nodes for layout in tried if layout.arrangement == kind]
        assert nodes == list(range(best.layout.nodes, best.layout.nodes - len(nodes), -1))
        assert 1 <= len(nodes) <= variants.RUNS_EACH
        assert all(count >= needed for count in nodes[:-1]), "it went on behind one that missed"
    chosen = variants.cheapest(best, done, 0.9)
    assert chosen.cost_per_hour <= best.cost_per_hour
    assert chosen is best or chosen.layout.nodes >= needed


def test_machines_of_two_kinds_cannot_change_places() -> None:
    best = _plan((2, 1), engine="H20")
    assert variants.explore(("switching",), [best], best, 0.9, lambda _: None, lambda _: 1.0) == []


@pytest.mark.parametrize("arrangement", [Arrangement.SWITCHING, Arrangement.BOTH])
def test_a_variant_is_a_cluster_a_configuration_and_words(arrangement: Arrangement) -> None:
    planner, answer = answered()
    seen = {finalist.plan.layout.arrangement for finalist in answer.finalists}
    assert seen == {"fixed", "switching", "both"}
    layout = replace(answer.best.plan.layout, arrangement=arrangement)
    cluster = simulation.cluster_of(layout, planner.bases, planner.spec.slo, 512)
    assert cluster.count == layout.prefill_instances + layout.decode_instances
    assert cluster.roles.enabled == (arrangement == "switching")
    assert {group.role for group in cluster.instances} == (
        {"both"} if arrangement == "both" else {"prefill", "decode"}
    )
    finalist = next(f for f in answer.finalists if f.plan.layout.arrangement == arrangement)
    chosen = replace(answer, best=finalist)
    config = files.check(files.config_toml(chosen))
    assert config.conductor.rebalance_roles == (arrangement == "switching")
    assert words.finalist_row(finalist, "2")[5] == "-", "a number of the model, which knows fixed roles only"
    assert ("role=both" in files.config_toml(chosen).lower()) == (arrangement == "both")
    assert page(chosen, "").count("<svg") == 5


def test_what_no_service_can_do_is_said() -> None:
    _, answer = answered()
    assert "NOT SET HERE" not in files.config_toml(answer)
    disk = Ssd(gb=4000, read_gb_per_s=6, price_per_hour=0.3)
    layout = replace(answer.best.plan.layout, ssd=disk, stages=2)
    best = replace(answer.best, plan=replace(answer.best.plan, layout=layout))
    text = files.config_toml(replace(answer, best=best))
    assert text.count("NOT SET HERE") == 1, "pipelines"
    cluster = simulation.cluster_of(layout, BASES, answer.spec.slo, 512)
    reported = to_toml(cluster)
    assert "ssd_blocks" in reported
    assert "pipeline_size = 2" in reported


def test_disks_of_a_plan_are_what_store_nodes_run() -> None:
    _, answer = answered()
    layout = replace(answer.best.plan.layout, ssd=Ssd(gb=4000, read_gb_per_s=6, price_per_hour=0.3))
    best = replace(answer.best, plan=replace(answer.best.plan, layout=layout))
    text = files.config_toml(replace(answer, best=best))
    assert "NOT SET HERE" not in text
    assert files.check(text).store_node.ssd_bytes == 4_000_000_000_000
    assert files.up_command(layout).endswith(" --ssd 4000GB")
    assert "ssd_bytes" not in files.config_toml(answer)


def test_numbers_of_an_overloaded_cluster_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    _, answer = answered()
    fixed = answer.frontier[-1]
    over = replace(fixed, estimate=replace(fixed.estimate, admitted=0.7))
    assert words.pareto_row(over)[1].startswith("~")
    assert document_of(replace(answer, best=over))["best"]["model"]["overloaded"]
    show(replace(answer, frontier=(over,)))
    assert "can be far off" in " ".join(capsys.readouterr().out.split())


def test_the_same_question_has_the_same_answer() -> None:
    planner, answer = answered()
    again = Planner(trace(400, 2.5, seed=3), loading.Question(question(), ()), "a test").answer(
        Effort(finalists=1, runs_max=6, seeds=2)
    )

    def timeless(text: str) -> str:
        return re.sub(r'"wall_s": [^,}]*', "", text)

    assert timeless(json.dumps(document_of(again))) == timeless(json.dumps(document_of(answer)))
    assert planner.spec == answer.spec


def test_the_configuration_loads_and_explains(tmp_path: Path) -> None:
    _, answer = answered()
    path = tmp_path / "mooncache.toml"
    path.write_text(files.config_toml(answer), encoding="utf-8")
    config = load(path, env={})
    rows = {row.name: row for row in explain(config)}
    assert rows["conductor.ttft_slo_s"].value == answer.spec.slo.ttft_s
    assert rows["conductor.tbt_slo_s"].source == str(path)
    assert config.store_node.capacity_bytes == answer.best.plan.layout.dram.gb * 1e9
    assert config.vllm.extra_args == ("--tensor-parallel-size", "8")


def test_the_cluster_is_one_that_the_simulator_reads(tmp_path: Path) -> None:
    planner, answer = answered()
    cluster = files.cluster(answer, planner.bases, 512)
    path = tmp_path / "cluster.toml"
    path.write_text(to_toml(cluster), encoding="utf-8")
    assert to_toml(read_cluster(path)) == to_toml(cluster)
    layout = answer.best.plan.layout
    assert cluster.count == layout.prefill_instances + layout.decode_instances


def test_the_page_needs_nothing_else() -> None:
    _, answer = answered()
    text = page(answer, files.config_toml(answer))
    assert text.count("<svg") == 5
    assert not re.search(r'(src|href)="?https?:', text)
    assert "<script" not in text
    assert "Made-up" not in text


def test_the_command_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out, html = tmp_path / "trace.jsonl", tmp_path / "plan", tmp_path / "plan.html"
    write(trace(150, 1.0), path)
    hardware = tmp_path / "hardware.toml"
    hardware.write_text(toml(question()), encoding="utf-8")
    words = ["plan", "--trace", str(path), "--spec", str(hardware), "--seeds", "1"]
    assert run([*words, "--finalists", "1", "--json", "--out", str(out), "--html", str(html)]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["best"]["cost_per_hour"] > 0
    assert reported["best"]["simulator"][0]["attainment"] >= 0.9
    assert set(reported["best"]["cost_per_million"]) == {"input", "cached", "output", "all"}
    assert reported["certainty"]["word"] in {"high", "fair", "low"}
    assert sorted(Path(name).name for name in reported["files"]) == [
        "cluster.toml",
        "mooncache.toml",
        "plan.html",
    ]
    tomllib.loads((out / "mooncache.toml").read_text(encoding="utf-8"))
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert run([*words, "--finalists", "0"]) == 0
    assert "the statistical model alone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["plan"], 2, "Nothing to plan for"),
        (["plan", "--rate", "2", "--tbt", "15ms", "--finalists", "0"], 1, "an empty batch on H20 x8 takes"),
        (["plan", "--rate", "2", "--tbt", "100", "--finalists", "0"], 2, "milliseconds"),
        (["plan", "--rate", "2", "--ttft", "soon"], 2, "--ttft"),
        (["plan", "--rate", "-2"], 2, "greater than 0"),
        (["plan", "--rate", "nan"], 2, "workload.rate_per_s"),
        (["plan", "--trace", "x.jsonl", "--rate", "2"], 2, "contradict"),
        (["plan", "--trace", "/nowhere/x.jsonl"], 2, "cannot be read"),
        (["plan", "--rate", "2", "--profile", "none", "--finalists", "0"], 2, "no model profile"),
        (["plan", "--rate", "2", "--html", "/nowhere/x.html"], 2, "cannot be written"),
        (["plan", "--rate", "2", "--budget", "1", "--finalists", "0"], 1, "The budget of 1 per hour binds"),
    ],
)
def test_errors_are_sentences(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == code
    assert said in " ".join(capsys.readouterr().err.split())
    assert run([*words, "--json"]) == code
    assert "code" in json.loads(capsys.readouterr().out)["error"]


def test_the_sample_file_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["plan", "--example"]) == 0
    path = tmp_path / "hardware.toml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert loading.read(path).spec.gpu_node[0].name == "A800"
