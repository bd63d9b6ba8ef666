"""Accounts in a PostgreSQL that several gateways share: races, a server that is away, and what its URL gives away."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.accounts import postgres
from mooncache.accounts.audit_log import append, first_break_of, lines
from mooncache.accounts.core.api_key import id_of
from mooncache.accounts.core.request_limits import HolderLimits
from mooncache.accounts.core.spending import LedgerRow, SpendingPart
from mooncache.accounts.core.usage import UsageCounts, UsageField, UsagePart
from mooncache.accounts.key_store import KeyStore, keys_of_tenant, keys_stamp_of, revoke_key, valid_key_counts
from mooncache.accounts.limit_store import LimitStore
from mooncache.accounts.parts import take_part
from mooncache.accounts.postgres import PostgresAccounts
from mooncache.accounts.spending_store import SpendingStore
from mooncache.accounts.usage_store import UsageStore
from mooncache.cli.app import run as cli
from mooncache.config import explain, load, to_toml
from mooncache.config.accounts_place import DatabaseUrl, without_passwords
from mooncache.errors import AccountsUnavailable, ConfigInvalid, LimitExceeded
from mooncache.runtime.certificates import make_certificates
from mooncache.runtime.logs import redact_text
from tests.accounts.postgres_server import PostgresServer, postgres_server
from tests.accounts.test_audit import entry
from tests.accounts.test_keys import record
from tests.accounts.test_request_limits import ask
from tests.accounts.test_usage import HOUR, ONE, key
from tests.conditions import until, wait_until
from tests.gateway.stand_in import Bench, FakeEngine, running

pytestmark = pytest.mark.timeout(300)
URL_VARIABLE = "MOONCACHE_CLUSTER_ACCOUNTS_DIR"


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server that the test may stop."""
    with postgres_server() as server:
        yield server


# --- the URL ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://moon@db/accounts", "postgresql://moon@db/accounts"),
        (
            "postgres://moon:hush@db:5432/a?sslmode=require",
            "postgres://moon:[redacted]@db:5432/a?sslmode=require",
        ),
        ("postgresql://db/a?user=moon&password=hush", "postgresql://db/a?user=moon&password=[redacted]"),
        ("postgresql://moon:%40hush@one,two:5433/a", "postgresql://moon:[redacted]@one,two:5433/a"),
    ],
)
def test_a_url_shows_no_password(text: str, shown: str) -> None:
    url = DatabaseUrl(text)
    assert (str(url), url.has_password) == (shown, text != shown)
    config = load(env={URL_VARIABLE: text})
    assert config.cluster.accounts_place == url
    for said in (repr(url), repr(config), to_toml(config), redact_text(f"x {text} y"), str(explain(config))):
        assert "hush" not in said
    assert {row.name: row.value for row in explain(config)}["cluster.accounts_dir"] == shown


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://moon:p@ss@db/a",
        "postgresql://moon:pa/ss@db/a",
        "postgresql://db/a b",
        "postgres://" + "a" * 3000,
    ],
)
def test_urls_that_libpq_would_cut_wrongly_are_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load(env={URL_VARIABLE: text})
    assert "ss@db" not in caught.value.message and "p@" not in caught.value.message
    assert "ss@" not in without_passwords(f"see {text}")


@given(st.text(min_size=1, max_size=40), st.sampled_from(["postgresql", "postgres"]))
def test_no_password_is_shown_however_it_is_written(password: str, scheme: str) -> None:
    """Encoded as it should be it is hidden; as it is, the URL is refused or hides it."""
    assert (
        str(DatabaseUrl(f"{scheme}://moon:{quote('~' + password, safe='')}@db/a"))
        == f"{scheme}://moon:[redacted]@db/a"
    )
    try:
        shown = str(DatabaseUrl(f"{scheme}://moon:~{password}@db/a"))
    except ValueError:
        return
    assert "~" not in shown


def test_a_password_on_a_command_line_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    where = ["--accounts-dir", "postgresql://moon:hush@127.0.0.1:1/a", "--state-dir", str(tmp_path)]
    for words in (["key", "ls"], ["key", "create", "--tenant", "moon"], ["audit"], ["usage"]):
        assert cli([*words, *where]) == 2
        said = capsys.readouterr()
        assert "hush" not in said.out + said.err and "PGPASSWORD" in " ".join(said.err.split())


