"""Accounts go from one place into another: what is copied, what stays, and that a repeated copy adds nothing twice."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.accounts import key_store
from mooncache.accounts.copying import LATE_S, copy_accounts
from mooncache.accounts.core.api_key import ApiKeyRecord, id_of
from mooncache.accounts.core.copying import keys_to_copy, limits_to_copy
from mooncache.accounts.core.request_limits import HolderLimits
from mooncache.accounts.core.spending import LedgerRow, SpendingPart
from mooncache.accounts.core.usage import HOUR_S, UsageCounts, UsageField, UsagePart, hour_of
from mooncache.accounts.database import AccountsPlace
from mooncache.accounts.key_store import KeyStore
from mooncache.accounts.limit_store import LimitStore
from mooncache.accounts.months import month_of
from mooncache.accounts.spending_store import SpendingStore
from mooncache.accounts.usage_store import KEPT_S, UsageStore
from mooncache.cli.app import run as cli
from mooncache.config.accounts_place import DatabaseUrl
from mooncache.errors import InvalidArgument, LimitExceeded, NotFound
from tests.accounts.postgres_server import PostgresServer
from tests.accounts.test_keys import ask, make_key, record
from tests.accounts.test_usage import HOUR, ONE, key, total
from tests.gateway.stand_in import FakeEngine, running

NOW = HOUR + HOUR_S + LATE_S
LIMITS = HolderLimits(requests_per_minute=60)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder with two keys, a limit, two hours of usage and some spending."""
    folder = tmp_path / "old" / "accounts"
    with KeyStore(folder, create=True) as keys:
        keys.add(record(1))
        keys.add(record(2, tenant="sun"))
    with LimitStore(folder, create=True) as limits:
        limits.set("moon", "", LIMITS)
    with UsageStore(folder, create=True) as usage:
        usage.add("w", UsagePart(1, {key(): ONE, key("sun"): ONE, key(hour_s=HOUR - HOUR_S): ONE}), HOUR)
    with SpendingStore(folder, create=True) as spending:
        spending.add("w", SpendingPart(1, month_of(NOW), {"moon": LedgerRow(3.0, 4.0)}), NOW)
    return folder


def keys_of(place: AccountsPlace) -> dict[str, ApiKeyRecord]:
    with KeyStore(place, create=True) as store:
        return store.all()


def spent(place: AccountsPlace) -> dict[str, LedgerRow]:
    with SpendingStore(place, create=True) as store:
        return store.of_month(month_of(NOW))


def test_everything_arrives_and_a_second_copy_adds_nothing(old: Path, place: AccountsPlace) -> None:
    first = copy_accounts(old, place, NOW)
    assert (len(first.keys.new), len(first.limits.new), first.budgets) == (2, 1, 1)
    assert (first.usage.hours, first.usage.requests, first.usage.open_hours) == (2, 3, 0)
    assert keys_of(place) == keys_of(old)
    with LimitStore(place) as limits:
        assert limits.all() == {("moon", ""): LIMITS}
    with UsageStore(old) as before, UsageStore(place) as after:
        assert after.sums(tuple(UsageField)) == before.sums(tuple(UsageField))
    assert spent(place) == {"moon": LedgerRow(0.0, 7.0)}

    # Meanwhile gateways write at the target, long enough for their own marks to be forgotten.
    later_s = NOW + 30 * 86_400
    with UsageStore(place) as usage:
        usage.add("new", UsagePart(1, {key(hour_s=hour_of(later_s)): ONE}), later_s)
    again = copy_accounts(old, place, later_s)
    assert (again.keys.new, again.keys.known) == ((), 2)
    assert (len(again.limits.new), again.limits.known, again.budgets) == (0, 1, 0)
    assert (again.usage.hours, again.usage.known_hours, again.usage.late_requests) == (0, 2, 0)
    assert total(place).requests == 4


