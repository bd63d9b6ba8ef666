"""The budget of verified hits, and how far blocks are from each other: pure rules."""

from __future__ import annotations

import math
import random
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mooncache.kvcache.core.shadow import BURST_S, ShadowSampler
from mooncache.kvcache.distance import Comparison


@given(
    st.floats(0.01, 1.0),
    st.floats(1.0, 1e5),
    st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, 40_000)), min_size=1, max_size=60),
    st.integers(0, 1 << 30),
)
def test_the_budget_is_never_exceeded(
    share: float, rate: float, hits: list[tuple[float, int]], seed: int
) -> None:
    sampler, rng = ShadowSampler(share, rate), random.Random(seed)
    now_s, taken = 100.0, 0
    for pause_s, tokens in hits:
        now_s += pause_s
        taken += tokens if sampler.takes(tokens, now_s, rng.random()) else 0
        assert taken <= rate * (now_s - 100.0 + BURST_S) * (1 + 1e-9)


def test_a_share_of_the_hits_is_taken() -> None:
    sampler, rng = ShadowSampler(0.25, 1e12), random.Random(1)
    taken = sum(sampler.takes(10, float(at), rng.random()) for at in range(4000))
    assert 850 < taken < 1150
    assert not any(ShadowSampler(0.0, 1e9).takes(1, 0.0, 0.0) for _ in range(10))
    assert ShadowSampler(1.0, 1.0).takes(10, 0.0, 0.999)
    assert not ShadowSampler(1.0, 1.0).takes(11, 0.0, 0.0), "more than ten seconds' tokens"
    assert not ShadowSampler(1.0, 1.0).takes(0, 0.0, 0.0)


def block(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def apart(computed: bytes, stored: bytes, dtype: str = "float32", parts: int = 1) -> float:
    found = Comparison.of(dtype, parts)
    assert found is not None
    half = len(computed) // 2
    return found.distance([memoryview(computed)[:half], memoryview(computed)[half:]], stored)


def test_a_wrong_part_counts_by_itself() -> None:
    right = block([100.0] * 8 + [1.0] * 8)
    wrong = block([100.0] * 8 + [1.5] * 8)
    assert apart(wrong, right, parts=2) == pytest.approx(0.5)
    assert apart(wrong, right, parts=1) < 0.01
    assert apart(right, right) == 0.0


@pytest.mark.parametrize(
    ("computed", "stored"),
    [([math.nan, 1.0], [1.0, 1.0]), ([1.0, 1.0], [math.inf, 1.0]), ([1.0, 1.0], [0.0, 0.0])],
)
def test_what_cannot_be_compared_is_infinitely_far(computed: list[float], stored: list[float]) -> None:
    assert apart(block(computed), block(stored)) == math.inf
    assert apart(block([1.0] * 2), block([1.0] * 4)) == math.inf


def test_types_have_their_tolerance_and_others_are_not_compared() -> None:
    one, near = struct.pack("<2e", 1.0, 1.0), struct.pack("<2e", 1.001, 1.0)
    half = Comparison.of("float16", 1)
    assert half is not None
    assert 0 < apart(near, one, "float16") < half.tolerance
    assert apart(b"\x80\x3f\x80\x3f", b"\x80\x3f\x00\x40", "bfloat16") == pytest.approx(1 / math.sqrt(5))
    assert Comparison.of("uint8", 1) is None


@example(b"\x00\x00\x00\x00\x81\x7f\x00\x00", 6)
@example(b"\x00\x00\x00\x00\x00\x00\x81\x7f", 6)
@given(st.binary(min_size=8, max_size=8), st.integers(0, 63))
def test_any_bytes_have_a_distance(data: bytes, bit: int) -> None:
    other = bytearray(data)
    other[bit // 8] ^= 1 << bit % 8
    for dtype in ("float32", "float16", "bfloat16"):
        found = apart(data, bytes(other), dtype)
        assert found >= 0.0
        assert not math.isnan(found)
