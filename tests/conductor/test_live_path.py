"""What a conductor that runs for months must not do: drift, leak, follow what cannot be, forget what failed."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from mooncache.conductor.core.fleet_book import Assignment, FleetBook, Shape
from mooncache.conductor.core.policy.fleet import DECODE
from mooncache.conductor.core.policy.types import Choice, Request
from tests.conductor.fleets import Row, choose

NOTHING = np.zeros(2, dtype=np.int64)


def pair() -> FleetBook:
    book = FleetBook()
    book.add("p", Shape())
    book.add("d", Shape(role=DECODE))
    return book


def assignment(name: str, output_tokens: float = 100.0, **choice: object) -> Assignment:
    asked = Request(prompt_tokens=1000, local=NOTHING, output_tokens=output_tokens, sequences=3)
    made = Choice(True, "admitted", prefill=0, decode=1, compute_s=0.1, ttft_s=0.1, tbt_s=0.05)
    return Assignment(name, replace(made, **choice), asked)  # type: ignore[arg-type]


def test_an_idle_instance_holds_exactly_nothing() -> None:
    book, rng = pair(), random.Random(1)
    for number in range(50):
        book.assign(assignment(str(number), rng.uniform(1, 5000)), 0.0)
        book.first_token(str(number), 1.0)
    for number in rng.sample(range(50), 50):
        book.ended(str(number), 2.0)
    seen = book.view(2.0)
    for column in (seen.sequences, seen.kv_tokens, seen.batch_sequences, seen.batch_kv_tokens, seen.queue_s):
        assert column.tolist() == [0.0, 0.0], "rounding is left over: an idle instance looks used"


def test_a_prompt_beyond_the_memory_waits_for_what_runs_there_not_for_ever() -> None:
    rows = (Row("d", role="both", sequences=1, kv_tokens=1e-9, kv_capacity_tokens=1000, stay_s=10.0),)
    assert choose(rows, 4096).wait_s <= 10.0


def test_what_generates_is_moved_as_a_whole() -> None:
    book = pair()
    book.add("e", Shape(role=DECODE))
    book.assign(assignment("1"), 0.0)
    book.first_token("1", 1.0)
    book.move("1", 2, 2.0)
    assert book.view(2.0).batch_sequences.tolist() == [0.0, 0.0, 3.0]
    book.ended("1", 3.0)
    assert book.view(3.0).batch_sequences.tolist() == [0.0, 0.0, 0.0]


def test_a_move_away_from_a_row_that_was_used_again_leaves_the_new_one_alone() -> None:
    book = pair()
    book.add("e", Shape(role=DECODE))
    book.assign(assignment("1"), 0.0)
    book.remove("d")
    assert book.add("f", Shape(role=DECODE)) == 1
    book.assign(assignment("2"), 0.0)
    before = book.view(0.0).decode_at(2.0)[0][1]
    book.move("1", 2, 0.0)
    assert book.view(0.0).decode_at(2.0)[0][1] == before


def test_a_late_end_of_a_fetch_does_not_free_the_links_of_another_source() -> None:
    book = pair()
    book.add("s", Shape(send_tokens_per_s=1200.0))
    book.assign(assignment("1", branch="fetch", fetch_tokens=10, source_row=2), 0.0)
    book.remove("s")
    assert book.add("t", Shape(send_tokens_per_s=1200.0)) == 2
    book.assign(assignment("2", branch="fetch", fetch_tokens=10, source_row=2), 0.0)
    book.started("1", 1.0)
    assert book.send_rate(2) == 600.0, "the second reader is still there"
