"""Where a load waits for blocks of another instance: a pure decision from measured numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.kvcache.core.streaming import (
    FREE_SHARE,
    GAIN_MIN_S,
    LIMIT_OF_EXPECTED,
    OPEN_MAX,
    EngineMemory,
    Streaming,
    StreamMode,
    WaitPlace,
    wait_place,
)
from mooncache.kvcache.leg_hint import LegHint

PLENTY = EngineMemory(900, 1000)


def place(mode: StreamMode = StreamMode.AUTO, **changes: Any) -> WaitPlace:
    given: dict[str, Any] = {
        "transfer_s": 0.05,
        "wait_s": 0.5,
        "blocks": 100,
        "memory": PLENTY,
        "streams": 0,
    }
    return wait_place(mode, **(given | changes))


def test_with_memory_to_spare_a_transfer_is_hidden_behind_the_wait() -> None:
    assert place() is WaitPlace.STREAMED
    assert place(wait_s=60.0) is WaitPlace.STREAMED, "memory that no other request wants costs nothing"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": StreamMode.OFF}, WaitPlace.OFF),
        ({"streams": OPEN_MAX}, WaitPlace.MANY),
        ({"mode": StreamMode.ON, "streams": OPEN_MAX}, WaitPlace.MANY),
        ({"transfer_s": None}, WaitPlace.SPEED_UNKNOWN),
        ({"transfer_s": GAIN_MIN_S / 2}, WaitPlace.NO_GAIN),
        ({"wait_s": GAIN_MIN_S / 2}, WaitPlace.NO_GAIN),
        ({"memory": None}, WaitPlace.MEMORY),
        ({"memory": EngineMemory(99, 1000)}, WaitPlace.MEMORY),
        ({"memory": EngineMemory(100, 1000)}, WaitPlace.MEMORY),
    ],
)
def test_without_a_gain_it_waits_outside(changes: dict[str, Any], reason: WaitPlace) -> None:
    assert place(**changes) is reason


def test_switched_on_it_streams_whatever_is_known() -> None:
    unknown = {"transfer_s": None, "wait_s": 0.0, "memory": None}
    assert place(StreamMode.ON, **unknown) is WaitPlace.STREAMED


@given(
    free=st.integers(0, 1000),
    more=st.integers(0, 1000),
    blocks=st.integers(1, 1000),
    transfer_s=st.floats(0.0, 10.0),
    wait_s=st.floats(0.0, 100.0),
)
def test_more_free_memory_never_speaks_against_a_stream(
    free: int, more: int, blocks: int, transfer_s: float, wait_s: float
) -> None:
    numbers = {"blocks": blocks, "transfer_s": transfer_s, "wait_s": wait_s}
    if place(memory=EngineMemory(free, 2000), **numbers) is WaitPlace.STREAMED:
        assert place(memory=EngineMemory(free + more, 2000), **numbers) is WaitPlace.STREAMED
        assert free >= blocks


def test_when_memory_is_short_a_long_wait_costs_more_than_a_short_one() -> None:
    half = EngineMemory(100 + int(1000 * FREE_SHARE / 2), 1000)  # a second of waiting costs half a second
    assert place(memory=half, wait_s=0.09) is WaitPlace.STREAMED
    assert place(memory=half, wait_s=0.11) is WaitPlace.MEMORY


def test_an_engine_learns_how_long_its_loads_take() -> None:
    known = Streaming(StreamMode.AUTO, block_bytes=1 << 20)
    numbers: dict[str, Any] = {"limit_s": LIMIT_OF_EXPECTED, "memory": PLENTY, "streams": 0}
    assert known.place(100, **numbers) is WaitPlace.SPEED_UNKNOWN
    for _ in range(3):
        known.loaded(100, 0.05)
        known.loaded(0, 0.0)
    assert known.place(100, **numbers) is WaitPlace.STREAMED
    assert known.place(1, **numbers) is WaitPlace.NO_GAIN


def test_a_plan_that_says_how_long_a_wait_lasts_is_believed() -> None:
    known = Streaming(StreamMode.AUTO, block_bytes=1 << 20)
    for _ in range(8):
        known.loaded(100, 0.1)
    half: dict[str, Any] = {"limit_s": 30.0, "memory": EngineMemory(300, 2000), "streams": 0}
    assert known.place(100, **half) is WaitPlace.MEMORY, "a third of the limit is long for the last memory"
    assert known.place(100, **half, expected_s=0.1) is WaitPlace.STREAMED
    hint = LegHint.from_params(LegHint(wait_ms=2000, expected_ms=9000).to_params())
    assert hint.expected_s == 2.0, "no longer than the limit"
