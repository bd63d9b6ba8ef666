"""The cases of `mooncache bench tiers` at a tiny scale: what they measure is there, whatever the figures are."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from pathlib import Path

import pytest

from mooncache.bench import cases, fio
from mooncache.bench import tiers as folder
from mooncache.bench.tiers import encryption, kept, raw_io, start, writes
from mooncache.bench.tiers.command import tiers
from mooncache.reporting.rows import Row
from tests.conditions import wait_until


def test_every_case_can_be_loaded_and_says_what_it_is() -> None:
    assert set(cases.case_names(folder)) == {
        "raw_io",
        "memory",
        "object_store",
        "stall",
        "writes",
        "start",
        "working_set",
        "kept",
        "tenants",
        "encryption",
    }
    for name in cases.case_names(folder):
        assert callable(cases.load_case(folder, name))
        assert (importlib.import_module(f"{folder.__name__}.{name}").__doc__ or "").strip()


def test_an_unknown_case_is_refused_however_it_is_named() -> None:
    assert tiers("nothing") == 2
    assert tiers(case=("nothing",)) == 2


def test_the_tier_moves_what_it_is_given_and_every_block_is_whole(tmp_path: Path) -> None:
    for _ in range(2):  # the second time on the first one's file
        found = raw_io.tier_rates(tmp_path, 64 << 10, 32 << 20, 0.1)
        assert found["written_bytes_per_s"] > 0 and found["reads_per_s"] > 0
        assert found["admitted_bytes"] >= 32 << 20
        assert found["corrupt_blocks"] == 0


def test_what_encryption_costs_is_compared_and_nothing_goes_down_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encryption, "_QUICK_DISK_BYTES", 64 << 20)
    monkeypatch.setattr(encryption, "_QUICK_SECONDS", 0.1)
    rows = encryption.run(True, lambda text: None)
    assert len([row for row in rows if row.against == "not encrypted"]) == 4
    assert [(row.value, row.met) for row in rows[-2:]] == [(0.0, True), (0.0, True)]


def test_without_fio_the_rest_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mooncache.bench.fio.shutil.which", lambda name: None)
    monkeypatch.setattr(raw_io, "_QUICK_DISK_BYTES", 64 << 20)
    monkeypatch.setattr(raw_io, "_QUICK_SECONDS", 0.1)
    out = tmp_path / "rows.json"
    assert tiers("raw_io", folder=tmp_path, quick=True, json=out) == 0
    rows = json.loads(out.read_text())["rows"]
    assert sum("fio is not installed" in row["name"] for row in rows) == 4
    ours = [row for row in rows if row["name"].endswith("the tier, checksums on")]
    assert len(ours) == 4
    assert all(row["met"] is None for row in ours)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_fio_reads_beside_something_and_ends_with_it(tmp_path: Path) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")

    def running() -> list[str]:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return [child for child in children if Path(f"/proc/{child}/comm").read_text() == "fio\n"]

    file = tmp_path / "fio"
    made = fio.fio(file, "libaio", "randread", block_bytes=4096, file_bytes=1 << 20, depth=1, seconds=0.1)
    assert isinstance(made, fio.FioRates), made
    with fio.fio_beside(file, block_bytes=4096, file_bytes=1 << 20, depth=1, bytes_per_s=1 << 20):
        wait_until(lambda: bool(running()), lambda: "fio does not run")
    assert not running()


def test_fios_figures_are_those_of_its_one_job() -> None:
    sides = {"read": {"bw_bytes": 0, "iops": 0.0}, "write": {"bw_bytes": 4096, "iops": 2.0}}
    text = "fio: a remark\n" + json.dumps({"jobs": [sides]})
    assert fio.parse_fio(text, "libaio") == fio.FioRates(4096.0, 2.0, "libaio")
    with pytest.raises(ValueError):
        fio.parse_fio("fio: no such engine", "libaio")


def test_a_figure_is_compared_with_those_beside_it() -> None:
    assert raw_io.over_neighbours([10.0, 30.0], [5.0, 15.0, 25.0]) == [1.0, 1.5]


def test_a_start_finds_every_record(tmp_path: Path) -> None:
    found = start.index_rebuild(str(tmp_path), 3000)
    assert found["records"] == 3000
    assert found["index_bytes"] / found["records"] <= 64, "a bar that does not depend on the machine"


def test_writes_count_bytes_of_the_disk_and_of_blocks() -> None:
    rows: dict[str, Row] = {row.name: row for row in writes.over_admitted(16 << 20, 64 << 10, 2)}
    written = next(row for name, row in rows.items() if name.endswith("written to the disk"))
    assert written.ratio is not None
    assert written.ratio >= 1.0
    assert written.met, "bytes, not times: the same on every machine"
    assert next(row for name, row in rows.items() if "moved to a newer segment" in name).value > 0


def test_memory_of_a_killed_node_is_adopted() -> None:
    rows = {row.name: row for row in kept.adopted(500, lambda _: None)}
    there = next(row for name, row in rows.items() if "there after its start" in name)
    assert (there.value, there.met) == (500.0, True)
    steps = {name: row.value for name, row in rows.items() if "of the gap" in name}
    assert len(steps) == 8 and all(value_ms >= 0 for value_ms in steps.values())
    assert all(row.value > 0 for name, row in rows.items() if name not in steps)
    gap_s = next(row.value for name, row in rows.items() if "longest gap" in name)
    assert (
        0 < sum(steps.values()) <= gap_s * 1e3 + 50
    )  # the gap begins before the kill; clamps may add a little
