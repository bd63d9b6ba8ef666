"""What predictions of waiting were late by, and means that fade."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.conductor.core.lateness import FIRST, MEMORY, MOST, TRUSTED, Lateness
from mooncache.conductor.core.learning import FadingMean


def learnt(shares: list[float]) -> float:
    lateness = Lateness()
    for share in shares:
        lateness.observe(20.0, 15.0, 20.0 * share, 30.0)
    return lateness.value


def test_one_in_twenty_comes_later_than_what_is_learnt() -> None:
    rng = random.Random(1)
    shares = [rng.uniform(0.0, 0.4) for _ in range(4000)]
    assert learnt(shares) == pytest.approx(0.38, abs=0.04)
    assert learnt([0.0] * 1000) == 0.0, "predictions that hold need no margin"


@given(st.lists(st.floats(0.0, MOST), min_size=TRUSTED, max_size=300))
def test_after_few_observations_nothing_of_the_first_guess_is_left(shares: list[float]) -> None:
    last = sorted(shares[-MEMORY:])
    later = sum(share > learnt(shares) * (1 + 1e-9) for share in last)
    assert later <= (1 - 0.95) * len(last), "one in twenty at most"
    assert any(learnt(shares) == pytest.approx(share) for share in last)


def test_the_first_guess_goes_with_each_observation() -> None:
    found = [learnt([0.0] * count) for count in range(TRUSTED + 1)]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (FIRST, 0.0)


def test_what_is_long_past_is_forgotten() -> None:
    assert learnt([0.9] * MEMORY) == pytest.approx(0.9)
    assert learnt([0.9] * MEMORY + [0.1] * MEMORY) == pytest.approx(0.1)


def test_who_hardly_waited_teaches_nothing() -> None:
    lateness = Lateness()
    lateness.observe(20.0, 0.5, 10.0, 30.0)
    lateness.observe(20.0, 15.0, math.nan, 30.0)
    lateness.observe(20.0, 15.0, 10.0, 0.0)
    assert lateness.value == FIRST


@given(st.lists(st.floats(-1e6, 1e6), max_size=200))
def test_it_is_a_share(shares: list[float]) -> None:
    assert 0.0 <= learnt(shares) <= MOST


def test_a_fading_mean_is_a_mean_and_follows() -> None:
    mean = FadingMean(10.0, memory=50)
    assert not mean.observe(math.nan)
    assert not mean.observe(-1.0)
    assert mean.value == 10.0, "the prior"
    for seen in (2.0, 4.0, 6.0):
        assert mean.observe(seen)
    assert mean.value == pytest.approx(4.0)
    for _ in range(500):
        mean.observe(30.0)
    assert mean.value == pytest.approx(30.0, abs=0.1)
