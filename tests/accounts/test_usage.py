"""Usage: the table in memory, the file, several writers, and what a crash or a full disk leaves."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.accounts.core.usage import (
    HOUR_S,
    OTHER,
    TOKENS_MAX,
    UsageCounts,
    UsageField,
    UsageKey,
    UsagePart,
    UsageTable,
    WorkClass,
    hour_of,
    tokens_of,
)
from mooncache.accounts.database import AccountsPlace
from mooncache.accounts.usage_store import FILE_NAME, KEPT_S, UsageStore
from mooncache.auth import check_tenant_name
from mooncache.errors import ConfigInvalid, InvalidArgument
from mooncache.gateway.core.top_tenants import TopTenants
from tests.accounts.postgres_server import secret_text

ONE = UsageCounts(requests=1, input_tokens=40, cached_tokens=8, output_tokens=3)
HOUR = 1_800_000_000 // HOUR_S * HOUR_S


def key(tenant: str = "moon", **changes: Any) -> UsageKey:
    fields: dict[str, Any] = {
        "hour_s": HOUR,
        "tenant": tenant,
        "key_id": "token",
        "model": "m",
        "work_class": WorkClass.ONLINE,
    }
    return UsageKey(**(fields | changes))


def total(place: AccountsPlace) -> UsageCounts:
    with UsageStore(place) as store:
        found = store.sums(())
    return found[0].counts if found else UsageCounts()


def test_no_tenant_is_called_like_the_rest() -> None:
    with pytest.raises(InvalidArgument):
        check_tenant_name(OTHER)


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 9), st.sampled_from(("add", "next", "written"))),
        max_size=60,
    ),
    st.integers(1, 4),
)
def test_every_count_is_written_once(steps: list[tuple[str, int, str]], rows_max: int) -> None:
    """Whatever comes between, parts that are written hold what was counted: no more, no less, each once."""
    table, added, written = UsageTable(rows_max), 0, 0
    last: UsagePart | None = None
    for name, tokens, step in (
        *steps,
        ("", 0, "next"),
        ("", 0, "written"),
        ("", 0, "next"),
        ("", 0, "written"),
    ):
        if step == "add":
            table.add(key(name), UsageCounts(requests=1, output_tokens=tokens))
            added += tokens
        elif step == "next":
            part = table.next_part()
            assert last is None or part is last, "a part that was not written is another one now"
            last = part
        elif last is not None:
            assert len(last.rows) <= rows_max + 1
            written += sum(counts.output_tokens for counts in last.rows.values())
            table.written(last)
            last = None
        table.check()
    assert written == added


def test_too_many_rows_are_counted_together() -> None:
    table = UsageTable(rows_max=2)
    for number in range(5):
        table.add(key(f"t{number}", hour_s=HOUR + number * HOUR_S), ONE)
    part = table.next_part()
    assert part is not None and table.folded == 3
    assert part.rows[key(OTHER, key_id=OTHER, model=OTHER, hour_s=HOUR + 2 * HOUR_S)].requests == 3
    assert len(part.rows) == 3 and len(table) == 3


def test_numbers_of_engines_have_a_limit() -> None:
    assert [tokens_of(each) for each in (-1, 7, 10**30)] == [0, 7, TOKENS_MAX]
    assert hour_of(HOUR + 3599.9) == HOUR


def test_a_part_is_added_once(place: AccountsPlace) -> None:
    part = UsagePart(1, {key(): ONE, key("star"): ONE})
    with UsageStore(place, create=True) as store:
        assert store.add("a", part, HOUR)
        assert not store.add("a", part, HOUR), "the same part was counted twice"
        assert store.add("b", part, HOUR), "another gateway's part was taken for the same"
        assert store.add("a", UsagePart(2, {key(): ONE}), HOUR)
    if isinstance(place, Path):
        assert stat.S_IMODE((place / FILE_NAME).stat().st_mode) == 0o600
    with UsageStore(place) as store:
        rows = store.sums((UsageField.TENANT,))
    assert [(each.values, each.counts.requests, each.counts.input_tokens) for each in rows] == [
        (("moon",), 3, 120),
        (("star",), 2, 80),
    ]


def test_sums_by_time_and_tenant(place: AccountsPlace) -> None:
    rows = {
        key(hour_s=HOUR): ONE,
        key(hour_s=HOUR + HOUR_S, work_class=WorkClass.OFFLINE): ONE,
        key("star", hour_s=HOUR + HOUR_S, model="n"): ONE,
    }
    with UsageStore(place, create=True) as store:
        store.add("a", UsagePart(1, rows), HOUR)
        assert len(store.sums((UsageField.HOUR,), since_s=HOUR + HOUR_S)) == 1
        assert len(store.sums((UsageField.HOUR,), until_s=HOUR + HOUR_S)) == 1
        mine = store.sums((UsageField.MODEL, UsageField.CLASS), tenant="moon")
        assert [each.values for each in mine] == [("m", "offline"), ("m", "online")]
        assert store.sums((), tenant="x' OR 1=1 --") == []


def test_old_rows_go(place: AccountsPlace) -> None:
    with UsageStore(place, create=True) as store:
        store.add("a", UsagePart(2, {key(): ONE}), HOUR)
        store.add("b", UsagePart(1, {key(hour_s=HOUR + KEPT_S + HOUR_S): ONE}), HOUR + KEPT_S + HOUR_S)
        assert [each.values for each in store.sums((UsageField.HOUR,))] == [(HOUR + KEPT_S + HOUR_S,)]


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """The file cannot grow: the part is refused as a whole, and is written once there is room."""
    many = UsagePart(1, {key(f"tenant-{number}"): ONE for number in range(2000)})
    with UsageStore(tmp_path, create=True) as store:
        pages = store._database.ask("PRAGMA page_count")[0][0]
        store._database.ask(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(ConfigInvalid, match="full"):
            store.add("a", many, HOUR)
        assert store.sums(()) == []
    with UsageStore(tmp_path) as store:
        assert store.add("a", many, HOUR)
    assert total(tmp_path).requests == 2000


def test_a_writer_that_is_killed_leaves_whole_parts(place: AccountsPlace) -> None:
    """kill -9 in the middle of writing: each part is in the file as a whole or not at all, and can be repeated."""
    program = textwrap.dedent(
        """
        import sys
        from mooncache.accounts.core.usage import UsageCounts, UsageKey, UsagePart, WorkClass
        from mooncache.accounts.place import opened
        from mooncache.accounts.usage_store import UsageStore
        from mooncache.config.accounts_place import place_of
        rows = {
            UsageKey(0, f"t{n}", "k", "m", WorkClass.ONLINE): UsageCounts(requests=1) for n in range(200)
        }
        with opened(place_of(sys.argv[1])) as place, UsageStore(place, create=True) as store:
            for sequence in range(1, 100_000):
                store.add("w", UsagePart(sequence, rows), 1)
                print(sequence, flush=True)
        """
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, secret_text(place)], stdout=subprocess.PIPE, env=dict(os.environ)
    )
    assert child.stdout is not None
    said = [child.stdout.readline() for _ in range(5)]
    child.kill()
    said += child.stdout.readlines()
    child.stdout.close()
    child.wait()
    known = max(int(line) for line in said if line.strip())
    found = total(place).requests
    assert found in (known * 200, (known + 1) * 200), "a part is in the file in part"
    rows = {key(f"t{number}", hour_s=0, key_id="k"): UsageCounts(requests=1) for number in range(200)}
    with UsageStore(place) as store:
        store.add("w", UsagePart(known + 1, rows), 1)  # the gateway did not learn whether it was written
    assert total(place).requests == (known + 1) * 200


def test_files_that_are_wrong_are_refused(tmp_path: Path) -> None:
    with UsageStore(tmp_path, create=True) as store:
        store.add("a", UsagePart(1, {key(): ONE}), HOUR)
    path = tmp_path / FILE_NAME
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE usage SET cached_tokens = 50")
    raw.close()
    with pytest.raises(ConfigInvalid, match="no usage"):
        total(tmp_path)
    path.chmod(0o640)
    with pytest.raises(ConfigInvalid, match="chmod 600"):
        total(tmp_path)
    path.chmod(0o600)
    path.write_bytes(b"SQLite format 3\x00" + bytes(200))
    with pytest.raises(ConfigInvalid):
        total(tmp_path)


@given(
    st.lists(st.integers(-3, 5) | st.integers(-(1 << 63), (1 << 63) - 1), min_size=7, max_size=7),
    st.text(max_size=9),
)
def test_any_row_is_usage_or_refused(counts: list[int], tenant: str) -> None:
    with tempfile.TemporaryDirectory() as folder, UsageStore(Path(folder), create=True) as store:
        values = (HOUR, tenant.replace("\x00", ""), "k", "m", "online", *counts)
        store._database.ask(f"INSERT INTO usage VALUES ({', '.join('?' * len(values))})", values)
        try:
            (found,) = store.sums((UsageField.TENANT,))
        except ConfigInvalid:
            return
        found.counts.check()


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 9), st.booleans()), max_size=80))
def test_seats_of_the_metrics(steps: list[tuple[str, int, bool]]) -> None:
    top = TopTenants(seats_max=3)
    seen: set[str] = set()
    for tenant, tokens, turn in steps:
        label = top.label(tenant, tokens)
        assert label in (tenant, OTHER)
        seen.add(label)
        if turn:
            seen -= set(top.turn())
        top.check()
        assert len(seen) <= 4


def test_who_uses_most_has_a_seat() -> None:
    top = TopTenants(seats_max=2)
    assert [top.label(each, 1) for each in "abc"] == ["a", "b", OTHER]
    top.label("c", 5)
    top.label("a", 2)
    assert top.turn() == ["b"]
    assert [top.label(each, 1) for each in "abc"] == ["a", OTHER, "c"]
    assert top.turn() == []
