"""A connection to the pool that an engine can live without.

Idea: the engine never waits for the pool. A thread connects, with back-off, for as long as it takes; until then, and
while the pool is judged sick, `client()` answers None and the engine computes. The judgement is a breaker: after
failures in a row the pool is left alone for a growing pause, so that a dying pool costs one time limit now and then
and not one per request.
"""

from __future__ import annotations

import contextlib
import enum
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from mooncache.errors import MooncacheError, UnknownNode
from mooncache.kvcache.tenant_clients import TenantClients
from mooncache.runtime.backoff import Backoff, step_s
from mooncache.runtime.logs import Event, get_logger

if TYPE_CHECKING:
    from mooncache.client.buffers import Buffer
    from mooncache.client.keys import Key
    from mooncache.client.reservation import ReservationBatch
    from mooncache.client.results import (
        Deviation,
        GetResult,
        MatchResult,
        NodeView,
        PutResult,
        WrongBlocks,
    )
    from mooncache.client.watch import BlockWatch

_log = get_logger(__name__)
GIVE_UP_TIMEOUT_S: Final = 1.0
INSTANCE_VARIABLE: Final = "MOONCACHE_ENGINE_INSTANCE"
"""Environment: the instance that a worker starts this engine as."""
GIVEN_UP_MAX: Final = 4096
"""Keys of one call."""


class Call(enum.StrEnum):
    """What an engine was doing when a call failed."""

    LOOKUP = "lookup"
    LOAD = "load"
    SAVE = "save"
    GIVE_UP = "give_up"
    VERIFY = "verify"


OnFailure = Callable[[Call, str], None]
"""Called for each call that failed as a whole, with the name of the error's code."""


class Registered(Protocol):
    """A buffer that the client knows; `mooncache.client.registered.RegisteredBuffer`."""

    def attach(self) -> None: ...

    def close(self) -> None: ...


class PoolClient(Protocol):
    """The calls that movers make; `mooncache.Client` has them."""

    def put_many(
        self,
        keys: Iterable[Key],
        values: Sequence[Buffer],
        *,
        prefer_node: str | None = None,
        timeout_s: float | None = None,
    ) -> PutResult: ...

    def get_many_into(
        self, keys: Iterable[Key], destinations: Sequence[Buffer], *, timeout_s: float | None = None
    ) -> GetResult: ...

    def exists_many(self, keys: Iterable[Key], *, timeout_s: float | None = None) -> tuple[bool, ...]: ...

    def match(
        self, keys: Iterable[Key] | bytes, *, touch: bool = True, timeout_s: float | None = None
    ) -> MatchResult: ...

    def reserve_many(
        self,
        keys: Iterable[Key],
        block_bytes: int,
        *,
        prefer_node: str | None = None,
        timeout_s: float | None = None,
    ) -> ReservationBatch: ...

    def watch(self) -> BlockWatch: ...

    def give_up(
        self, keys: Iterable[Key], *, node: str | None = None, timeout_s: float | None = None
    ) -> int: ...

    def report_wrong(
        self, keys: Iterable[Key], found: Deviation, *, tenant: str = "", timeout_s: float | None = None
    ) -> WrongBlocks: ...

    def register_buffer(self, buffer: Buffer) -> Registered: ...

    def nodes(self) -> Sequence[NodeView]: ...

    def stats(self) -> dict[str, int]: ...

    def for_tenant(self, session_token: str) -> PoolClient: ...

    def close(self) -> None: ...


@dataclass
class Breaker:
    """Opens after `failures_max` failures in a row, for a pause that doubles up to `pause_max_s`."""

    failures_max: int = 3
    pause_first_s: float = 0.5
    pause_max_s: float = 15.0
    failures: int = 0
    pauses: int = 0
    pause_s: float = 0.0
    open_until_s: float = 0.0

    def allows(self, now_s: float) -> bool:
        """True when the pool may be asked."""
        return now_s >= self.open_until_s

    def succeeded(self) -> None:
        self.failures = self.pauses = 0
        self.pause_s = 0.0
        self.open_until_s = 0.0

    def failed(self, now_s: float) -> None:
        """Count a failure; after a pause a single one opens it again."""
        self.failures += 1
        if self.failures >= self.failures_max and now_s >= self.open_until_s:
            self.pause_s = step_s(self.pauses, self.pause_first_s, self.pause_max_s)
            self.pauses += 1
            self.open_until_s = now_s + self.pause_s


