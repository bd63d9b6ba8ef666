"""The GPU benchmark over a fake driver, its engine case on the CPU with a tiny model, and what is said without a
GPU. Rates of a fake GPU say nothing; that bytes and checksums are compared first, says something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mooncache.bench.gpu import checks, copies, engine_case
from mooncache.bench.transfer.command import transfer
from mooncache.client import staging
from mooncache.errors import ChecksumMismatch, TransportUnavailable
from mooncache.reporting.rows import Report
from tests.gpu.fake_gpu import FakeGpu, library

SMALL = copies.CopyOptions(buffer_bytes=1 << 18, slice_bytes=(4096, 65_536), buffers=3, rounds=2)
TINY = engine_case.EngineOptions(
    device="cpu",
    layers=2,
    hidden=128,
    heads=4,
    kv_heads=2,
    vocab=2048,
    prompts=(100, 200),
    new_tokens=6,
    block_tokens=16,
    chunk_tokens=64,
    kv_cache_bytes=16 << 20,
    pool_bytes=64 << 20,
    wait_s=60.0,
)


def no_gpu(_ordinal: int) -> Any:
    raise TransportUnavailable("CUDA unavailable, because this test says so.")


@pytest.mark.parametrize("kernel", [True, False])
def test_every_row_has_its_bar(kernel: bool) -> None:
    gpu = FakeGpu(kernel=kernel)
    report = Report("")
    copies.measure(report, SMALL, lambda _: None, device=gpu.device, library=library())
    rows = {row.name: row for row in report.rows}
    assert report.machine["gpu"] == "Fake GPU"
    assert len(rows) == 3 + 2 * (1 + len(SMALL.slice_bytes))
    for way in ("D2H", "H2D"):
        assert rows[f"staging {way} 256 KiB"].bar == f"at least 0.9x pinned cudaMemcpyAsync {way} 256 KiB"
        gathers = [row for name, row in rows.items() if name.startswith(f"gather+CRC {way}")]
        assert all(row.bar and row.bar.startswith("at least 0.8x ") for row in gathers)
    assert all(row.value > 0 for row in report.rows)


def test_wrong_checksums_are_no_rate() -> None:
    gpu = FakeGpu(kernel=True)
    gpu.wrong_kernel(True)
    try:
        with pytest.raises(ChecksumMismatch):
            copies.measure(Report(""), SMALL, lambda _: None, device=gpu.device, library=library())
    finally:
        gpu.restore()


def test_without_a_gpu_the_command_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(staging, "open_device", no_gpu)
    assert transfer(memory="cuda", json=tmp_path / "rows.json") == 1
    assert "CUDA unavailable, because this test says so" in capsys.readouterr().out
    assert json.loads((tmp_path / "rows.json").read_text())["notes"]
    assert transfer(memory="tape") == 2


def test_what_one_check_meets_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(staging, "open_device", no_gpu)

    def broken(_report: Report, _progress: Any) -> dict[str, Any]:
        raise RuntimeError("oh")

    wanted = {"copies": checks.copy_rates, "broken": broken, "fine": lambda *_: {"answer": 1}}
    result = checks.run(wanted, lambda _: None)
    assert result["checks"]["copies"]["why"] == "CUDA unavailable, because this test says so."
    assert result["checks"]["broken"]["why"] == "RuntimeError: oh"
    assert result["checks"]["fine"]["ok"] and result["checks"]["fine"]["answer"] == 1
    checks.write(result, tmp_path / "checks.json")
    assert json.loads((tmp_path / "checks.json").read_text())["checks"]["fine"]["ok"]
    monkeypatch.setattr(checks, "SECONDS_MAX", -1.0)
    assert "left out" in checks.run(wanted, lambda _: None)["checks"]["fine"]["why"]


def test_an_engine_says_the_same_with_and_without_the_pool() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    report = Report("")
    result = checks.engine(report, lambda _: None, TINY)
    assert result["ok"], (report.rows, report.notes)
    rows = {row.name: row for row in report.rows}
    assert rows["prompts of 2 with the same tokens"].value == 2
    assert (
        rows["first token of 100 tokens, 96 from the pool"].against == "first token of 100 tokens, computed"
    )
    assert "first token of 200 tokens, 192 from the pool" in rows


def test_prompts_end_when_the_time_is_over() -> None:
    report = Report("")
    one = engine_case.Pass([1, 2], 0.5, 0)
    engine_case._add_rows(report, TINY, {100: one, 200: one}, {100: engine_case.Pass([1, 3], 0.1, 96)})
    assert report.rows[0].value == 0 and report.rows[0].met is False
    assert report.notes == ["prompts were measured up to 100 tokens: the time was over"]
