"""Opens the place where accounts are: a folder as it is, a database with its connections."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncache.accounts.database import AccountsPlace
    from mooncache.config.accounts_place import DatabaseUrl


def accounts_at(configured: Path | DatabaseUrl) -> AccountsPlace:
    """The place that `cluster.accounts_dir` names; nothing is opened yet. `close_accounts` ends its connections.

    Raises ConfigInvalid where a database is named and its driver is missing.
    """
    if isinstance(configured, Path):
        return configured
    from mooncache.accounts.postgres import PostgresAccounts

    return PostgresAccounts(configured)


def close_accounts(place: AccountsPlace) -> None:
    """End what the place keeps open. Harmless to repeat."""
    if not isinstance(place, Path):
        place.close()


@contextlib.contextmanager
def opened(configured: Path | DatabaseUrl) -> Iterator[AccountsPlace]:
    """The place for a command. Raises ConfigInvalid."""
    place = accounts_at(configured)
    try:
        yield place
    finally:
        close_accounts(place)
