"""Every scenario runs on a few generated requests and gives rows of the right shape; the laboratory and the command."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mooncache.cli.app import run as cli
from mooncache.errors import ScenarioUnknown
from mooncache.reporting.rows import Row
from mooncache.reproduce import registry
from mooncache.reproduce.experiment import Run, SpeedSearch, capacity, requests, simulated
from mooncache.reproduce.finding import Figure, published
from mooncache.reproduce.lab import Lab
from mooncache.reproduce.workloads import ALL, DATASETS, Sources, documents, load, synthetic
from mooncache.traces import TracePart

FEW = Sources(first=40)


def double(_sources: Sources, item: int) -> int:
    """An experiment for the tests of the laboratory; importable, so that other processes can run it."""
    CALLS.append(item)
    return 2 * item


CALLS: list[int] = []


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab(FEW)


@pytest.mark.parametrize("name", list(registry.scenarios()))
def test_every_scenario_gives_rows(lab: Lab, name: str) -> None:
    sheet = registry.run_one(lab, registry.choose([name])[0])
    rows = sheet.rows()
    assert rows
    assert len({row.name for row in rows}) == len(rows), "names of rows have to be told apart"
    for found, row in zip(sheet.findings, rows, strict=True):
        assert row.name.startswith(f"{name}: ")
        assert set(asdict(row)) == {"name", "value", "unit", "ratio", "against", "bar", "met"}
        if found.paper is not None and found.paper and math.isfinite(row.value):
            assert row.ratio == pytest.approx(row.value / found.paper)
        assert row.bar is not None or row.met is None
    assert sheet.to_markdown().count("\n| ") >= len(rows)


def test_an_unknown_scenario_names_the_nearest() -> None:
    with pytest.raises(ScenarioUnknown, match="did you mean fig9-capacity"):
        registry.choose(["fig9-capacty"])


def test_equal_items_are_run_once_and_in_order() -> None:
    CALLS.clear()
    with Lab(FEW) as one:
        assert one.map(double, [3, 1, 3, 2]) == [6, 2, 6, 4]
        assert one.map(double, [2, 5]) == [4, 10]
    assert CALLS == [3, 1, 2, 5]


def test_processes_do_not_change_a_result() -> None:
    runs = [Run(policy="algorithm1"), Run(policy="random")]
    with Lab(FEW) as one, Lab(FEW, jobs=2) as two:
        alone, together = one.map(simulated, runs), two.map(simulated, runs)
    for a, b in zip(alone, together, strict=True):
        # Sums of columns may differ in the last bit (the order depends on where an array lies), requests may not.
        assert (a.ttft.p50, a.ttft.p99, a.tbt.p99) == (b.ttft.p50, b.ttft.p99, b.tbt.p99)
        assert (a.ttft.mean, a.hit_ratio) == pytest.approx((b.ttft.mean, b.hit_ratio))


def test_halves_have_all_requests_and_begin_at_zero() -> None:
    whole = requests(FEW, Run())
    first, second = (
        requests(FEW, Run(part=TracePart.FIRST_HALF)),
        requests(FEW, Run(part=TracePart.SECOND_HALF)),
    )
    assert len(first) + len(second) == len(whole)
    assert requests(FEW, Run(speed=2.0)).span_s == pytest.approx(whole.span_s / 2)
    assert set(requests(FEW, Run(outputs=1)).output_tokens.tolist()) == {1}


def test_capacity_falls_with_the_promise() -> None:
    """Strict promises are kept at lower speeds only; impossible ones at none."""
    loose = capacity(FEW, SpeedSearch(Run(prefill=1, decode=1), precision=0.3))
    strict = capacity(FEW, SpeedSearch(Run(prefill=1, decode=1, ttft_slo_s=5.0), precision=0.3))
    assert loose >= strict
    assert capacity(FEW, SpeedSearch(Run(ttft_slo_s=0.3))) == 0.0


def test_published_rows_compare_with_the_paper() -> None:
    near, far = published("a", 1.1, "s", 1.0, within=0.2), published("a", 1.3, "s", 1.0, within=0.2)
    assert near.row == Row("a", 1.1, "s", 1.1, "paper 1 s", "within 20% of the paper", True)
    assert far.row.met is False
    assert published("a", math.nan, "s", 1.0, within=0.2).row.met is False
    assert Figure(Row("a", 1.0, "s")).paper is None


def test_datasets_have_their_lengths_and_shares() -> None:
    trace = documents(DATASETS["l-eval"], 1)
    assert float(trace.input_tokens.mean()) == pytest.approx(19_019, rel=0.1)
    assert 1 - len(set(trace.hash_ids.tolist())) / len(trace.hash_ids) > 0.8
    half = documents(DATASETS["simulated-16k"], 1)
    assert set(half.input_tokens.tolist()) == {16_384}
    assert 1 - len(set(half.hash_ids.tolist())) / len(half.hash_ids) == pytest.approx(0.5, abs=0.01)
    alone = documents(DATASETS["arxiv-summarization"], 1)
    assert len(set(alone.hash_ids.tolist())) == len(alone.hash_ids)


def test_stand_in_of_the_synthetic_trace_is_a_trace() -> None:
    trace = synthetic(600, 3.91, 5)
    assert len(trace) == 600
    assert (trace.offsets[1:] - trace.offsets[:-1] == -(-trace.input_tokens // 512)).all()
    parents: dict[int, int] = {}
    for row in range(len(trace)):
        chain = [-1, *trace.blocks(row)]
        for parent, block in pairwise(chain):
            assert parents.setdefault(block, parent) == parent


def test_mixed_traces_share_no_block() -> None:
    trace = load(FEW, ALL)
    assert len(trace) == 3 * 40
    assert (trace.arrival_s[1:] >= trace.arrival_s[:-1]).all()
    parts = [set(load(FEW, name).hash_ids.tolist()) for name in ("conversation", "toolagent", "synthetic")]
    assert len(set(trace.hash_ids.tolist())) == sum(len(part) for part in parts)


def test_command_prints_one_json_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "rows.md"
    assert cli(["reproduce", "break-even", "cpp", "--quick", "--json", "--markdown", str(page)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"rows", "machine", "versions", "notes"} <= set(document)
    assert document["rows"][0]["name"].startswith("break-even: ")
    assert "conversation: generated stand-in" in document["notes"]
    text = page.read_text()
    assert text.startswith("# Reproduction")
    assert text.count("\n## ") == 2


def test_command_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["reproduce", "--list"]) == 0
    assert "fig5-scheduling" in capsys.readouterr().out
    assert cli(["reproduce", "nonsense"]) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--trace", "/nowhere/x"], "--trace: there is no file"), (["--jobs", "-1"], "--jobs")],
)
def test_what_cannot_be_is_said_in_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["reproduce", "table2", *options]) == 2
    assert cli(["reproduce", "tabel2"]) == 2, "1 is a missed bar"
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["policies", "capacity", "table3", "overload"])
def test_what_only_ours_has_is_said_and_ours_without_it_stands_beside(name: str) -> None:
    runs: list[Run] = []

    class Spy(Lab):
        """Answers nothing: it notes which runs are compared."""

        def map(self, _function: Any, items: Any) -> list[Any]:
            runs.extend(getattr(item, "run", item) for item in items)
            return [summary if isinstance(item, Run) else 2.0 for item in items]

    summary = simulated(Sources(first=40), Run(speed=1.0))
    with Spy(Sources()) as spy:
        sheet = registry.run_one(spy, registry.choose([name])[0])
    ours = [run for run in runs if run.policy == "mooncache"]
    for part in {run.part for run in ours}:
        assert {run.roles for run in ours if run.part == part} == {True, False}
    assert not any(run.roles for run in runs if run.policy != "mooncache"), "then a row would have to say so"
    assert any("DRAM" in note and "roles" in note for note in sheet.notes)
