"""The ports of a cluster's parts: kept for them as long as the cluster runs, restarts included."""

from __future__ import annotations

import errno
import socket
from types import TracebackType
from typing import Self

from mooncache.errors import ConfigInvalid
from mooncache.runtime.ports import hold_port, port_of

_BACKLOG = 2048


class PortPicker:
    """Keeps what it has picked, so that no other part and no other cluster gets it, until it is closed."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._held: dict[int, socket.socket] = {}

    def pick(self, asked: int | None, usual: int, option: str) -> int:
        """The asked port; None: the usual one when it is free, else any; 0: any free one.

        Raises:
            ConfigInvalid: the asked port cannot be used; `option` is named as the way out.
        """
        for candidate in (usual, 0) if asked is None else (asked,):
            try:
                if candidate in self._held:
                    raise OSError(errno.EADDRINUSE, "another part of this cluster uses it")
                held = hold_port(self._host, candidate)
            except OSError as error:
                if asked is None:
                    continue
                reason = error.strerror
                raise ConfigInvalid(
                    f"Port {candidate} on {self._host} cannot be used: {reason}. Choose another {option}."
                ) from None
            self._held[port_of(held)] = held
            return port_of(held)
        raise ConfigInvalid(f"No free port on {self._host}.")

    def any(self) -> int:
        """Any free port."""
        return self.pick(0, 0, "port")

    def listen(self, port: int) -> socket.socket:
        """Listen on a port that was picked: connections wait in the queue, whether its service runs or not."""
        held = self._held[port]
        held.listen(_BACKLOG)
        return held

    def release(self, port: int) -> None:
        """Give one port up: who connects there is refused."""
        if (held := self._held.pop(port, None)) is not None:
            held.close()

    def close(self) -> None:
        """Give the ports up."""
        for held in self._held.values():
            held.close()
        self._held.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()
