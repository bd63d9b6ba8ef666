"""When a writer is quarantined, and how tables of the quarantine are joined: pure rules."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.errors import InvalidArgument
from mooncache.master.core.accusations import WRITERS_MAX, Accusations
from mooncache.runtime.quarantine import (
    ENTRIES_MAX,
    TEXT_CHARS_MAX,
    QuarantineEntry,
    QuarantineTable,
)
from mooncache.runtime.quarantine_messages import entries_of, quarantine_message


def table_of(*entries: QuarantineEntry) -> QuarantineTable:
    return QuarantineTable().joined(entries)


def test_one_verifier_alone_has_one_writer_quarantined_and_two_have_any() -> None:
    accusations = Accusations(alone_max=1)
    empty = QuarantineTable()
    assert accusations.accuse(1, "a", 100, empty) == ("a",)
    first = table_of(QuarantineEntry(1, 5, verifiers=("a",)))
    assert accusations.accuse(1, "a", 100, first) == (), "it is quarantined already"
    assert accusations.accuse(2, "a", 100, first) == (), "a broken verifier accuses everybody"
    assert accusations.accuse(2, "a", 100, first) == (), "saying it again makes no second verifier"
    assert accusations.accuse(2, "b", 101, first) == ("a", "b")
    second = first.joined([QuarantineEntry(2, 6, verifiers=("a", "b"))])
    assert accusations.accuse(3, "b", 101, second) == ("b",), "of b alone there was none"
    released = first.joined([QuarantineEntry(1, 7, released=True)])
    assert accusations.accuse(4, "a", 100, released) == ("a",), "and of a there is none any more"
    accusations.check()


def test_who_is_quarantined_is_not_heard() -> None:
    accusations = Accusations(alone_max=1)
    table = table_of(QuarantineEntry(1, 5, verifiers=("b",)))
    assert accusations.accuse(2, "a", 1, table) == ()
    assert accusations.accuse(2, "c", 102, table) == ("c",), "what the first one said does not count"


def test_with_none_alone_every_quarantine_takes_two() -> None:
    accusations = Accusations(alone_max=0)
    assert accusations.accuse(1, "a", 100, QuarantineTable()) == ()
    assert accusations.accuse(1, "b", 101, QuarantineTable()) == ("a", "b")
    accusations.accuse(2, "a", 100, QuarantineTable())
    accusations.forget(2)
    assert accusations.accuse(2, "b", 101, QuarantineTable()) == ()


def test_what_is_remembered_is_bounded() -> None:
    accusations = Accusations(alone_max=0)
    for number in range(1, WRITERS_MAX + 10):
        accusations.accuse(number, "a", 1 << 40, QuarantineTable())
    accusations.check()


ENTRIES = st.builds(
    QuarantineEntry,
    st.integers(1, 6),
    st.integers(1, 6),
    instance=st.sampled_from(["", "e"]),
    released=st.booleans(),
    verifiers=st.sampled_from([(), ("a",), ("a", "b")]),
    reason=st.sampled_from(["", "why"]),
)


@given(st.lists(ENTRIES, max_size=12), st.lists(ENTRIES, max_size=12))
def test_tables_are_joined_in_any_order(ours: list[QuarantineEntry], theirs: list[QuarantineEntry]) -> None:
    here, there = table_of(*ours), table_of(*theirs)
    joined = here.joined(there.entries.values())
    other = there.joined(here.entries.values())
    assert joined.quarantined == other.quarantined
    assert joined.mark() == other.mark()
    assert joined.joined(there.entries.values()) is joined, "what is known changes nothing"
    assert QuarantineTable.from_text(joined.to_text()) == joined
    assert table_of(*entries_of(quarantine_message(joined))) == joined


def test_a_table_is_bounded_and_what_was_released_goes_first() -> None:
    many = [QuarantineEntry(number, number, released=number % 2 == 0) for number in range(1, 400)]
    table = table_of(*many)
    assert len(table.entries) == ENTRIES_MAX
    assert len(table.quarantined) == 200
    assert table.joined(many) is table, "two full tables end their exchange"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"writers": [{"writer_id": "x"}]}', '{"writers": [1]}'])
def test_a_file_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        QuarantineTable.from_text(text)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=40) | st.just("00000000000000ff"),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["writers", "writer_id", "changed_wall_ms", "instance", "verifiers", "released"]),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@given(st.text(max_size=200) | _VALUES.map(json.dumps))
def test_any_text_is_a_table_or_refused(text: str) -> None:
    try:
        table = QuarantineTable.from_text(text)
    except InvalidArgument:
        return
    assert all(0 < number < 1 << 64 for number in table.entries)
    assert all(len(entry.instance) <= TEXT_CHARS_MAX for entry in table.entries.values())


def test_texts_of_others_are_cut_and_shown() -> None:
    values = {"writer_id": 1, "changed_wall_ms": 1, "instance": "\n" + "x" * 500, "verifiers": ["a"] * 99}
    entry = QuarantineEntry.checked(values)
    assert entry.instance == "?" + "x" * (TEXT_CHARS_MAX - 1)
    assert len(entry.verifiers) == 16
