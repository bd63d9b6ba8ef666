"""An engine tells the worker beside it what the cache did for a decode leg, when the leg has ended.

Engines say it in their answers too, but vLLM only in those that are not streamed. So the connector sends it to its
worker as well, and the worker's next report brings it to the conductor.

Idea: a ZeroMQ socket beside the passport file, in a folder that only this user can enter, as those of the cache events
are. The engine never waits for it: what finds no room is lost and counted, as a report that never came. Bytes that come
here are hostile until `decode` has checked them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import zmq

from mooncache.kvcache.leg_hint import NAME, CacheReport

MESSAGE_BYTES_MAX: Final = 4096
QUEUE_MAX: Final = 1024
"""Reports that may wait on each side of the socket."""
_DECISION_ID_CHARS_MAX: Final = 64


class EndedLeg(NamedTuple):
    """A decode leg that has ended: by which decision it was sent, and what the engine's cache did for it."""

    decision_id: str
    cache: CacheReport


def reports_path(passport_path: Path) -> Path:
    """The socket for the reports of the engine that writes its passport there."""
    return passport_path.with_suffix(".legs")


def encode(leg: EndedLeg) -> bytes:
    """A report as bytes."""
    return msgspec.json.encode({"decision_id": leg.decision_id, NAME: leg.cache})


def decode(data: bytes) -> EndedLeg | None:
    """Back from `encode`; None for anything else. Numbers that make no sense count as not said."""
    if len(data) > MESSAGE_BYTES_MAX:
        return None
    try:
        found: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    name = found.get("decision_id") if isinstance(found, dict) else None
    cache = CacheReport.from_params(found)
    if not isinstance(name, str) or not 0 < len(name) <= _DECISION_ID_CHARS_MAX or cache is None:
        return None
    return EndedLeg(name, cache)


class LegReporter:
    """The engine's end.

    Args:
        passport_path: where the engine writes its passport; None: no worker is beside it.
    """

    def __init__(self, passport_path: Path | None) -> None:
        self._path = reports_path(passport_path) if passport_path is not None else None
        self._socket: zmq.Socket[bytes] | None = None

    def send(self, leg: EndedLeg) -> bool:
        """Send a report, without waiting. Returns False when it is lost: none before it was taken, or no way."""
        if self._path is None:
            return True
        try:
            if self._socket is None:  # not before: an engine may fork after its connector was made
                self._socket = zmq.Context.instance().socket(zmq.PUSH)
                self._socket.setsockopt(zmq.LINGER, 0)
                self._socket.setsockopt(zmq.SNDHWM, QUEUE_MAX)
                self._socket.connect(f"ipc://{self._path}")
            self._socket.send(encode(leg), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Close the socket; what was not sent is lost."""
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
