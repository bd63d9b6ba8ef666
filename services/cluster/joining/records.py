"""Invitations of this machine as files, for `mooncache invite list` and `revoke`: STATE/invitations/NAME.json.

The process of an invitation writes its file; the code's secret is in that process alone. Revoking leaves NAME.revoked
beside the file, which the process reads before it lets a machine join.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from mooncache.cluster.joining.core.code import is_invitation_name
from mooncache.cluster.joining.core.invitation import KEPT_S, Invitation, InvitationState, aged
from mooncache.errors import ConfigInvalid, NotFound
from mooncache.whole_file import write_whole

_FOLDER: Final = "invitations"
_FILE_BYTES_MAX: Final = 1 << 16


class InvitationRecords:
    """The files in one state folder."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / _FOLDER

    def write(self, invitation: Invitation) -> None:
        """Write a record whole or not at all. Raises ConfigInvalid."""
        path = self._path(invitation.name)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, msgspec.json.encode(invitation))
        except OSError as error:
            raise ConfigInvalid(f"{self._folder} cannot be written: {error.strerror}.") from None

    def is_revoked(self, name: str) -> bool:
        """Whether an invitation was revoked."""
        return self._path(name).with_suffix(".revoked").exists()

    def find(self, name: str, now_unix_s: float) -> Invitation | None:
        """An invitation as it is now; None when this machine has no record of it."""
        if not is_invitation_name(name):
            return None
        try:
            with self._path(name).open("rb") as file:
                found = msgspec.json.decode(file.read(_FILE_BYTES_MAX), type=Invitation)
        except (OSError, msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        found = aged(found, now_unix_s)
        if found.state is not InvitationState.OPEN:
            return found
        if self.is_revoked(name):
            return replace(found, state=InvitationState.REVOKED)
        return found if _runs(found.pid) else replace(found, state=InvitationState.ENDED)

    def all(self, now_unix_s: float) -> list[Invitation]:
        """Every invitation of the last day, the oldest first; older records are deleted."""
        found = []
        for path in sorted(self._folder.glob("*.json")):
            invitation = self.find(path.stem, now_unix_s)
            if invitation is None or now_unix_s - invitation.expires_unix_s > KEPT_S:
                with contextlib.suppress(OSError):
                    path.unlink()
                    path.with_suffix(".revoked").unlink(missing_ok=True)
                continue
            found.append(invitation)
        return sorted(found, key=lambda one: one.created_unix_s)

    def revoke(self, name: str, now_unix_s: float) -> Invitation:
        """Revoke an open invitation; from now on its code is refused. Returns it as it was.

        Raises:
            NotFound: this machine has no such invitation.
        """
        found = self.find(name, now_unix_s)
        if found is None:
            raise NotFound(
                f"This machine has no invitation {name[:40]!r}; `mooncache invite list` shows those of the last day."
            )
        if found.state is InvitationState.OPEN:
            try:
                self._path(name).with_suffix(".revoked").touch(mode=0o600)
            except OSError as error:
                raise ConfigInvalid(f"{self._folder} cannot be written: {error.strerror}.") from None
        return found

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def _runs(pid: int) -> bool:
    """Whether this process is a running `mooncache invite`."""
    try:
        return b"invite" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
