"""Where commands find what is kept of tenants, who runs them, and moments as people write them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from mooncache.cli.common import WHERE, seconds_of
from mooncache.errors import ConfigInvalid, InvalidArgument

if TYPE_CHECKING:
    from mooncache.accounts.database import AccountsPlace

ACCOUNTS_DIR_HELP: Final = (
    "Folder of keys, limits and usage, or postgresql://USER@HOST/NAME; default accounts in the state folder."
)
_DURATION_MAX_S: Final = 100 * 366 * 86_400.0


@Parameter(name="*")
@dataclass(frozen=True)
class Accounts:
    """Where API keys, usage and the audit log are."""

    accounts_dir: Annotated[str | None, Parameter(group=WHERE, help=ACCOUNTS_DIR_HELP)] = None
    state_dir: Annotated[
        Path | None,
        Parameter(group=WHERE, help="State folder; default $MOONCACHE_STATE_DIR or ~/.mooncache."),
    ] = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[AccountsPlace]:
        """Open them for a command. Raises ConfigInvalid."""
        from mooncache.accounts.place import opened
        from mooncache.config import load
        from mooncache.config.accounts_place import DatabaseUrl

        overrides = {"cluster.state_dir": self.state_dir, "cluster.accounts_dir": self.accounts_dir}
        place = load(overrides=overrides).cluster.accounts_place
        if self.accounts_dir and isinstance(place, DatabaseUrl) and place.has_password:
            raise ConfigInvalid(
                "Whoever lists processes sees a password on a command line: give the database in "
                "$MOONCACHE_CLUSTER_ACCOUNTS_DIR or a configuration file, or the password in $PGPASSWORD or ~/.pgpass."
            )
        with opened(place) as found:
            yield found


HERE = Accounts()


def operator() -> str:
    """Who runs this command, as this host knows them."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user id without a name
        import os

        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:128]


def moment_s(text: str, now_s: int, option: str, *, past: bool = False) -> int:
    """A moment as Unix seconds: a date or time in UTC, or a duration from now (before now with `past`).

    Raises InvalidArgument, which names the option.
    """
    if "-" in text:
        try:
            found = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidArgument(
                f'{option}: {text[:40]!r} is no time; write "2027-01-31" or "2027-01-31T18:00".'
            ) from None
        return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp())
    seconds = seconds_of(text, option)
    if seconds > _DURATION_MAX_S:
        raise InvalidArgument(f"{option}: {text} is more than a hundred years.")
    return round(now_s - seconds if past else now_s + seconds)
