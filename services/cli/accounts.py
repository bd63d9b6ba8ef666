"""Where commands find what is kept of tenants on this host, who runs them, and moments as people write them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter

from mooncache.cli.common import WHERE, seconds_of
from mooncache.errors import InvalidArgument

ACCOUNTS_DIR_HELP: Final = "Folder of keys, limits and usage; default accounts in the state folder."
_DURATION_MAX_S: Final = 100 * 366 * 86_400.0


@Parameter(name="*")
@dataclass(frozen=True)
class Accounts:
    """Where API keys, usage and the audit log of this host are."""

    accounts_dir: Annotated[Path | None, Parameter(group=WHERE, help=ACCOUNTS_DIR_HELP)] = None
    state_dir: Annotated[
        Path | None,
        Parameter(group=WHERE, help="State folder; default $MOONCACHE_STATE_DIR or ~/.mooncache."),
    ] = None

    def folder(self) -> Path:
        """Raises ConfigInvalid."""
        from mooncache.config import load

        overrides = {"cluster.state_dir": self.state_dir, "cluster.accounts_dir": self.accounts_dir}
        return load(overrides=overrides).cluster.accounts_path


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
