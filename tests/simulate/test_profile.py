"""Profiles: the built-in one is the paper's, fits find what made the points, nonsense is refused in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.conductor.core.policy.types import DecodeCost, PrefillCost
from mooncache.errors import ModelTooLarge, ProfileInvalid
from mooncache.simulate import profile as profiles

BUILT_IN = profiles.LLAMA3_70B_8XA800

# FAST'25, Figure 14: prompt tokens, cached tokens, seconds of the prefill.
FIGURE_14 = [
    (8_192, 0, 1.005),
    (16_384, 0, 2.053),
    (32_768, 0, 4.478),
    (65_536, 0, 10.585),
    (131_072, 0, 27.517),
    (8_192, 7_782, 0.134),
    (16_384, 15_565, 0.227),
    (32_768, 31_130, 0.406),
    (65_536, 62_259, 0.882),
    (131_072, 124_518, 2.329),
]


@pytest.mark.parametrize(("n", "p", "seconds"), FIGURE_14)
def test_built_in_profile_is_within_five_percent_of_the_paper(n: int, p: int, seconds: float) -> None:
    assert BUILT_IN.prefill.seconds(n, p) == pytest.approx(seconds, rel=0.05)


def test_fitting_the_papers_points_gives_the_built_in_profile() -> None:
    assert profiles.fit_prefill(FIGURE_14) == pytest.approx(BUILT_IN.prefill, rel=0.01)


def test_room_for_kv_is_the_papers() -> None:
    assert BUILT_IN.kv_capacity_tokens == pytest.approx(1.33e6, rel=0.01)


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.floats(0.001, 1), st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8), st.floats(0, 1e-5)),
    st.lists(st.tuples(st.integers(100, 100_000), st.floats(0, 0.95)), min_size=8, max_size=20),
)
def test_a_fit_predicts_what_made_its_points(
    cost: tuple[float, float, float, float], shapes: list[tuple[int, float]]
) -> None:
    true = PrefillCost(*cost)
    points = [(float(n), float(int(n * share)), true.seconds(n, int(n * share))) for n, share in shapes]
    found = profiles.fit_prefill(points)
    for n, p, seconds in points:
        assert found.seconds(int(n), int(p)) == pytest.approx(seconds, rel=1e-3)


def test_decode_fit() -> None:
    true = DecodeCost(0.02, 2e-4, 3e-8)
    points = [(float(b), float(b * kv), true.tbt_s(b, b * kv)) for b in (1, 4, 16, 64) for kv in (1000, 8000)]
    assert profiles.fit_decode(points) == pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([(100, 0, 1.0)], "at least 3"),
        ([(100, 0, 1.0), (200, 0, float("nan")), (300, 0, 3.0)], "point 2: seconds is nan"),
        ([(100, 0, 1.0), (200, 200, 2.0), (300, 0, 3.0)], "less than the prompt"),
        ([(100, 0, -1.0), (200, 0, 2.0), (300, 0, 3.0)], "positive"),
        ([(100, 0, 9.0), (2000, 0, 1.0), (30000, 0, 0.1)], "does not grow"),
        ([(100, 0, True), (200, 0, 2.0), (300, 0, 3.0)], "not a finite number"),
    ],
)
def test_nonsense_points_are_refused(points: list[tuple[float, float, float]], words: str) -> None:
    with pytest.raises(ProfileInvalid, match=words):
        profiles.fit_prefill(points)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"kv_bytes_per_token": 0.0}, ProfileInvalid, "kv_bytes_per_token is 0.0 bytes"),
        ({"load_bytes_per_s": 0.0}, ProfileInvalid, "load_bytes_per_s is 0.0"),
        ({"prefill": PrefillCost(float("nan"), 1, 1, 1)}, ProfileInvalid, "prefill.a is nan s"),
        ({"prefill": PrefillCost(1, -1e-4, 1, 1)}, ProfileInvalid, "prefill.b is -0.0001 s/token"),
        ({"prefill": PrefillCost(1, 0, 0, 1)}, ProfileInvalid, "longer prompt has to take longer"),
        ({"decode": DecodeCost(0, 0, 1)}, ProfileInvalid, "has to take time"),
        ({"weights_bytes": 700e9}, ModelTooLarge, "weights_bytes is 700.0 GB"),
    ],
)
def test_profiles_that_make_no_sense(changes: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        replace(BUILT_IN, **changes).check()  # type: ignore[arg-type]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    rows = ", ".join(str(list(point)) for point in FIGURE_14)
    path.write_text(f'base = "{BUILT_IN.name}"\n[prefill]\npoints = [{rows}]\n')
    found = profiles.read(path)
    assert found.name == "mine"
    assert found.prefill == pytest.approx(BUILT_IN.prefill, rel=0.01)
    assert found.decode == BUILT_IN.decode
    assert profiles.from_table(profiles.to_table(found)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = ", "not TOML"),
        ("kv_byte_per_token = 1", "did you mean kv_bytes_per_token"),
        ('base = "llama3-70b"', "did you mean llama3-70b-8xa800"),
        ("kv_bytes_per_token = 1", "prefill is missing"),
        ('kv_bytes_per_token = "1"', "not a number"),
        ("kv_bytes_per_token = 1\nprefill = 3\ndecode = 4", "is not a table"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ProfileInvalid, match=words):
        profiles.read(path)
