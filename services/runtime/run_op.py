"""The one wrapper around every control call, whichever channel it came by.

Order: authenticate, find the op, check rights, bind the request id, run under the deadline, map whatever
happens to the catalogue, count and log. An op never sees a caller that is not authenticated, and a caller
never sees a stack trace.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from typing import Final, Protocol

from google.protobuf.message import DecodeError, Message

from mooncache.auth import Identity
from mooncache.errors import DeadlineExceeded, Internal, MooncacheError, PermissionDenied, ProtocolError
from mooncache.runtime.clock import Clock
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.plain_structlog import structlog
from mooncache.runtime.rpc import CallContext, RpcTable

TIMEOUT_MAX_S: Final = 3600.0
TIMEOUT_DEFAULT_S: Final = 30.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")

log = get_logger(__name__)


Identify = Callable[[], Identity]
"""Tells who makes one call, however that was proven; raises Unauthenticated."""


class Observer(Protocol):
    """Hears about every finished call; see metrics.RpcMetrics."""

    def call_finished(self, method: str, code: str, elapsed_s: float) -> None: ...


def new_request_id() -> str:
    """A fresh request id (128 random bits)."""
    return secrets.token_hex(16)


def clean_request_id(text: str) -> str:
    """The caller's request id when it is harmless to log, otherwise a fresh one."""
    return text if _REQUEST_ID.fullmatch(text) else new_request_id()


class OpRunner:
    """Runs the ops of one RpcTable. `run` is the whole interface; it raises nothing but MooncacheError."""

    def __init__(
        self,
        table: RpcTable,
        clock: Clock,
        observer: Observer | None = None,
    ) -> None:
        self.table = table
        self._clock = clock
        self._observer = observer
        self.active_count = 0

    async def run(
        self, method: str, request: Message | bytes, *, identify: Identify, request_id: str, timeout_s: float
    ) -> Message:
        """Run one call. Raw bytes are parsed only after the caller is known; `timeout_s` is cut to an hour."""
        started_s = self._clock.now_s()
        request_id = clean_request_id(request_id)
        outcome = "CANCELLED"
        self.active_count += 1
        # The id is visible to every log line of this call and to the calls that it makes.
        with structlog.contextvars.bound_contextvars(request_id=request_id, method=method):
            try:
                response = await self._run(method, request, identify, request_id, timeout_s)
                outcome = "OK"
                return response
            except MooncacheError as error:
                outcome = error.name
                raise
            finally:
                self.active_count -= 1
                elapsed_s = self._clock.now_s() - started_s
                if self._observer is not None:
                    known = method if method in self.table.ops else "unknown"
                    self._observer.call_finished(known, outcome, elapsed_s)
                level = "debug" if outcome == "OK" else "info"
                getattr(log, level)(Event.RPC_FINISHED, code=outcome, elapsed_ms=round(elapsed_s * 1e3, 3))

    async def _run(
        self, method: str, request: Message | bytes, identify: Identify, request_id: str, timeout_s: float
    ) -> Message:
        identity = identify()
        op = self.table.op(method)
        if op.admin_only and not identity.admin:
            raise PermissionDenied(
                f"{method} needs the cluster token; tenant {identity.tenant} may not call it."
            )
        timeout_s = min(timeout_s, TIMEOUT_MAX_S)
        now_s = self._clock.now_s()
        context = CallContext(identity.tenant, identity.admin, request_id, now_s + timeout_s, now_s)
        if timeout_s <= 0:
            raise DeadlineExceeded(f"{method} came after its deadline.")
        message = self._parse(op.method.request_class, request)
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return await op.handle(self.table.state, message, context)
        except MooncacheError:
            raise
        except TimeoutError as error:
            if deadline.expired():
                raise DeadlineExceeded(f"{method} did not finish within {timeout_s:g} s.") from None
            raise self._defect(method, error) from error
        except Exception as error:
            raise self._defect(method, error) from error

    @staticmethod
    def _parse(request_class: type[Message], request: Message | bytes) -> Message:
        if not isinstance(request, bytes):
            return request
        try:
            return request_class.FromString(request)
        except DecodeError:
            raise ProtocolError(f"The bytes are not a {request_class.DESCRIPTOR.name}.") from None

    def _defect(self, method: str, error: Exception) -> Internal:
        log.error(Event.RPC_DEFECT, error=repr(error), exc_info=error)
        return Internal(
            f"{method} failed unexpectedly ({type(error).__name__}); the service's log has the details."
        )
