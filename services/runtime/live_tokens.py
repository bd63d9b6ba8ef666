"""The cluster's tokens in a running process: what the file holds now, and when callers last proved each of them.

A file that is wrong, gone or half written changes nothing: the tokens of before stay valid, and `problem` says why. So
does one with other tokens only: a token file that was lost and made anew must not part processes that run together.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

from mooncache import auth
from mooncache.errors import ConfigInvalid

LOOK_S: Final = 1.0
T = TypeVar("T")


class FollowedFile(Generic[T]):
    """What a file means, read again when it is another one."""

    def __init__(self, path: Path, read: Callable[[Path], T]) -> None:
        """Reads it once. Raises ConfigInvalid."""
        self._path, self._read = path, read
        self._stamp = self._look()
        self.value = read(path)

    def changed(self) -> bool:
        """Whether it means something else since the last call.

        Raises ConfigInvalid for a file that is wrong or gone; then nothing has changed, and the next call looks again.
        """
        stamp = self._look()
        if stamp is not None and stamp == self._stamp:
            return False
        value = self._read(self._path)
        self._stamp = stamp
        changed = value != self.value
        self.value = value
        return changed

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


class LiveTokens:
    """The tokens that are valid now. One event loop changes them; reading is safe from any thread.

    It is a source of the token that signs (`auth.TokenSource`), and the tokens that callers may prove
    (`auth.ValidTokens`).
    """

    def __init__(self, path: Path, wall_s: Callable[[], float]) -> None:
        """Raises ConfigInvalid."""
        self._path = path
        self._file = FollowedFile(path, auth.load_token_set)
        self.set = self._file.value
        """All of them."""
        self._wall_s = wall_s
        self._used_s: dict[bytes, float] = {}
        self.problem = ""
        """Why the file as it is now is not taken over; "" when it is."""

    @property
    def tokens(self) -> tuple[auth.Token, ...]:
        """Those that are accepted; the first one signs."""
        return self.set.tokens

    @property
    def signing(self) -> auth.Token:
        """The one that this process proves."""
        return self.set.signing

    @property
    def salts(self) -> auth.Token:
        """The root of the salts."""
        return self.set.salts

    @property
    def text(self) -> str:
        """Text of the token that signs. Keep it out of logs."""
        return self.signing.text

    def used(self, token: auth.Token) -> None:
        """A caller proved this one."""
        self._used_s[token.key] = self._wall_s()

    def used_age_ms(self, token: auth.Token, also_unix_s: float = 0.0) -> int | None:
        """How long ago a caller last proved it to this process, or elsewhere at that Unix time; None: never."""
        last_s = max(self._used_s.get(token.key, 0.0), also_unix_s)
        return max(0, round((self._wall_s() - last_s) * 1e3)) if last_s else None

    def look(self) -> bool:
        """Read the file when it was replaced; whether other tokens are valid, or another one signs, since then."""
        try:
            self._file.changed()
        except ConfigInvalid as error:
            self.problem = error.message
            return False
        found, valid = self._file.value, {token.key for token in self._file.value.tokens}
        if not any(token.key in valid for token in self.tokens):
            self.problem = (
                f"The cluster token file {self._path} holds none of the tokens that are valid here. Put one of them "
                "beside the new one (`mooncache token rotate`), or start this process again."
            )
            return False
        self.problem = ""
        if found == self.set:
            return False
        self.set = found
        self._used_s = {key: used_s for key, used_s in self._used_s.items() if key in valid}
        return True
