"""The console's pure parts: the book of decisions, figures of them, sessions in cookies."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.gateway.core import console_session
from mooncache.gateway.core.console_book import DecisionBook, figures, row_of, series
from mooncache.gateway.core.console_money import ConsoleMoney
from mooncache.gateway.core.console_session import (
    CLUSTER,
    COOKIE,
    SESSION_S,
    SESSION_S_MAX,
    cookie_value,
    renewed,
    session_of,
)
from mooncache.prices.loading import read_prices

KEY, NOW = b"k" * 32, 1_800_000_000.0


def record(number: int, state: str = "finished", **more: Any) -> dict[str, Any]:
    return {
        "decision_id": f"d-{number}",
        "request_id": f"r-{number}",
        "tenant": "alice",
        "model": "m",
        "made_at_s": NOW + number,
        "state": state,
        "prompt_tokens": 1000,
        "promised": {"ttft_ms": 500.0, "tbt_ms": 50.0},
        "expected": {"without_cache_ms": 400.0},
        "observed": {"streamed": True, "ttft_ms": 120.0, "tbt_ms": 20.0, "output_tokens": 7},
        "chosen": {"prefill": "p", "decode": "d", "branch": "fetch"},
        "events": [{"phase": "finished", "cached_tokens": 800}],
        "spans": [{"part": "compute", "from_ms": 10.0, "to_ms": 110.0}],
        **more,
    }


def test_a_row_says_what_the_record_says() -> None:
    row = row_of(record(1))
    assert row is not None
    assert (row.prefill, row.decode, row.branch) == ("p", "d", "fetch")
    assert (row.cached_tokens, row.output_tokens, row.saved_ms, row.kept) == (800, 7, 300.0, True)
    late = row_of(record(2, observed={"ttft_ms": 501.0, "tbt_ms": 20.0}))
    assert late is not None
    assert late.kept is False
    whole = row_of(record(3, observed={"streamed": False, "ttft_ms": 9000.0, "tbt_ms": 1.0}))
    assert whole is not None
    assert (whole.ttft_ms, whole.kept, whole.saved_ms) == (None, None, None)  # its first token is not known
    failed = row_of(record(4, "failed", observed={}, events=[]))
    assert failed is not None
    assert (failed.kept, failed.cached_tokens) == (False, None)
    running = row_of(record(5, "running"))
    assert running is not None
    assert (running.kept, running.saved_ms) == (None, None)


def test_figures_of_rows() -> None:
    found = [
        row_of(record(1)),
        row_of(record(2, observed={"ttft_ms": 501.0, "tbt_ms": 20.0}, events=[{"cached_tokens": 0}])),
        row_of(record(3, "superseded")),
        row_of(record(4, "refused", observed={}, events=[], spans=[])),
    ]
    said = figures([row for row in found if row is not None])
    assert said["requests"] == 3  # the one that was scheduled again counts once
    assert said["states"] == {"finished": 2, "refused": 1}
    assert (said["judged"], said["kept_share"]) == (2, 0.5)
    assert (said["prompt_tokens"], said["cached_tokens"], said["hit_share"]) == (2000, 800, 0.4)
    assert (said["saved_s"], said["saved_known"]) == (0.3, 2)
    assert (said["ttft_p50_ms"], said["ttft_p95_ms"]) == (120.0, 501.0)
    nothing = figures([])
    assert (
        nothing["kept_share"] is nothing["hit_share"] is nothing["saved_s"] is nothing["ttft_p50_ms"] is None
    )


def test_steps_of_time() -> None:
    rows = [row for number in (0, 5, 10, 25) if (row := row_of(record(number))) is not None]
    steps = series(rows, NOW, 10.0, 3)
    assert [step["requests"] for step in steps] == [2, 1, 1]
    assert [step["at_s"] for step in steps] == [NOW, NOW + 10, NOW + 20]
    assert not any(step["requests"] for step in series(rows, NOW + 100, 10.0, 3))


FIELDS = [
    "decision_id",
    "observed",
    "events",
    "spans",
    "ttft_ms",
    "cached_tokens",
    "prompt_tokens",
    "part",
    "from_ms",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
)


@given(VALUES)
def test_records_of_any_form_are_harmless(value: Any) -> None:
    found = row_of(
        {**record(1), **(value if isinstance(value, dict) else {"observed": value, "events": value})}
    )
    if found is not None:
        figures([found])


def test_a_book_keeps_the_newest_and_follows_the_open_ones() -> None:
    book = DecisionBook(rows_max=100)
    assert book.take([record(n, "running" if n == 3 else "finished") for n in reversed(range(50))]) == 50
    assert book.take([record(n) for n in reversed(range(40, 60))]) == 10
    assert [row.decision_id for row in book.newest(2)] == ["d-59", "d-58"]
    assert book.next_look(page=10) == "d-4"  # the look begins with the one before it, which runs
    assert book.take([record(3)]) == 0
    assert book.next_look(page=10) == ""
    book.take([record(n) for n in reversed(range(60, 200))])
    assert len(book) == 100
    assert book.newest(100)[-1].decision_id == "d-100"
    book.check()


def test_an_open_row_that_the_conductor_forgot_is_not_asked_for_again() -> None:
    book = DecisionBook()
    book.take([record(2), record(1, "running"), record(0)])
    before = book.next_look(page=1)
    assert before == "d-2"
    book.forget_open(before)
    assert book.next_look(page=1) == ""
    book.check()


@pytest.mark.parametrize("seed", range(20))
def test_books_stay_whole(seed: int) -> None:
    rng = random.Random(seed)
    book, newest = DecisionBook(rows_max=64), 0
    states = ["running", "finished", "failed"]
    for _ in range(60):
        newest += rng.randrange(20)
        first = max(0, newest - rng.randrange(1, 40))
        book.take([record(n, rng.choice(states)) for n in reversed(range(first, newest))])
        before = book.next_look(rng.randrange(1, 64))
        if before and rng.random() < 0.5:
            book.forget_open(before)
        book.check()


def test_a_session_is_good_until_its_end() -> None:
    session = console_session.begin(CLUSTER, NOW)
    cookie = f"other=1; {COOKIE}={cookie_value(KEY, session)}"
    assert session_of(KEY, cookie, NOW) == session
    assert session_of(KEY, cookie, NOW + SESSION_S - 1) == session
    assert session_of(KEY, cookie, NOW + SESSION_S) is None
    assert session_of(b"x" * 32, cookie, NOW) is None  # another cluster's
    assert session_of(KEY, "", NOW) is None


def test_a_session_is_renewed_but_not_for_ever() -> None:
    session = console_session.begin("a" * 32, NOW)
    assert renewed(session, NOW + 10) is None
    now_s = NOW
    while (longer := renewed(session, now_s := session.until_s - 60.0)) is not None:
        session = longer
    assert session.until_s == NOW + SESSION_S_MAX
    assert session_of(KEY, f"{COOKIE}={cookie_value(KEY, session)}", now_s) == session


@given(st.integers(0, 400), st.characters(codec="ascii"))
def test_no_other_cookie_is_a_session(at: int, letter: str) -> None:
    value = cookie_value(KEY, console_session.begin(CLUSTER, NOW))
    at %= len(value)
    forged = value[:at] + letter + value[at + 1 :]
    assert (session_of(KEY, f"{COOKIE}={forged}", NOW) is not None) == (
        forged.split(";")[0].rstrip() == value
    )


@given(st.text(max_size=300))
def test_cookie_headers_of_any_form_are_harmless(text: str) -> None:
    assert session_of(KEY, text, NOW) is None
    assert session_of(KEY, f"{COOKIE}={text}", NOW) is None


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites() -> None:
    plain = console_session.set_cookie("v", 10, secure=False)
    assert {"HttpOnly", "SameSite=Strict", "Path=/console"} <= set(plain.split("; "))
    assert console_session.set_cookie("v", 10, secure=True).endswith("; Secure")


def test_payback_of_the_pools_space(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("[cost]\ncurrency = 'EUR'\n[[dram]]\ngb = 500\nprice_per_hour = 0.5\n")
    money = ConsoleMoney(read_prices(path))
    memory = {"tier": "dram", "capacity_bytes": 250e9, "used_bytes": 1}
    nodes = [
        {"tiers": [memory, {"tier": "disk", "capacity_bytes": None, "used_bytes": 5}]},
        {"tiers": [memory, {"tier": "hbm", "capacity_bytes": 80e9, "used_bytes": None}]},
    ]
    (row,) = money.paybacks(nodes, saved_dram=0.25, saved_ssd=1.0, window_s=900.0)  # disks have no price
    assert (row["kind"], row["size_bytes"]) == ("dram", 500e9)  # that of engines' machines is not counted
    assert row["cost_per_month"] == pytest.approx(0.5 * 730)
    assert (row["saved_per_month"], row["ratio"]) == (pytest.approx(730.0), pytest.approx(2.0))
    assert money.paybacks([], 0.0, 0.0, 900.0) == []