def test_a_dry_run_counts_and_changes_nothing(old: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "accounts"
    before = sorted((path.name, path.read_bytes()) for path in old.iterdir())
    planned = copy_accounts(old, target, NOW, dry_run=True)
    assert not target.exists()
    assert sorted((path.name, path.read_bytes()) for path in old.iterdir()) == before
    assert planned == copy_accounts(old, target, NOW)
    assert copy_accounts(old, target, NOW, dry_run=True) == copy_accounts(old, target, NOW)


def test_what_the_target_has_stays_and_a_revocation_wins(old: Path, place: AccountsPlace) -> None:
    with KeyStore(place, create=True) as keys:
        keys.add(record(1))
        keys.add(record(2, tenant="sun", digest=bytes(32)))  # drawn elsewhere, as it seems
    with LimitStore(place, create=True) as limits:
        limits.set("moon", "", replace(LIMITS, requests_per_minute=7))
    with SpendingStore(place, create=True) as spending:
        spending.add("w", SpendingPart(1, month_of(NOW), {"moon": LedgerRow(1.0, 0.5)}), NOW)
    with KeyStore(old) as keys:
        keys.revoke(record(1).key_id, 5_000)
    done = copy_accounts(old, place, NOW)
    assert [each.key_id for each in done.keys.revoked] == [record(1).key_id]
    assert done.keys.differing == (record(2).key_id,)
    assert done.limits.differing == (("moon", ""),)
    assert done.budgets == 0 and spent(place) == {"moon": LedgerRow(1.0, 0.5)}
    found = keys_of(place)
    assert found[record(1).key_id].revoked_s == 5_000
    assert found[record(2).key_id].digest == bytes(32)


def test_hours_of_usage(old: Path, place: AccountsPlace) -> None:
    """One that is not over waits; what comes into one that was copied is said; another folder's are added."""
    half = copy_accounts(old, place, HOUR + HOUR_S)
    assert (half.usage.hours, half.usage.open_hours) == (1, 1)
    rest = copy_accounts(old, place, NOW)
    assert (rest.usage.hours, rest.usage.known_hours, rest.usage.open_hours) == (1, 1, 0)
    with UsageStore(old) as usage:
        usage.add("w", UsagePart(2, {key(): UsageCounts(requests=5)}), HOUR)
    assert copy_accounts(old, place, NOW).usage.late_requests == 5
    assert total(place).requests == 3
    other = old.parent / "other"
    with UsageStore(other, create=True) as usage:
        old_row = key(hour_s=HOUR - KEPT_S - HOUR_S)
        usage.add("w", UsagePart(2, {key(): ONE, old_row: ONE}), HOUR)
    assert copy_accounts(other, place, NOW).usage.requests == 1  # the older hour is forgotten everywhere
    assert total(place).requests == 4


def test_too_many_keys_are_refused_whole(
    old: Path, place: AccountsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KeyStore(place, create=True) as keys:
        keys.add(record(3))
    monkeypatch.setattr(key_store, "TENANT_KEYS_MAX", 1)
    with pytest.raises(LimitExceeded, match="1 keys of one tenant"):
        copy_accounts(old, place, NOW)
    assert list(keys_of(place)) == [record(3).key_id]


def test_places_that_are_none(old: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="another place"):
        copy_accounts(old, old.parent / "." / "accounts", NOW)
    with pytest.raises(NotFound, match="no accounts in"):
        copy_accounts(tmp_path / "nothing", old, NOW)


@given(st.data())
def test_a_key_is_copied_once_whatever_both_have(data: st.DataObject) -> None:
    rows = st.fixed_dictionaries({"revoked_s": st.integers(0, 3), "tenant": st.sampled_from("ab")})
    places = st.dictionaries(st.integers(1, 6), rows)
    source, target = (
        {record(n).key_id: record(n, **row) for n, row in data.draw(places).items()} for _ in range(2)
    )
    copies = keys_to_copy(source, target, forgotten_s=2)
    assert len(copies.new) + len(copies.revoked) + copies.known + len(copies.differing) <= len(source)
    after = target | {each.key_id: each for each in copies.new}
    after |= {each.key_id: replace(after[each.key_id], revoked_s=each.revoked_s) for each in copies.revoked}
    for key_id, was in target.items():
        assert after[key_id].tenant == was.tenant and bool(after[key_id].revoked_s) >= bool(was.revoked_s)
    for key_id, mine in source.items():
        if mine.revoked_s != 1 and after[key_id].tenant == mine.tenant:
            assert bool(after[key_id].revoked_s) >= bool(mine.revoked_s)
    again = keys_to_copy(source, after, forgotten_s=2)
    assert not again.new and not again.revoked and again.differing == copies.differing
    limits = {("a", ""): LIMITS, ("b", ""): LIMITS}
    assert not limits_to_copy(limits, limits).new


@pytest.fixture
def in_environment(shared_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[DatabaseUrl]:
    url = shared_postgres.new_database()
    monkeypatch.setenv("MOONCACHE_CLUSTER_ACCOUNTS_DIR", url)
    return DatabaseUrl(url)


async def test_a_key_of_a_folder_opens_a_gateway_with_a_database(
    tmp_path: Path,
    http: aiohttp.ClientSession,
    in_environment: DatabaseUrl,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "old"
    text = make_key(folder, capsys, "--accounts-dir", str(folder))
    now_s = int(time.time())
    with UsageStore(folder, create=True) as usage:
        rows = {key(hour_s=hour_of(now_s)): ONE, key(hour_s=hour_of(now_s) - 2 * HOUR_S): ONE}
        usage.add("w", UsagePart(1, rows), now_s)

    def copied(*options: str) -> dict[str, Any]:
        capsys.readouterr()
        assert cli(["accounts", "copy", str(folder), "--json", *options]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert in_environment.secret_text not in json.dumps(document)
        return document

    dry, done = copied("--dry-run"), copied()
    assert (dry.pop("dry_run"), done.pop("dry_run")) == (True, False)
    assert dry == done
    assert done["keys"]["copied"] == 1
    assert (done["usage"]["copied_hours"], done["usage"]["open_hours"]) == (1, 1)
    assert cli(["accounts", "copy", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "not over" in said and in_environment.secret_text not in said
    assert cli(["audit", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert [each["what"] for each in entries] == ["accounts copy"] * 3
    settings = {"cluster__accounts_dir": in_environment.secret_text}
    async with running(tmp_path / "state", [FakeEngine("e")], **settings) as bench:
        assert (await ask(bench, http, text))[0] == 200
        assert cli(["key", "revoke", id_of(text)]) == 0
    monkeypatch.delenv("MOONCACHE_CLUSTER_ACCOUNTS_DIR")
    with KeyStore(folder) as keys:
        assert not keys.all()[id_of(text)].revoked_s  # the source was not changed