class PoolLink:
    """A connection to the pool that reconnects by itself.

    Args:
        connect: makes a client or raises; it runs on the link's own thread.
        on_failure: called on the thread whose call failed; it must not wait.
        prepare: called with the client before anyone else gets it, on the link's thread.
    """

    def __init__(
        self,
        connect: Callable[[], PoolClient],
        *,
        pause_first_s: float = 0.2,
        pause_max_s: float = 10.0,
        breaker: Breaker | None = None,
        on_failure: OnFailure | None = None,
        prepare: Callable[[PoolClient], None] | None = None,
    ) -> None:
        self._connect = connect
        self._backoff = Backoff(random.Random(), pause_first_s, pause_max_s)
        self._breaker = breaker or Breaker()
        self._on_failure = on_failure
        self._prepare = prepare
        self._lock = threading.Lock()
        self._client: PoolClient | None = None
        self._tenants: TenantClients[PoolClient] = TenantClients(_for_tenant, prepare)
        self._closed = threading.Event()
        self.connected = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mooncache-link", daemon=True)
        self._thread.start()

    def client(self, session_token: str = "") -> PoolClient | None:
        """The connected client, or the one that acts for the tenant of a session token; None while there is none or the
        pool is left alone.
        """
        with self._lock:
            client = self._client
            if client is None or not self._breaker.allows(time.monotonic()):
                return None
        return self._tenants.client(client, session_token) if session_token else client

    @property
    def connection(self) -> PoolClient | None:
        """The connected client, also while the pool is left alone."""
        with self._lock:
            return self._client

    def stats(self) -> dict[str, int]:
        """Counters of the connected client and of those for tenants, also while the pool is left alone."""
        with self._lock:
            client = self._client
        return self._tenants.stats(client.stats()) if client is not None else {}

    @property
    def usable(self) -> bool:
        """True when the pool may be asked now."""
        return self.client() is not None

    def succeeded(self) -> None:
        """A call worked."""
        with self._lock:
            self._breaker.succeeded()

    def failed(self, call: Call, error: Exception) -> None:
        """A call failed as a whole (not: a miss)."""
        code = code_name(error)
        if self._on_failure is not None:
            self._on_failure(call, code)
        with self._lock:
            opened = self._breaker.open_until_s
            self._breaker.failed(time.monotonic())
            newly = self._breaker.open_until_s != opened
        if newly:
            _log.warning(
                Event.CONNECTOR_POOL_SICK,
                call=str(call),
                code=code,
                reason=str(error),
                pause_s=self._breaker.pause_s,
            )

    def give_up(self, keys: Sequence[Key], node: str, session_token: str = "") -> None:
        """Say at a node, or at all, that these blocks do not come: whoever waits for them looks again and computes."""
        client = self.client(session_token)
        if client is None or not keys:
            return
        try:
            for at in range(0, len(keys), GIVEN_UP_MAX):
                part = list(keys[at : at + GIVEN_UP_MAX])
                client.give_up(part, node=node or None, timeout_s=GIVE_UP_TIMEOUT_S)
        except UnknownNode:  # it has left the cluster, and with it whoever waited there
            return
        except Exception as error:  # noqa: BLE001  (waits have their time limits)
            self.failed(Call.GIVE_UP, error)

    def close(self) -> None:
        """End the connection; calls under way end with an error. Does not wait for a connection attempt."""
        self._closed.set()
        with self._lock:
            client, self._client = self._client, None
        self._tenants.close()
        if client is not None:
            with contextlib.suppress(MooncacheError, TimeoutError):
                client.close()

    def _run(self) -> None:
        logged = False
        while not self._closed.is_set():
            try:
                client = self._connect()
            except Exception as error:  # noqa: BLE001  (whatever is wrong with the pool, the engine serves)
                if not logged:
                    _log.warning(Event.CONNECTOR_POOL_ABSENT, code=code_name(error), reason=str(error))
                    logged = True
                self._closed.wait(self._backoff.next_s())
                continue
            if self._prepare is not None:
                self._prepare(client)
            with self._lock:
                if not self._closed.is_set():
                    self._client = client
                    self.connected.set()
                    _log.info(Event.CONNECTOR_POOL_CONNECTED, nodes=len(client.nodes()))
                    return
            client.close()
            return


def _for_tenant(client: PoolClient, session_token: str) -> PoolClient:
    return client.for_tenant(session_token)


def code_name(error: Exception) -> str:
    """The name of an error's code; DEFECT for what no code describes."""
    return error.name if isinstance(error, MooncacheError) else "DEFECT"


def instance_name(otherwise: str) -> str:
    """What the engine of this process is called: the instance that its worker started, else `otherwise`."""
    return os.environ.get(INSTANCE_VARIABLE) or otherwise


def connect_pool(
    *, master_targets: Sequence[str] | str | None, state_dir: str | None, name: str, build: str
) -> Callable[[], PoolClient]:
    """A maker of clients for `PoolLink`: the configured masters, or the cluster of the state folder.

    name, build: the instance and its engine, as the writer of the blocks.
    """

    def connect() -> PoolClient:
        import mooncache

        return mooncache.connect(
            master=master_targets or None, state_dir=state_dir, client_name=name, build=build
        )

    return connect
