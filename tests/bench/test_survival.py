"""The cases of `mooncache bench survival` can be chosen by name, and each can be loaded and says what it measures."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from mooncache.bench import cases
from mooncache.bench import survival as folder
from mooncache.bench.survival import chaos, simulation
from mooncache.bench.survival.command import survival
from mooncache.errors import Internal
from mooncache.reporting.rows import Row


@pytest.mark.parametrize("name", cases.case_names(folder))
def test_each_case_can_be_loaded_and_has_a_sentence(name: str) -> None:
    assert callable(cases.load_case(folder, name))
    text = importlib.import_module(f"{folder.__name__}.{name}").__doc__
    assert text is not None
    assert text.partition("\n")[0].endswith(".")


def test_an_unknown_case_is_a_wrong_argument() -> None:
    assert survival("nothing-of-that-name") == 2


def test_rows_begin_with_the_name_of_their_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "load_case", lambda _folder, name: lambda *_: [Row("seen", 1.0, "")])
    path = tmp_path / "rows.json"
    assert survival("node", "repair", json=path) == 0
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == ["node: seen", "repair: seen"]


def by_name(rows: list[Row]) -> dict[str, tuple[float, bool | None]]:
    return {row.name: (row.value, row.met) for row in rows}


@pytest.mark.parametrize(("wrong", "met"), [(0, True), (2, False)])
def test_figures_of_a_chaos_run(wrong: int, *, met: bool) -> None:
    promises = [
        {"promise": "no wrong token", "kept": not wrong, "seen": ""},
        {"promise": "no pin is left", "kept": False, "seen": "1 pins"},
    ]
    rows = by_name(
        chaos.rows_of(
            {
                "promises": promises,
                "requests": {"right": 7, "failed": 1, "wrong": wrong},
                "faults": [{}, {}],
                "blocks": {"read": 90},
            }
        )
    )
    assert rows["wrong answers"] == (wrong, met)
    assert rows["broken promises that no wrong token or byte is served"] == (bool(wrong), met)
    assert rows["broken promises, of all"] == (1 + bool(wrong), False)
    assert rows["faults"] == (2, None)


def test_figures_of_simulated_clusters() -> None:
    said = (
        "FAILED last copy: x  repeat: python -m tests.simulation --seeds 3\n"
        "400 seeds, 1 broken; 36000 simulated s in 240.0 processor s (150 a second), 1900 seeds an hour; 5 reads\n"
    )
    assert by_name(simulation.rows_of(said)) == {
        "seeds": (400.0, None),
        "seeds that broke an invariant": (1.0, False),
        "simulated seconds a processor second": (150.0, True),
        "seeds an hour, 2 processes": (1900.0, False),
    }
    with pytest.raises(Internal, match="no such module"):
        simulation.rows_of("", "no such module")
