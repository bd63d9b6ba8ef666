"""What the tests of accounts share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from mooncache.accounts.database import AccountsPlace
from tests.accounts.postgres_server import PostgresServer, postgres_server

if TYPE_CHECKING:
    from mooncache.accounts.postgres import PostgresAccounts


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture(scope="session")
def shared_postgres() -> Iterator[PostgresServer]:
    """A server that no test stops."""
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["file", "database"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AccountsPlace]:
    """Where accounts are, empty: a folder, and a database of several hosts."""
    if request.param == "file":
        yield tmp_path / "accounts"
        return
    server: PostgresServer = request.getfixturevalue("shared_postgres")
    from mooncache.accounts.postgres import PostgresAccounts
    from mooncache.config.accounts_place import DatabaseUrl

    accounts = PostgresAccounts(DatabaseUrl(server.new_database()))
    yield accounts
    accounts.close()


@pytest.fixture
def url(shared_postgres: PostgresServer) -> str:
    """An empty database."""
    return shared_postgres.new_database()


@pytest.fixture
def accounts(url: str) -> Iterator[PostgresAccounts]:
    yield from _accounts_at(url)


@pytest.fixture
def other(url: str) -> Iterator[PostgresAccounts]:
    """The same database from another process' point of view."""
    yield from _accounts_at(url)


def _accounts_at(url: str) -> Iterator[PostgresAccounts]:
    from mooncache.accounts.postgres import PostgresAccounts
    from mooncache.config.accounts_place import DatabaseUrl

    found = PostgresAccounts(DatabaseUrl(url))
    yield found
    found.close()
