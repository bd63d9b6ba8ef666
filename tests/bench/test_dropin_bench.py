"""Rows of the drop-in beside the original: which of the original's settings they are compared with."""

from __future__ import annotations

from mooncache.bench.store.dropin_case import OURS, rows_of
from mooncache.bench.store.options import StoreBenchOptions


def _figures(original: float) -> dict[str, dict[str, float]]:
    of_one = {**dict.fromkeys(OURS, 2.0), "original, default": original, "original, pool on": 1.0}
    calls = ("batch_put_from", "batch_get_into", "put_from p50", "get_into p50", "batch_is_exist")
    return {call: dict(of_one) for call in calls}


def test_each_call_is_compared_with_the_best_setting_of_the_original() -> None:
    rows = {row.name: row for row in rows_of(_figures(original=4.0), StoreBenchOptions())}
    rate = rows["batch_put_from, 64 x 1024 KiB, drop-in"]
    assert (rate.against, rate.ratio, rate.met) == ("original, default", 0.5, False)
    time = rows["put_from p50, 4096 bytes, drop-in, TCP"]
    assert (time.against, time.ratio, time.met) == ("original, pool on", 2.0, False)
    rows = {row.name: row for row in rows_of(_figures(original=0.5), StoreBenchOptions())}
    assert rows["batch_is_exist, 500 keys, drop-in"].met


def test_without_the_original_no_bar_is_judged() -> None:
    figures = {call: dict.fromkeys(OURS, 2.0) for call in _figures(1.0)}
    rows = rows_of(figures, StoreBenchOptions())
    assert len(rows) == 5 * len(OURS)
    assert all(row.met is None and row.ratio is None for row in rows)
