"""The cases of `mooncache bench handover`; the layer-wise save runs here once, for its figures that are no times."""

from __future__ import annotations

import importlib

from mooncache.bench import cases
from mooncache.bench import handover as folder
from mooncache.bench.handover import layerwise
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
