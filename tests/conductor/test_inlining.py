"""A decode instance computes a prompt itself where that costs less than a hand-over, and says why or why not."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.conductor.core.handover_stats import HandoverStats
from mooncache.conductor.core.policy.inlining import LEG_S, NEWCOMERS_LEAST_PER_S, delay_s, verdict
from mooncache.conductor.core.policy.types import (
    NO_ROW,
    AdmissionMode,
    InlineVerdict,
    PrefillCost,
    PrefixSource,
    Rules,
    TransferCost,
)
from tests.conductor.fleets import Row, choose, fleet, names, near

OPEN = Rules(admission=AdmissionMode.NONE)
FAST = PrefillCost(0.001, 1e-5, 0.0, 0.0)
SLOW = PrefillCost(0.001, 1e-3, 0.0, 0.0)


def test_the_speed_of_the_decode_instance_decides_and_not_a_number_of_tokens() -> None:
    """2,000 tokens are 20 ms on a fast engine and two seconds on a slow one; the hand-over takes the same of both."""
    transfer = TransferCost(0.03, 1e6)

    def chosen(decoder: PrefillCost, n: int = 2000) -> tuple[str, InlineVerdict]:
        rows = (
            Row("p", prefill=FAST, transfer=transfer),
            Row("d", role="decode", prefill=decoder, transfer=transfer),
        )
        choice = choose(rows, n, rules=OPEN)
        assert choice.inlining is not None
        return names(choice, rows)[0], choice.inlining.verdict

    assert chosen(FAST) == ("", InlineVerdict.CHEAPER)
    assert chosen(SLOW) == ("p", InlineVerdict.DEARER)
    assert chosen(SLOW, 20) == ("", InlineVerdict.CHEAPER), "what is short is cheap on any engine"
    assert chosen(FAST, 5000) == ("p", InlineVerdict.TOO_LONG), "a bound beside the price"


@pytest.mark.parametrize(("handover_s", "prefill"), [(0.0001, "p"), (5.0, "")])
def test_what_a_hand_over_takes_is_part_of_its_price(handover_s: float, prefill: str) -> None:
    medium = PrefillCost(0.001, 1e-4, 0.0, 0.0)
    rows = tuple(
        Row(name, role=role, prefill=medium, transfer=TransferCost(handover_s, 1e9))
        for name, role in (("p", "prefill"), ("d", "decode"))
    )
    assert names(choose(rows, 3000, rules=OPEN), rows)[0] == prefill


def test_sequences_that_run_there_send_a_prompt_away() -> None:
    rows = (Row("p", prefill=FAST), Row("d", role="decode", prefill=FAST))
    assert names(choose(rows, 2000, rules=OPEN), rows)[0] == ""
    busy = (rows[0], rows[1].but(sequences=64))
    choice = choose(busy, 2000, rules=OPEN)
    assert names(choice, busy)[0] == "p"
    assert choice.inlining is not None and choice.inlining.verdict is InlineVerdict.DEARER
    assert choice.inlining.here_s > choice.inlining.apart_s > 0
    slow = (rows[0], rows[1].but(sequences=64, prefill=SLOW))
    choice = choose(slow, 2000, tbt_slo_s=0.5, rules=OPEN)
    assert choice.inlining is not None and choice.inlining.verdict is InlineVerdict.STEPS


def test_without_a_prefill_instance_there_is_nothing_to_compare() -> None:
    choice = choose((Row("a", role="both"),), 50_000, rules=OPEN)
    assert choice.inlining is not None and choice.inlining.verdict is InlineVerdict.ONLY
    assert choice.prefill == NO_ROW


@given(
    st.floats(0, 500),
    st.floats(1e-4, 60),
    st.floats(0.1, 100),
    st.floats(1e-3, 10),
)
def test_others_lose_more_the_more_there_are_and_the_longer_it_takes(
    sequences: float, compute_s: float, stay_s: float, more: float
) -> None:
    def lost_s(sequences: float, compute_s: float, *, has_choice: bool = True) -> float:
        rows = fleet(Row("d", role="decode", sequences=sequences, stay_s=stay_s))
        return float(delay_s(rows, np.array([compute_s]), has_choice=has_choice)[0])

    now_s = lost_s(sequences, compute_s)
    assert now_s >= lost_s(sequences, compute_s, has_choice=False)
    assert now_s >= NEWCOMERS_LEAST_PER_S * compute_s**2 / 2
    assert lost_s(sequences + more, compute_s) > now_s
    assert lost_s(sequences, compute_s + more) > now_s
    assert near(lost_s(0.0, compute_s, has_choice=False), 0.0)


def test_verdicts() -> None:
    assert verdict(1.0, None, None).verdict is InlineVerdict.ONLY
    assert verdict(1.0, 1.0, None).verdict is InlineVerdict.CHEAPER
    assert verdict(1.0 + LEG_S / 2, 1.0, None).verdict is InlineVerdict.CHEAPER, "one leg less"
    assert verdict(1.1, 1.0, None).verdict is InlineVerdict.DEARER
    assert verdict(None, 1.0, InlineVerdict.STEPS) == (InlineVerdict.STEPS, 0.0, 1.0)


def test_a_source_with_nearly_all_makes_a_long_prompt_short() -> None:
    rows = (
        Row("p", prefill=SLOW, transfer=TransferCost(0.001, 1e7)),
        Row("d", role="decode", prefill=FAST, transfer=TransferCost(0.001, 1e7)),
    )
    choice = choose(rows, 50_000, sources=(PrefixSource(NO_ROW, 49_000),), rules=OPEN)
    assert names(choice, rows)[0] == ""


def test_what_hand_overs_take_beside_their_price_is_learnt() -> None:
    stats = HandoverStats(0.25)
    assert stats.beside_s == 0.0
    draw = random.Random(3)
    for _ in range(30):
        stats.observe_beside(draw.uniform(0.02, 0.03))
    assert 0.018 < stats.beside_s < 0.033
    stats.observe_beside(9.0)
    assert stats.beside_s < 0.04, "one stall moves little"
    for _ in range(40):
        stats.observe_beside(-1.0)
    assert 0 < stats.beside_s < 0.003, "sooner than priced is nothing beside it"
