"""The cases of `mooncache bench sound` can be chosen by name, and each can be loaded and says what it measures."""

from __future__ import annotations

import importlib

import pytest

from mooncache.bench.sound.command import case_names, load_case, sound
from mooncache.errors import InvalidArgument


def test_every_case_can_be_loaded_and_says_what_it_is() -> None:
    for name in case_names():
        assert callable(load_case(name))
        assert (importlib.import_module(f"mooncache.bench.sound.{name}").__doc__ or "").strip()


def test_an_unknown_case_is_refused_with_the_names_of_the_others() -> None:
    with pytest.raises(InvalidArgument, match="no case 'nothing'"):
        load_case("nothing")
    assert sound("nothing") == 2
