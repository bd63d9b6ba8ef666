"""The cases of `mooncache bench handover`; the layer-wise save runs here once, for its figures that are no times."""

from __future__ import annotations

import importlib

import pytest

from mooncache.bench import cases
from mooncache.bench import handover as folder
from mooncache.bench.handover import layerwise, sizes, waiting_calls
from mooncache.bench.handover.command import handover


def test_every_case_can_be_loaded_and_says_what_it_is() -> None:
    assert "layerwise" in cases.case_names(folder)
    for name in cases.case_names(folder):
        assert callable(cases.load_case(folder, name))
        assert (importlib.import_module(f"{folder.__name__}.{name}").__doc__ or "").strip()


def test_an_unknown_case_is_refused() -> None:
    assert handover("nothing") == 2


def test_a_layer_wise_save_costs_a_call_for_each_layer() -> None:
    rows = {row.name: row for row in layerwise.run(True, lambda text: None)}
    calls = [row for name, row in rows.items() if name.endswith("calls of the client")]
    assert [row.value for row in calls] == [layerwise.LAYERS + 3] * 2, "exists, reserve, each layer, commit"
    assert all(row.met for row in calls)
    shared = next(row for name, row in rows.items() if "shared memory: requests" in name)
    assert shared.value == 2, "reserve and commit: bytes go past the node"


def test_ranks_of_other_sizes_read_the_numbers_that_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
    monkeypatch.setattr(sizes, "_BLOCKS", 4)
    rows = sizes.run(True, lambda text: None)  # it compares all of them
    assert len(rows) == 8
    assert [row.name for row in rows if row.bar] == [
        "heads before tokens: 1 to 2 ranks, in two parts",
        "heads before tokens: 2 to 1 ranks, in two parts",
    ]


def test_calls_that_come_without_a_leg_are_not_counted_for_it() -> None:
    idle = {"master Heartbeat": 5, "master WatchMap": 1}
    waiting = {"master Heartbeat": 6, "node wait": 1, "node exists": 1, "master WatchMap": 1}
    assert waiting_calls.for_the_leg(idle, waiting) == {"node wait": 1, "node exists": 1}
    polled = {"master Heartbeat": 5, "master WatchMap": 9, "node exists": 100}
    assert waiting_calls.for_the_leg(idle, polled) == {"master WatchMap": 8, "node exists": 100}
    assert waiting_calls.most([{"a": 1}, {"a": 3, "b": 1}, {"b": 2}]) == {"a": 3, "b": 2}
    rounds = [{"node wait": 1, "master WatchMap": 3}, {"node wait": 1, "node exists": 1}, {"node wait": 1}]
    assert waiting_calls.usual(rounds) == {"node wait": 1}
