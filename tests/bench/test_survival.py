"""The cases of `mooncache bench survival` can be chosen by name, and each can be loaded and says what it measures."""

from __future__ import annotations

import importlib

import pytest

from mooncache.bench import cases
from mooncache.bench import survival as folder
from mooncache.bench.survival.command import survival


@pytest.mark.parametrize("name", cases.case_names(folder))
def test_each_case_can_be_loaded_and_has_a_sentence(name: str) -> None:
    assert callable(cases.load_case(folder, name))
    text = importlib.import_module(f"{folder.__name__}.{name}").__doc__
    assert text is not None
    assert text.partition("\n")[0].endswith(".")


def test_an_unknown_case_is_a_wrong_argument() -> None:
    assert survival("nothing-of-that-name") == 2
