"""A client's token from a file: when the file is replaced, the client goes over to the new token by itself."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from pathlib import Path

from mooncache.errors import MooncacheError
from mooncache.runtime.live_tokens import LOOK_S, FollowedFile

Credentials = tuple[str, bytes, str]
"""Text of the token to present, key of the tenant, name of the tenant."""


class FollowedToken:
    """The token that a file holds now. Safe to use from any thread; looks at the file once a second at most.

    A file that is wrong, gone, or of another tenant changes nothing.
    """

    def __init__(self, path: Path, read: Callable[[Path], Credentials]) -> None:
        """read: the credentials of a file; raises MooncacheError. Raises what it raises."""
        self._file = FollowedFile(path, read)
        self._tenant = self._file.value[2]
        self._credentials = self._file.value
        self._look_s = time.monotonic() + LOOK_S
        self._followers: weakref.WeakSet[KeyFollower] = weakref.WeakSet()

    def tell(self, follower: KeyFollower) -> None:
        """Have it look whenever the token is another one, whoever noticed that."""
        self._followers.add(follower)

    @property
    def credentials(self) -> Credentials:
        """As the file has them, or had them last."""
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + LOOK_S
            self._look()
        return self._credentials

    @property
    def text(self) -> str:
        """Text of the token to present. Keep it out of logs."""
        return self.credentials[0]

    def _look(self) -> None:
        try:
            changed = self._file.changed()
        except MooncacheError:
            return
        if changed and self._file.value[2] == self._tenant:
            self._credentials = self._file.value
            for follower in list(self._followers):
                follower.take(self._credentials[1])


class KeyFollower:
    """Gives a native client the key of a file's token, whenever it is another one.

    Calls look at the file, and so do the questions of a client with a master for its map; so an idle one follows, too.
    """

    def __init__(self, token: FollowedToken, set_key: Callable[[bytes], None]) -> None:
        self._token, self._set_key = token, set_key
        self._key = token.credentials[1]
        token.tell(self)

    def look(self) -> None:
        """Before a call. What is under way goes on with the key that it began with."""
        self.take(self._token.credentials[1])

    def take(self, key: bytes) -> None:
        """What new connections prove."""
        if key != self._key:
            self._key = key
            self._set_key(key)
