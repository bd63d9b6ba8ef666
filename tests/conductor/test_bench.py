"""The benchmark of the conductor runs and its rows are whole; no figure is looked at."""

from __future__ import annotations

from mooncache.bench.conductor.cases import ConductorBenchOptions, run

TINY = ConductorBenchOptions(
    prompt_tokens=8192,
    prefill_instances=3,
    decode_instances=2,
    index_blocks=10_000,
    conversations=4,
    in_flight=4,
    decisions=12,
)


def test_rows() -> None:
    reported: list[str] = []
    report = run(TINY, reported.append)
    assert len(report.rows) == 2 * 8
    assert all(row.value > 0 for row in report.rows)
    assert [row.name for row in report.rows if row.bar] == [
        "decision p50: 8k tokens, 512 keys, 5 instances",
        "decision p99: 8k tokens, 512 keys, 5 instances",
        "decision p50: 8k tokens, 128 keys, 5 instances",
        "decision p99: 8k tokens, 128 keys, 5 instances",
    ]
    assert reported
    assert "requests in flight" in report.notes[0]
