"""What `reproduce` says without a simulation: known analytic values, counting, and the exact rows of the real trace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mooncache.reproduce import registry
from mooncache.reproduce.finding import Sheet
from mooncache.reproduce.lab import Lab
from mooncache.reproduce.scenarios.calibration import break_even_gb_per_s, decode_s
from mooncache.reproduce.scenarios.hit_ratio import measure
from mooncache.reproduce.setting import PROFILE
from mooncache.reproduce.workloads import Sources
from mooncache.traces import read

ROOT = Path(__file__).resolve().parent.parent.parent


def real_trace() -> Path:
    """The public conversation trace, when it is at hand."""
    named = os.environ.get("MOONCACHE_TRACE")
    path = Path(named) if named else ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip("the public conversation trace is not here: set MOONCACHE_TRACE to its path")
    return path


def sheet_of(name: str) -> Sheet:
    with Lab(Sources(first=300)) as lab:
        return registry.run_one(lab, registry.choose([name])[0])


def values(sheet: Sheet) -> dict[str, float]:
    return {found.row.name: found.row.value for found in sheet.findings}


def test_break_even_of_the_paper() -> None:
    assert break_even_gb_per_s(8192, 8 * 312.0) == pytest.approx(5.86, abs=0.005)
    assert break_even_gb_per_s(8192, 8 * 989.0) == pytest.approx(18.57, abs=0.005)
    assert all(found.row.met is not False for found in sheet_of("break-even").findings)


def test_the_profile_fits_all_ten_points_of_figure_14() -> None:
    rows = [found.row for found in sheet_of("fig14").findings if found.row.bar]
    assert len(rows) == 10
    assert all(row.met for row in rows), [row.name for row in rows if not row.met]
    assert values(sheet_of("fig14"))["prefill, largest difference of the ten points"] <= 0.045


def test_decode_steps_of_figure_14() -> None:
    assert 128 * decode_s(1, 128 * 1024) == pytest.approx(3.937, rel=0.01)
    assert PROFILE.prefill.seconds(8192, 0) == pytest.approx(1.005, rel=0.045)


def test_long_prompts_gain_from_pipelines_and_never_more_than_the_nodes() -> None:
    found = values(sheet_of("cpp"))
    speed_ups = {name: value for name, value in found.items() if name.endswith("speed-up")}
    assert len(speed_ups) == 9
    for name, value in speed_ups.items():
        nodes = int(name.split(", ")[1].split()[0])
        assert 1.0 < value <= nodes, name
    shares = [value for name, value in found.items() if "128k" in name and name.endswith("computes")]
    assert min(shares) > 0.75


def test_stand_ins_are_marked_and_come_near_what_they_stand_for() -> None:
    sheet = sheet_of("table2")
    assert all(found.stand_in for found in sheet.findings)
    assert all("[generated requests]" in row.name for row in sheet.rows())
    with Lab(Sources()) as lab:
        whole = registry.run_one(lab, registry.choose(["table2"])[0])
    for found in whole.findings:
        if found.paper is not None:
            assert found.row.ratio == pytest.approx(1.0, abs=0.25), found.row.name


def test_real_trace_lru_is_exact() -> None:
    trace = read(real_trace()).spread()
    assert measure(trace, "lru", 10_000).blocks == pytest.approx(0.2116, abs=0.0001)
    assert measure(trace, "lru", 1_000).blocks == pytest.approx(0.045, abs=0.001)


def test_real_trace_statistics_are_the_papers() -> None:
    with Lab(Sources(conversation=real_trace())) as lab:
        sheet = registry.run_one(lab, registry.choose(["table2"])[0])
    found = values(sheet)
    assert found["conversation: requests"] == 12_031
    assert found["conversation: input tokens, mean"] == pytest.approx(12_035, abs=1)
    assert found["conversation: reusable share of input tokens"] == pytest.approx(0.3736, abs=0.0005)
    assert not any(one.stand_in for one in sheet.findings if one.row.name.startswith("conversation"))
