"""Loads from Prometheus pages, those of both engines as they were captured, and means over a window."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.conductor.core.learning import DecodeLearner
from mooncache.kvcache.instance_load import InstanceLoad
from mooncache.worker.adapters.hf import HfAdapter
from mooncache.worker.adapters.vllm import VllmAdapter
from mooncache.worker.core.load import LoadMeter, MetricNames, read_labels, read_page

PAGES = Path(__file__).with_name("pages")
NAMES = MetricNames(
    waiting=("w",), running=("r",), kv_usage=("u",), ttft=("t",), tbt=("b",), prompt_tokens=("p", "q")
)


@pytest.mark.parametrize(("adapter", "file"), [(VllmAdapter, "vllm.txt"), (HfAdapter, "hf.txt")])
def test_captured_pages(adapter: type[VllmAdapter | HfAdapter], file: str) -> None:
    """Two equal requests of 200 prompt tokens, 8 tokens answered each: see the pages' first lines."""
    text = (PAGES / file).read_text()
    found = read_page(text, adapter.metrics.wanted())
    assert set(found) == adapter.metrics.wanted(), "every name is on the page"
    meter = LoadMeter(adapter.metrics)
    meter.reset(0.0)
    load = meter.take(found, 1.0)
    assert (load.waiting, load.running) == (0, 0)
    assert load.output_tokens_total == 16
    assert load.local_hit_tokens_total == 192
    assert load.prompt_tokens_total == 400 - 192
    assert load.pool_hit_tokens_total == 0
    assert 0 < load.ttft_ms < 60_000
    assert 0 < load.tbt_ms < 60_000


def test_labels_of_an_info_metric() -> None:
    labels = read_labels((PAGES / "vllm.txt").read_text(), "vllm:cache_config_info")
    assert labels["block_size"] == "32"
    assert int(labels["num_gpu_blocks"]) > 0
    assert read_labels("nothing", "vllm:cache_config_info") == {}


def test_label_sets_are_added_up() -> None:
    text = '# HELP r x\nr{engine="0"} 2\nr{engine="1",odd="a } b"} 3.0 1700000000\nrr 9\nw 1e1\nu NaN\np +Inf\nq x\n'
    assert read_page(text, NAMES.wanted()) == {"r": 5.0, "w": 10.0}


def page(**values: float) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def test_means_are_those_of_the_window() -> None:
    meter = LoadMeter(NAMES, window_s=10)
    assert meter.take(page(t_sum=100, t_count=10), 0).ttft_ms == 0
    assert meter.take(page(t_sum=101, t_count=12, b_sum=1, b_count=100), 5) == InstanceLoad(
        ttft_ms=500, tbt_ms=10
    )
    assert meter.take(page(t_sum=101, t_count=12, b_sum=1, b_count=100), 14).ttft_ms == 500
    assert meter.take(page(t_sum=104, t_count=13, b_sum=1, b_count=100), 15).ttft_ms == 3000
    assert meter.take(page(t_sum=104, t_count=13, b_sum=1, b_count=100), 60).ttft_ms == 0


@pytest.mark.parametrize(("before_s", "after_s"), [(0.02, 0.2), (0.2, 0.02)])
def test_the_expected_time_between_tokens_follows_a_change_of_speed(before_s: float, after_s: float) -> None:
    """Reports come four times a second. Both ways the conductor expects what is true after six seconds."""
    meter, learner, sequences = LoadMeter(NAMES), DecodeLearner(), 4
    total_s, count = 0.0, 0

    def seconds(step_s: float, reports: range) -> None:
        nonlocal total_s, count
        for report in reports:
            total_s, count = total_s + 0.25 * sequences, count + round(0.25 * sequences / step_s)
            load = meter.take(page(b_sum=total_s, b_count=count), report * 0.25)
            if load.tbt_ms > 0:
                learner.observe(sequences, 1000, load.tbt_ms / 1e3)

    seconds(before_s, range(240))
    assert learner.cost.tbt_s(sequences, 1000) == pytest.approx(before_s, rel=0.05)
    seconds(after_s, range(240, 264))
    assert learner.cost.tbt_s(sequences, 1000) == pytest.approx(after_s, rel=0.15)


def test_a_counter_that_falls_begins_a_new_window() -> None:
    meter = LoadMeter(NAMES, window_s=10)
    meter.take(page(t_sum=100, t_count=10), 0)
    assert meter.take(page(t_sum=1, t_count=1), 1).ttft_ms == 0
    assert meter.take(page(t_sum=3, t_count=2), 2).ttft_ms == 2000


def test_numbers_are_kept_in_their_ranges() -> None:
    load = LoadMeter(NAMES).take(page(w=-5, r=1e30, u=7, p=1e300, q=1), 0)
    assert load == InstanceLoad(running=(1 << 32) - 1, kv_usage=1.0, prompt_tokens_total=(1 << 63) - 1)
    assert not load.idle


@given(st.text(alphabet='rw{}="\\, 0123456789.eE+-\n#', max_size=200))
def test_no_text_does_harm(text: str) -> None:
    LoadMeter(NAMES).take(read_page(text, NAMES.wanted()), 0)
    read_labels(text, "r")
