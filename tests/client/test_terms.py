"""Which term is followed: the newest; an older one only when it stays and nothing newer is heard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncache.client.terms import PATIENCE_S, REFUSALS_MIN, Terms


def test_newer_terms_are_followed_at_once_and_older_ones_are_not() -> None:
    terms = Terms()
    assert all(terms.hear(term, 0.0) for term in (1, 1, 5))
    assert not terms.hear(4, 0.0)
    assert terms.obey(5)
    assert not terms.obey(4)
    assert terms.obey(6)
    assert terms.newest == 6


def test_an_older_term_that_stays_is_followed_in_the_end() -> None:
    terms = Terms()
    terms.hear(9, 0.0)
    assert not terms.hear(2, 100.0)
    assert not terms.hear(2, 100.0 + PATIENCE_S), "two answers may be two moments of a stale leader"
    assert terms.hear(2, 100.0 + PATIENCE_S)
    assert terms.newest == 2
    assert terms.obey(2)


def test_whoever_is_newer_in_between_begins_the_wait_again() -> None:
    terms = Terms()
    terms.hear(9, 0.0)
    for now_s in range(100):
        assert terms.hear(9, float(now_s))
        assert not terms.hear(2, float(now_s))


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 5), st.booleans()), max_size=60))
def test_no_command_brings_an_older_term_back(steps: list[tuple[int, float, bool]]) -> None:
    terms, now_s = Terms(), 0.0
    for term, delay_s, command in steps:
        now_s += delay_s
        before, refused = terms.newest, terms.refusals
        if command:
            assert terms.obey(term) is (term >= before)
            assert terms.newest == max(before, term)
        elif terms.hear(term, now_s):
            assert terms.newest == term
            assert term >= before or refused + 1 >= REFUSALS_MIN
        else:
            assert terms.newest == before > term
