"""Clients that act for the tenants whose requests an engine computes.

Idea: a request's leg brings a session token of its tenant (made by the gateway, good for a quarter of an hour or more).
Blocks of the request move through a client of that token, so nodes know whose they are. A client is made with the first
request that brings a new token, which opens no connection yet, and goes when many others were used since.

The invariant: a client goes only when no call can be under way, which no call is for longer than `CALL_MAX_S`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from mooncache.errors import MooncacheError
from mooncache.runtime.logs import Event, get_logger

_log = get_logger(__name__)
CLIENTS_KEPT: Final = 64
CLIENTS_MAX: Final = 512
"""Of tokens that were used lately; requests of further ones do without the pool."""
CALL_MAX_S: Final = 900.0


class EndingClient(Protocol):
    """What is used of a client here."""

    def stats(self) -> dict[str, int]: ...

    def close(self) -> None: ...


C = TypeVar("C", bound=EndingClient)


@dataclass(slots=True)
class _TenantClient(Generic[C]):
    client: C
    used_s: float


class TenantClients(Generic[C]):
    """The clients of one connection, by session token. Thread-safe.

    Args:
        make: makes the client of a token from the connection's own; raises MooncacheError.
        prepare: called with each new client before anyone else gets it.
    """

    def __init__(
        self,
        make: Callable[[C, str], C],
        prepare: Callable[[C], None] | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_client = make
        self._prepare = prepare
        self._now_s = now_s
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _TenantClient[C]] = OrderedDict()  # longest unused first
        self._gone: Counter[str] = Counter()  # figures of clients that went
        self._closed = False

    def client(self, parent: C, session_token: str) -> C | None:
        """The client of a token, made from `parent` when it is new; None when the token is none, or there are too many.

        Making one takes as long as registering the engine's memory once more.
        """
        now_s = self._now_s()
        with self._lock:
            known = self._known.get(session_token)
            if known is not None:
                known.used_s = now_s
                self._known.move_to_end(session_token)
                return known.client
            unused = self._take_unused(now_s)
            full = self._closed or len(self._known) >= CLIENTS_MAX
            made = None if full else self._make(parent, session_token)
            if made is not None:
                self._known[session_token] = _TenantClient(made, now_s)
        for client in unused:
            self._end(client)
        return made

    def stats(self, own: dict[str, int]) -> dict[str, int]:
        """`own` counters and those of all clients that were made here, by name."""
        with self._lock:
            stats = [dict(self._gone), *(known.client.stats() for known in self._known.values())]
        total = Counter(own)
        for each in stats:
            for name, value in each.items():
                # Whether a rail works is no count.
                total[name] = max(total[name], value) if name.endswith("_up") else total[name] + value
        return dict(total)

    def close(self) -> None:
        """End all clients; calls under way end with an error."""
        with self._lock:
            self._closed = True
            clients = [known.client for known in self._known.values()]
            self._known.clear()
        for client in clients:
            self._end(client)

    def _make(self, parent: C, session_token: str) -> C | None:
        try:
            client = self._make_client(parent, session_token)
        except MooncacheError as error:
            _log.warning(Event.CONNECTOR_TENANT_REFUSED, code=error.name, reason=error.message)
            return None
        if self._prepare is not None:
            self._prepare(client)
        return client

    def _take_unused(self, now_s: float) -> list[C]:
        unused: list[C] = []
        while len(self._known) >= CLIENTS_KEPT:
            token, known = next(iter(self._known.items()))
            if now_s - known.used_s < CALL_MAX_S:
                break
            del self._known[token]
            self._gone.update(known.client.stats())
            unused.append(known.client)
        return unused

    @staticmethod
    def _end(client: EndingClient) -> None:
        with contextlib.suppress(MooncacheError, TimeoutError):
            client.close()