def test_without_the_driver_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "mooncache.accounts.postgres_connection", raising=False)
    monkeypatch.delattr("mooncache.accounts.postgres_connection", raising=False)
    with pytest.raises(ConfigInvalid, match=r"mooncache\[postgres\]"):
        PostgresAccounts(DatabaseUrl("postgresql://db/a"))


def test_tls_as_the_url_says(own_server: PostgresServer, tmp_path: Path) -> None:
    (certificate,) = make_certificates(tmp_path / "ours", ["127.0.0.1"])
    make_certificates(tmp_path / "others", ["127.0.0.1"])
    own_server.kill()
    own_server.use_tls(certificate)
    own_server.start()
    url = own_server.new_database()
    ours, others = (tmp_path / name / "ca.pem" for name in ("ours", "others"))
    checked = PostgresAccounts(DatabaseUrl(f"{url}?sslmode=verify-full&sslrootcert={ours}"))
    with checked.transaction() as connection:
        assert connection.rows("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()") == [(True,)]
    checked.close()
    wrong = PostgresAccounts(DatabaseUrl(f"{url}?sslmode=verify-full&sslrootcert={others}"))
    with pytest.raises(AccountsUnavailable, match="certificate"):
        keys_stamp_of(wrong)


# --- several writers -------------------------------------------------------------------------------------------------


def test_the_limit_on_keys_holds_for_those_who_make_them_at_once(
    accounts: PostgresAccounts, other: PostgresAccounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncache.accounts.key_store.TENANT_KEYS_MAX", 5)

    def make(number: int) -> bool:
        try:
            with KeyStore(accounts if number % 2 else other) as store:
                store.add(record(number))
        except LimitExceeded:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(make, range(20))) == 5
    with KeyStore(accounts) as store:
        kept = store.all()
    assert len(kept) == 5
    (tenant,) = {each.tenant for each in kept.values()}
    assert sorted(each.key_id for each in keys_of_tenant(other, tenant)) == sorted(kept)
    ended = revoke_key(other, min(kept), 2_000)
    assert ended.revoked_s == 2_000 and valid_key_counts(accounts, 2_000) == {tenant: 4}


def test_parts_of_several_gateways_are_each_added_once(
    accounts: PostgresAccounts, other: PostgresAccounts
) -> None:
    """The same rows in another order, each part twice at the same moment: as if a commit had been in doubt."""
    tenants = [f"t{number}" for number in range(20)]

    def write(job: tuple[int, int]) -> None:
        gateway, sequence = job
        ordered = tenants if gateway % 2 else tenants[::-1]
        place = (accounts, other)[gateway % 2]
        with UsageStore(place) as store:
            store.add(f"w{gateway}", UsagePart(sequence, {key(tenant): ONE for tenant in ordered}), HOUR)
        with SpendingStore(place) as store:
            rows = {tenant: LedgerRow(0.5, 0.0) for tenant in ordered}
            store.add(f"w{gateway}", SpendingPart(sequence, 202611, rows), HOUR)

    for sequence in range(1, 6):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, [(gateway, sequence) for gateway in (0, 1, 2, 0, 1, 2)]))
    with UsageStore(accounts) as store:
        assert {each.counts.requests for each in store.sums((UsageField.TENANT,))} == {15}
    with SpendingStore(other) as store:
        assert store.of_month(202611) == dict.fromkeys(tenants, LedgerRow(7.5, 0.0))


