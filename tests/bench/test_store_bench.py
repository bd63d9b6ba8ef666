"""The benchmark runs and its rows are whole. Over very little data: no figure is looked at."""

from __future__ import annotations

import pytest

from mooncache.bench.store import CASES, StoreBenchOptions, run

TINY = StoreBenchOptions(
    repeats=5,
    block_bytes=64 << 10,
    block_count=4,
    small_operations=5,
    chain_keys=50,
    chain_repeats=2,
    index_blocks=(1_000,),
    index_instances=10,
    node_counts=(2,),
    rebuild_blocks=(2_000,),
    rebuild_nodes=2,
    memory_blocks=5_000,
    memory_block_bytes=512,
    eviction_requests=40,
    eviction_blocks=(100,),
    eviction_repeats=1,
)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_case_gives_rows(case: str) -> None:
    reported: list[str] = []
    report = run(TINY, reported.append, only=(case,))
    assert report.rows
    assert reported
    assert all(row.value >= 0 for row in report.rows)
    assert report.machine["cores"]
    assert report.versions["mooncache"]


def test_rebuild_loses_no_get() -> None:
    report = run(TINY, lambda _: None, only=("rebuild",))
    failed = [row for row in report.rows if row.name.endswith("gets failed meanwhile")]
    assert failed
    assert all(row.met for row in failed)
