"""The tables of accounts in PostgreSQL: made once, step by step, and understood by programs of before."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mooncache.accounts import postgres, postgres_schema
from mooncache.accounts.core.request_limits import HolderLimits
from mooncache.accounts.key_store import KeyStore, keys_stamp_of
from mooncache.accounts.limit_store import LimitStore
from mooncache.accounts.postgres import PostgresAccounts
from mooncache.config.accounts_place import DatabaseUrl
from mooncache.errors import ConfigInvalid
from tests.accounts.postgres_server import PostgresServer
from tests.accounts.test_keys import record

pytestmark = pytest.mark.timeout(300)


def test_processes_that_start_at_once_make_the_tables_once(url: str, shared_postgres: PostgresServer) -> None:
    each = [PostgresAccounts(DatabaseUrl(url)) for _ in range(6)]
    barrier = threading.Barrier(len(each))

    def begin(accounts: PostgresAccounts) -> object:
        barrier.wait(60)
        return keys_stamp_of(accounts)

    with ThreadPoolExecutor(len(each)) as pool:
        assert len(set(pool.map(begin, each))) == 1
    for accounts in each:
        accounts.close()
    name = url.rpartition("/")[2]
    assert shared_postgres.ask("SELECT steps, oldest FROM mooncache.account_schema", name) == [(2, 1)]


def test_steps_are_carried_out_once_and_programs_of_before_go_on(
    accounts: PostgresAccounts, other: PostgresAccounts, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KeyStore(accounts) as store:
        store.add(record())
    more = (*postgres_schema.STEPS, "ALTER TABLE api_key ADD COLUMN note TEXT NOT NULL DEFAULT ''")
    monkeypatch.setattr(postgres, "STEPS", more)
    monkeypatch.setattr(postgres, "OLDEST", (*postgres_schema.OLDEST, 1))
    with KeyStore(other) as store:
        assert len(store.all()) == 1
    monkeypatch.undo()
    of_before = PostgresAccounts(DatabaseUrl(url))
    with KeyStore(of_before) as store:  # started again, it still understands the tables
        store.add(record(2))
    of_before.close()
    monkeypatch.setattr(postgres, "STEPS", (*more, "DROP TABLE audit_entry"))
    monkeypatch.setattr(postgres, "OLDEST", (*postgres_schema.OLDEST, 1, 4))
    newest = PostgresAccounts(DatabaseUrl(url))
    assert keys_stamp_of(newest) == keys_stamp_of(accounts)
    newest.close()
    monkeypatch.undo()
    too_old = PostgresAccounts(DatabaseUrl(url))
    with pytest.raises(ConfigInvalid, match="newer program"):
        keys_stamp_of(too_old)
    too_old.close()


def test_limits_of_before_have_the_normal_priority(
    accounts: PostgresAccounts, other: PostgresAccounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "STEPS", postgres_schema.STEPS[:1])
    monkeypatch.setattr(postgres, "OLDEST", postgres_schema.OLDEST[:1])
    values = ("moon", "", 60.0, 0.0, 0, 0, 0.0)
    assert keys_stamp_of(accounts)
    with accounts.transaction() as connection:
        connection.rows("INSERT INTO request_limit VALUES (%s, %s, %s, %s, %s, %s, %s)", values)
    monkeypatch.undo()
    with LimitStore(other) as store:
        assert store.all() == {("moon", ""): HolderLimits(requests_per_minute=60)}
        store.set("moon", "", HolderLimits(requests_per_minute=60, priority=-4))
        assert store.all()["moon", ""].priority == -4


def test_a_step_that_fails_leaves_nothing(
    accounts: PostgresAccounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "STEPS", (*postgres_schema.STEPS, "CREATE TABLE api_key (id TEXT)"))
    monkeypatch.setattr(postgres, "OLDEST", (*postgres_schema.OLDEST, 1))
    with pytest.raises(ConfigInvalid, match="already exists"):
        keys_stamp_of(accounts)
    monkeypatch.undo()
    assert keys_stamp_of(accounts)


def test_who_may_not_make_tables_is_told_so_once_they_are_missing(
    url: str, shared_postgres: PostgresServer
) -> None:
    name = url.rpartition("/")[2]
    shared_postgres.ask(f"CREATE ROLE r_{name} LOGIN PASSWORD 'r'")
    few = PostgresAccounts(DatabaseUrl(f"postgresql://r_{name}:r@127.0.0.1:{shared_postgres.port}/{name}"))
    with pytest.raises(ConfigInvalid, match="permission denied"):
        keys_stamp_of(few)
    few.close()
