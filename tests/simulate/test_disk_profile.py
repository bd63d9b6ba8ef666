"""Rates of disks: measured once, and then the same for the simulator and the planner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.bench import disk_calibration
from mooncache.bench.tiers.command import tiers
from mooncache.errors import InvalidArgument, PlanInvalid, ProfileInvalid
from mooncache.plan import loading
from mooncache.simulate import disk_profile, paper_cluster
from mooncache.simulate.disk_profile import DiskProfile

DISK = DiskProfile(read_gb_per_s=2.0, small_read_gb_per_s=1.0, write_gb_per_s=1.5)
RATES = st.floats(0.01, 100)


def test_calibration_writes_what_the_simulator_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_calibration, "_QUICK_DISK_BYTES", 64 << 20)
    monkeypatch.setattr(disk_calibration, "_QUICK_SECONDS", 0.05)
    file = tmp_path / "disk.toml"
    assert tiers(calibrate=file, folder=tmp_path, quick=True) == 0
    found = disk_profile.read(file)
    assert found.disks == 1
    assert min(found.read_gb_per_s, found.small_read_gb_per_s, found.write_gb_per_s) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["disk.toml"], "the blocks are removed"


def test_calibration_refuses_early(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="--calibrate"):
        tiers(calibrate=tmp_path / "no" / "disk.toml", quick=True)
    with pytest.raises(InvalidArgument, match="cases"):
        tiers("raw_io", calibrate=tmp_path / "disk.toml")


def test_a_profile_with_a_corrupt_disk_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"read_bytes_per_s": 1e9, "written_bytes_per_s": 1e9, "corrupt_blocks": 1}
    monkeypatch.setattr(disk_calibration, "tier_rates", lambda *_: rates)
    file = tmp_path / "disk.toml"
    assert tiers(calibrate=file, folder=tmp_path, quick=True) == 1
    assert not file.exists()


def test_the_rate_depends_on_the_size_of_a_block() -> None:
    assert DISK.machine_read_gb_per_s(1 << 20) == pytest.approx(2.0)
    assert DISK.machine_read_gb_per_s(64 << 10) == pytest.approx(1.0)
    assert 1.0 < DISK.machine_read_gb_per_s(256 << 10) < 2.0
    assert DISK.machine_read_gb_per_s(4 << 10) < 0.15
    assert DISK.machine_read_gb_per_s(1 << 30) == 2.0, "never above what was measured"
    assert replace(DISK, disks=3).machine_read_gb_per_s(1 << 20) == pytest.approx(6.0)


@given(RATES, RATES, st.floats(1, 1e12))
def test_any_two_measurements_give_a_rate(large: float, small: float, block_bytes: float) -> None:
    rate = DiskProfile(large, small, 1.0).machine_read_gb_per_s(block_bytes)
    assert 0 < rate <= max(large, small) * (1 + 1e-9)


@given(RATES, RATES, RATES, st.integers(1, 64))
def test_a_written_profile_is_read_back(read: float, small: float, write: float, disks: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "disk.toml"
        file.write_text(DiskProfile(read, small, write, disks).to_toml("a remark"), encoding="utf-8")
        back = disk_profile.read(file)
    assert back.disks == disks
    assert (back.read_gb_per_s, back.small_read_gb_per_s, back.write_gb_per_s) == pytest.approx(
        (read, small, write), rel=1e-3
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("read_gb_per_s = 1\nwrite_gb_per_s = 1\n", "small_read_gb_per_s is missing"),
        ("read_gbps = 1\n", "read_gb_per_s"),
        ("read_gb_per_s = 'fast'\nsmall_read_gb_per_s = 1\nwrite_gb_per_s = 1\n", "not a number"),
        ("read_gb_per_s = nan\nsmall_read_gb_per_s = 1\nwrite_gb_per_s = 1\n", "nan GB/s"),
        ("read_gb_per_s = -1\nsmall_read_gb_per_s = 1\nwrite_gb_per_s = 1\n", "above 0"),
        ("disks = 0\nread_gb_per_s = 1\nsmall_read_gb_per_s = 1\nwrite_gb_per_s = 1\n", "1 to 64"),
        ("disks = 1.5\nread_gb_per_s = 1\nsmall_read_gb_per_s = 1\nwrite_gb_per_s = 1\n", "whole number"),
        ("[[", "not TOML"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "disk.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ProfileInvalid, match=words):
        disk_profile.read(file)


def test_a_simulated_cluster_gets_the_rates() -> None:
    with pytest.raises(ProfileInvalid, match="no disks"):
        disk_profile.with_disks(paper_cluster(1, 1), DISK)
    spec = paper_cluster(1, 1)
    groups = tuple(replace(group, ssd_blocks=100) for group in spec.instances)
    for group in disk_profile.with_disks(replace(spec, instances=groups), DISK).check().instances:
        assert (group.ssd_read_gbytes_per_s, group.ssd_write_gbytes_per_s) == (2.0, 1.5)
    slower = tuple(replace(group, ssd_write_gbytes_per_s=0.5) for group in groups)
    for group in disk_profile.with_disks(replace(spec, instances=slower), DISK).instances:
        assert group.ssd_write_gbytes_per_s == 0.5, "a budget below what the disk can do"


def test_a_plan_gets_the_rates(tmp_path: Path) -> None:
    file = tmp_path / "disk.toml"
    file.write_text(replace(DISK, disks=2).to_toml(), encoding="utf-8")
    bought = [disk for disk in loading.read(None, disk=file).spec.ssd if disk.gb]
    assert bought
    assert {(disk.read_gb_per_s, disk.write_gb_per_s) for disk in bought} == {(4.0, 3.0)}
    question = tmp_path / "spec.toml"
    row = f'[[ssd]]\ngb = 4000\nprice_per_hour = 1\nprofile = "{file}"\n'
    question.write_text(row, encoding="utf-8")
    assert [disk.read_gb_per_s for disk in loading.read(question).spec.ssd] == [4.0]
    question.write_text(row + "read_gb_per_s = 3\n", encoding="utf-8")
    with pytest.raises(PlanInvalid, match="contradict"):
        loading.read(question)
    question.write_text("[[ssd]]\ngb = 4000\nprice_per_hour = 1\nprofile = 3\n", encoding="utf-8")
    with pytest.raises(PlanInvalid, match="name of a file"):
        loading.read(question)
