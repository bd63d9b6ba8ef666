"""The rule "pins hold": what ends a pin before its time, and what breaks the rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.ledger import Ledger
from tests.simulation.pins import PinLedger

BLOCK, OTHER = (7, b"k" * 32), (7, b"o" * 32)
Steps = Callable[[PinLedger], None]


def broken_by(steps: Steps) -> str:
    """The broken rule's text after a client has asked at 10.0 s for a pin of 2 s; "" when it holds."""
    now_s = 10.0
    ledger = Ledger(lambda: now_s)
    ledger.pins.asks(BLOCK, 2000)
    now_s = 10.5
    steps(ledger.pins)
    return str(ledger.broken or "")


def promised(pins: PinLedger) -> None:
    pins.promised(BLOCK, 10.0, 2000)


def taken_and_unpinned_by_another_client(pins: PinLedger) -> None:
    pins.taken("node-0", BLOCK, 2000)
    pins.gives_back(BLOCK)
    pins.released("node-0", BLOCK)
    promised(pins)
    pins.copy_lost("node-0", BLOCK, "evicted")


def taken_and_shortened_by_another_client(pins: PinLedger) -> None:
    pins.taken("node-0", BLOCK, 2000)
    pins.asks(BLOCK, 1000)
    pins.taken("node-0", BLOCK, 1000)
    promised(pins)


def taken_by_a_process_that_died(pins: PinLedger) -> None:
    pins.taken("node-0", BLOCK, 2000)
    pins.process_died("node-0")
    promised(pins)
    pins.copy_lost("node-0", BLOCK, "evicted")


def taken_by_one_of_two_and_the_other_died(pins: PinLedger) -> None:
    pins.taken("node-0", BLOCK, 2000)
    pins.process_died("node-1")
    promised(pins)
    pins.copy_lost("node-1", BLOCK, "evicted")


@pytest.mark.parametrize(
    "steps",
    [
        taken_and_unpinned_by_another_client,
        taken_and_shortened_by_another_client,
        taken_by_a_process_that_died,
        taken_by_one_of_two_and_the_other_died,
    ],
)
def test_what_may_happen_to_a_pin(steps: Steps) -> None:
    assert broken_by(steps) == ""


def taken_for_another_block(pins: PinLedger) -> None:
    pins.asks(OTHER, 2000)
    pins.taken("node-0", OTHER, 2000)
    promised(pins)


def unpinned_before_it_was_asked_for(pins: PinLedger) -> None:
    pins.gives_back(BLOCK)
    pins.released("node-0", BLOCK)
    pins.promised(BLOCK, 10.5 + 1e-9, 2000)


def evicted_after_the_other_node_died(pins: PinLedger) -> None:
    pins.taken("node-0", BLOCK, 2000)
    pins.process_died("node-1")
    pins.copy_lost("node-0", BLOCK, "evicted")


def removed(pins: PinLedger) -> None:
    pins.taken("node-0", BLOCK, 2000)
    pins.copy_lost("node-0", BLOCK, "removed")


def taken_for_another_time(pins: PinLedger) -> None:
    pins.taken("node-0", BLOCK, 2)


def unpinned_unasked(pins: PinLedger) -> None:
    pins.taken("node-0", BLOCK, 2000)
    pins.gives_back(OTHER)
    pins.released("node-0", BLOCK)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (promised, "no node has pinned it for so long"),
        (taken_for_another_block, "no node has pinned it for so long"),
        (unpinned_before_it_was_asked_for, "no node has pinned it for so long"),
        (evicted_after_the_other_node_died, "let 7/6b6b6b6b go (evicted), which it has pinned"),
        (removed, "let 7/6b6b6b6b go (removed), which it has pinned"),
        (taken_for_another_time, "for 2 ms, and no client asked for it"),
        (unpinned_unasked, "unpinned 7/6b6b6b6b, and no client asked for it"),
    ],
)
def test_what_may_not(steps: Steps, text: str) -> None:
    assert text in broken_by(steps)