def test_one_chain_of_processes_on_several_hosts(
    accounts: PostgresAccounts, url: str, shared_postgres: PostgresServer
) -> None:
    program = textwrap.dedent(
        """
        import sys
        from mooncache.accounts.audit_log import append
        from mooncache.accounts.place import opened
        from mooncache.config.accounts_place import place_of
        from mooncache.accounts.core.audit import AuditEntry
        with opened(place_of(sys.stdin.readline().strip())) as place:
            for number in range(15):
                append(place, AuditEntry(unix_ms=number, who="ann@sun", what="drain", arguments=[], result="OK"))
        """
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(url + "\n")
        writer.stdin.close()
    for number in range(15):
        append(accounts, entry(number))
    assert [writer.wait(90) for writer in writers] == [0, 0]
    assert len(list(lines(accounts))) == 45 and first_break_of(accounts) is None
    name = url.rpartition("/")[2]
    shared_postgres.ask("DELETE FROM mooncache.audit_entry WHERE number > 43", name)
    assert first_break_of(accounts) == 44, "lines that were cut off at the end"
    append(accounts, entry(99))
    assert first_break_of(accounts) == 44, "and another one does not hide it"


def test_all_connections_in_use(accounts: PostgresAccounts, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        for _ in range(postgres.CONNECTIONS_MAX):
            stack.enter_context(accounts.transaction())
        monkeypatch.setattr(postgres, "CALL_S", 0.2)
        with pytest.raises(AccountsUnavailable, match="no free connection"):
            keys_stamp_of(accounts)
        monkeypatch.undo()
    assert keys_stamp_of(accounts)


def test_a_lock_that_another_holds_is_waited_for_in_bounds(
    accounts: PostgresAccounts, other: PostgresAccounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys_stamp_of(other)
    monkeypatch.setattr(postgres, "LOCK_S", 0.2)
    with KeyStore(accounts) as held, KeyStore(other) as store:
        with (
            held._database.transaction(changes=True),
            pytest.raises(AccountsUnavailable, match="lock timeout"),
        ):
            store.add(record())
        store.add(record())


def test_a_part_whose_commit_is_under_way_is_not_added_again(
    accounts: PostgresAccounts, other: PostgresAccounts, shared_postgres: PostgresServer
) -> None:
    """A gateway gave up a call that its server still carries out, and writes the part again."""
    with UsageStore(accounts) as first, UsageStore(other) as again, ThreadPoolExecutor(1) as pool:
        first.add("w", UsagePart(1, {key(): ONE}), HOUR)
        with first._database.transaction():
            assert take_part(first._database, "usage_writer", "w", 2, HOUR) == (False, True)
            repeated = pool.submit(again.add, "w", UsagePart(2, {key(): ONE}), HOUR)
            waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            wait_until(lambda: shared_postgres.ask(waits)[0][0])
        assert repeated.result(60) is False
        assert again.sums(())[0].counts.requests == 1, "what the first try would have added is its own"


# --- a server that is away -------------------------------------------------------------------------------------------


def test_a_server_that_was_killed_is_found_again(own_server: PostgresServer) -> None:
    accounts = PostgresAccounts(DatabaseUrl(own_server.new_database()))
    part = UsagePart(1, {key(): ONE})
    with UsageStore(accounts) as store:
        assert store.add("w", part, HOUR)
        own_server.kill()
        for _ in range(3):
            with pytest.raises(AccountsUnavailable, match="does not answer"):
                store.add("w", UsagePart(2, {key(): ONE}), HOUR)
        own_server.start()
        assert store.add("w", UsagePart(2, {key(): ONE}), HOUR), "at once, without a pause"
        assert not store.add("w", part, HOUR)
        assert store.sums(())[0].counts.requests == 2
    accounts.close()


def test_a_server_that_stands_still_is_given_up(
    own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "CALL_S", 0.3)
    accounts = PostgresAccounts(DatabaseUrl(own_server.new_database()))
    keys_stamp_of(accounts)
    own_server.pause()
    with pytest.raises(AccountsUnavailable):
        keys_stamp_of(accounts)
    own_server.resume()
    assert wait_until(lambda: _stamp(accounts))
    accounts.close()


def _stamp(accounts: PostgresAccounts) -> object:
    try:
        return keys_stamp_of(accounts)
    except AccountsUnavailable:  # it has just begun to answer
        return None


def _two(folder: Path, url: str, engines: list[FakeEngine]) -> list[Any]:
    return [
        running(folder / str(number), [engine], cluster__accounts_dir=url)
        for number, engine in enumerate(engines)
    ]


async def test_two_gateways_see_keys_of_one_database_also_while_it_is_away(
    tmp_path: Path,
    own_server: PostgresServer,
    http: aiohttp.ClientSession,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = own_server.new_database()
    monkeypatch.setenv(URL_VARIABLE, url)

    def command(*words: str) -> int:
        capsys.readouterr()
        return cli([*words, "--state-dir", str(tmp_path)])

    first, second = _two(tmp_path, url, [FakeEngine("a"), FakeEngine("b")])
    async with first as one, second as two:
        both: tuple[Bench, Bench] = (one, two)
        texts = []
        for _ in range(3):
            assert await asyncio.to_thread(command, "key", "create", "--tenant", "moon") == 0
            texts.append(capsys.readouterr().out.strip())
        stays, ends, away = texts
        for bench in both:
            await until(lambda bench=bench: bench.gateway.state.keyring.end_of(id_of(away)) is None)
            assert [(await ask(bench, http, each))[0] for each in texts] == [200] * 3
        assert await asyncio.to_thread(command, "key", "revoke", id_of(ends)) == 0
        for bench in both:
            await until(lambda bench=bench: bench.gateway.state.keyring.end_of(id_of(ends)) is not None)
            status, answer = await ask(bench, http, ends)
            assert (status, answer["error"]["code"]) == (401, "key_revoked")
        own_server.kill()
        await until(lambda: all(bench.gateway.state.accounts_lost for bench in both))
        assert [(await ask(bench, http, stays))[0] for bench in both] == [200, 200]
        assert await asyncio.to_thread(command, "key", "revoke", id_of(away)) != 0
        said = capsys.readouterr()
        assert "does not answer" in said.err and own_server.password not in said.out + said.err
        keyring = two.gateway.state.keyring
        await until(lambda: keyring.unconfirmed_s > 1)
        assert one.gateway.state.stats.accounts_unconfirmed._value is not None
        keyring._stale_max_s = 0.5
        status, answer = await ask(two, http, stays)
        assert (status, answer["error"]["code"]) == (503, "accounts_unavailable")
        assert (await ask(two, http, two.key("moon")))[0] == 200, "a tenant token needs no database"
        own_server.start()
        assert await asyncio.to_thread(command, "key", "revoke", id_of(away)) == 0
        for bench in both:
            await until(lambda bench=bench: bench.gateway.state.keyring.end_of(id_of(away)) is not None)
        await until(lambda: not any(bench.gateway.state.accounts_lost for bench in both))
        assert (await ask(two, http, stays))[0] == 200
        for bench in both:
            assert bench.gateway.state.meter is not None
            await bench.gateway.state.meter.flush()
    assert own_server.password not in caplog.text
    assert await asyncio.to_thread(command, "usage", "--tenant", "moon", "--csv") == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("moon,10,"), "what both metered, each once"
    assert await asyncio.to_thread(command, "audit", "--verify") == 0


async def test_a_gateway_does_not_start_while_it_knows_no_keys(
    tmp_path: Path, own_server: PostgresServer
) -> None:
    url = own_server.new_database()
    own_server.kill()
    with pytest.raises(AccountsUnavailable) as caught:
        async with running(tmp_path, [FakeEngine("e")], cluster__accounts_dir=url):
            pass
    assert own_server.password not in caught.value.message


def test_limits_are_those_of_all_hosts(accounts: PostgresAccounts, other: PostgresAccounts) -> None:
    with LimitStore(accounts) as store:
        store.set("moon", "", HolderLimits(money_per_month=5.0))
    with LimitStore(other) as store:
        assert store.all() == {("moon", ""): HolderLimits(money_per_month=5.0)}


def test_a_large_part_is_written_within_its_time(accounts: PostgresAccounts) -> None:
    """As many rows as a gateway keeps while the database is away."""
    rows = {key(f"tenant-{number}"): UsageCounts(requests=1) for number in range(20_000)}
    with UsageStore(accounts) as store:
        began_s = time.monotonic()
        assert store.add("w", UsagePart(1, rows), HOUR)
        print(f"{time.monotonic() - began_s:.2f} s")
        assert store.sums(())[0].counts.requests == 20_000
