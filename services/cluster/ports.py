"""Ports that are free now: several are chosen together, so that no two parts get the same one."""

from __future__ import annotations

import errno
import socket
from types import TracebackType
from typing import Self

from mooncache.errors import ConfigInvalid
from mooncache.runtime.ports import bind_free


class PortPicker:
    """Holds what it has picked until the `with` block ends; then the parts take the ports themselves."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._held: list[socket.socket] = []
        self._picked: set[int] = set()

    def pick(self, asked: int | None, usual: int, option: str) -> int:
        """The asked port; None: the usual one when it is free, else any; 0: any free one.

        Raises:
            ConfigInvalid: the asked port cannot be used; `option` is named as the way out.
        """
        for candidate in (usual, 0) if asked is None else (asked,):
            probe = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
            try:
                if not candidate:
                    bind_free(probe, self._host)
                elif candidate in self._picked:
                    raise OSError(errno.EADDRINUSE, "another part of this cluster uses it")
                else:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((self._host, candidate))
            except OSError as error:
                probe.close()
                if asked is None:
                    continue
                reason = error.strerror
                raise ConfigInvalid(
                    f"Port {candidate} on {self._host} cannot be used: {reason}. Choose another {option}."
                ) from None
            self._held.append(probe)
            self._picked.add(int(probe.getsockname()[1]))
            return int(probe.getsockname()[1])
        raise ConfigInvalid(f"No free port on {self._host}.")

    def any(self) -> int:
        """Any free port."""
        return self.pick(0, 0, "port")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        for probe in self._held:
            probe.close()
