"""The gateway's application: which path leads where, and the one wrapper around every endpoint.

The wrapper gives a request its id and its trace, checks method, key, rate and limits, and writes counters and the log
line. Whatever a handler raises becomes an answer in OpenAI's shape, or an event when the stream has begun. Only this
module answers errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum, auto
from typing import Final

from mooncache.accounts.core.api_key import ALL_SCOPES, KeyScope
from mooncache.errors import (
    Draining,
    Internal,
    LimitExceeded,
    MooncacheError,
    PermissionDenied,
    RateLimited,
    Unauthenticated,
    Unsupported,
)
from mooncache.gateway.console.headers import HEADERS
from mooncache.gateway.core import faults
from mooncache.gateway.core.cors import cors_headers
from mooncache.gateway.core.faults import EndCode, Fault, Refusal
from mooncache.gateway.core.rate_limit import RateLimit, RateLimits
from mooncache.gateway.core.tenant_slices import rates_of
from mooncache.gateway.endpoints import (
    agreement,
    batch,
    batches,
    completions,
    console_act,
    console_configuration,
    console_decision,
    console_doctor,
    console_keys,
    console_limits,
    console_live,
    console_page,
    console_session,
    console_usage,
    embeddings,
    file,
    file_content,
    files,
    health,
    metrics,
    model,
    models,
    not_found,
    openapi,
    tokens,
    usage,
)
from mooncache.gateway.shell.exchange import App, ClientGone, Exchange, Receive, Scope, Send
from mooncache.gateway.shell.paths import Paths
from mooncache.gateway.state import GatewayState
from mooncache.runtime import tracing
from mooncache.runtime.bind import is_loopback
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.metrics import observe
from mooncache.runtime.plain_structlog import structlog
from mooncache.runtime.run_op import clean_request_id

PathHandler = Callable[[GatewayState, Exchange], Awaitable[None]]
CLIENT_GONE_STATUS: Final = 499
READ_METHODS: Final = ("GET", "HEAD")
_LAST_WORDS_S: Final = 5.0
_LOOK_S: Final = 0.02
_POST = ("POST",)
_LIST = (*READ_METHODS, "POST")
_ANY = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_INFERENCE: Final = frozenset({KeyScope.INFERENCE})
_BATCHES: Final = frozenset({KeyScope.BATCHES})
_USAGE: Final = frozenset({KeyScope.USAGE})
_METRICS: Final = frozenset({KeyScope.METRICS})
_CLUSTER_ONLY: Final[frozenset[KeyScope]] = frozenset()

log = get_logger(__name__)


class Access(Enum):
    """Who may call an endpoint."""

    OPEN = auto()
    KEY = auto()
    """Whoever has a key of this cluster."""
    ADMIN = auto()
    """Who has the cluster's token."""


def build_app(state: GatewayState) -> App:
    """The application of one gateway."""
    metrics_access = Access.OPEN if is_loopback(state.config.gateway.host) else Access.ADMIN
    endpoints: list[tuple[str, App]] = [
        (
            "/v1/chat/completions",
            Endpoint(state, "chat_completions", completions.handle_chat, methods=_POST, limited=True),
        ),
        (
            "/v1/completions",
            Endpoint(state, "completions", completions.handle_text, methods=_POST, limited=True),
        ),
        ("/v1/embeddings", Endpoint(state, "embeddings", embeddings.handle, methods=_POST)),
        ("/v1/files", Endpoint(state, "files", files.handle, methods=_LIST, scopes=_BATCHES)),
        (
            "/v1/files/{file_id}",
            Endpoint(state, "file", file.handle, methods=(*READ_METHODS, "DELETE"), scopes=_BATCHES),
        ),
        (
            "/v1/files/{file_id}/content",
            Endpoint(state, "file_content", file_content.handle, scopes=_BATCHES),
        ),
        ("/v1/batches", Endpoint(state, "batches", batches.handle, methods=_LIST, scopes=_BATCHES)),
        ("/v1/batches/{batch_id}", Endpoint(state, "batch", batch.handle, scopes=_BATCHES)),
        (
            "/v1/batches/{batch_id}/cancel",
            Endpoint(state, "batch_cancel", batch.handle_cancel, methods=_POST, scopes=_BATCHES),
        ),
        ("/v1/models", Endpoint(state, "models", models.handle, scopes=ALL_SCOPES)),
        ("/v1/models/{model:path}", Endpoint(state, "model", model.handle, scopes=ALL_SCOPES)),
        ("/v1/usage", Endpoint(state, "usage", usage.handle, scopes=_USAGE)),
        ("/health", Endpoint(state, "health", health.handle, access=Access.OPEN)),
        (
            "/metrics",
            Endpoint(state, "metrics", metrics.handle, access=metrics_access, scopes=_METRICS),
        ),
        (
            "/agreement",
            Endpoint(
                state,
                "agreement",
                agreement.handle,
                methods=_POST,
                access=Access.ADMIN,
                scopes=_CLUSTER_ONLY,
            ),
        ),
        (
            "/tokens",
            Endpoint(state, "tokens", tokens.handle, access=Access.ADMIN, scopes=_CLUSTER_ONLY),
        ),
        ("/openapi.json", Endpoint(state, "openapi", openapi.handle, access=Access.OPEN)),
    ]
    if state.console is not None:
        endpoints += _console_endpoints(state)
    unknown = Endpoint(state, "unknown", not_found.handle, methods=_ANY, access=Access.OPEN)
    return Paths(endpoints, unknown)


def _console_endpoints(state: GatewayState) -> list[tuple[str, App]]:
    """The console. Who may see it is checked by its session, in the handlers."""
    session_methods = (*READ_METHODS, "POST", "DELETE")
    rows = (
        ("/console", "console_page", console_page.handle, READ_METHODS),
        ("/console/static/{name}", "console_page", console_page.handle, READ_METHODS),
        ("/console/session", "console_session", console_session.handle, session_methods),
        ("/console/live", "console_live", console_live.handle, ("GET",)),
        ("/console/usage", "console_usage", console_usage.handle, READ_METHODS),
        ("/console/act", "console_act", console_act.handle, _POST),
        ("/console/configuration", "console_configuration", console_configuration.handle, READ_METHODS),
        ("/console/decision", "console_decision", console_decision.handle, READ_METHODS),
        ("/console/doctor", "console_doctor", console_doctor.handle, _LIST),
        ("/console/keys", "console_keys", console_keys.handle, _LIST),
        ("/console/keys/{key_id}", "console_keys", console_keys.handle_one, ("DELETE",)),
        ("/console/limits", "console_limits", console_limits.handle, ("PUT",)),
    )
    return [
        (path, Endpoint(state, name, handle, methods=methods, access=Access.OPEN, answer_headers=HEADERS))
        for path, name, handle, methods in rows
    ]


class Endpoint:
    """An ASGI application around one handler.

    Args:
        name: label of metrics and logs.
        methods: what is answered besides OPTIONS.
        access: who may call.
        scopes: what a key has to be for, any of them; of an endpoint for admins, who else may call.
        limited: whether it counts against rate limits and the number of requests under way.
        answer_headers: of every answer, instead of those for pages of other origins.
    """

    def __init__(
        self,
        state: GatewayState,
        name: str,
        handle: PathHandler,
        *,
        methods: tuple[str, ...] = READ_METHODS,
        access: Access = Access.KEY,
        scopes: frozenset[KeyScope] = _INFERENCE,
        limited: bool = False,
        answer_headers: Mapping[str, str] | None = None,
    ) -> None:
        self._answer_headers = answer_headers
        self._state, self.name, self._handle = state, name, handle
        self._methods, self._access, self._limited = methods, access, limited
        self._scopes = scopes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        headers = {name: value for name, value in scope["headers"] if name == b"x-request-id"}
        request_id = clean_request_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        exchange = Exchange(scope, receive, send, request_id=request_id, started_s=state.clock.now_s())
        if self._answer_headers is not None:
            exchange.reply_headers |= self._answer_headers
        else:
            exchange.reply_headers |= cors_headers(exchange.headers, state.config.gateway.cors_origins)
        if state.leaving:
            exchange.reply_headers["connection"] = "close"
        bound = structlog.contextvars.bound_contextvars(request_id=request_id, endpoint=self.name)
        span = tracing.span(
            "gateway.request",
            exchange.headers,
            kind="server",
            root=exchange.method == "POST",  # probes and scrapes are not requests
            endpoint=self.name,
        )
        with bound, span:
            outcome: str = EndCode.OK
            if self._limited:
                state.active_count += 1
                state.idle.clear()
            try:
                outcome = await self._guarded(exchange)
            finally:
                exchange.unwatch()
                exchange.release_body()
                if self._limited:
                    self._leave(exchange)
                    state.active_count -= 1
                    if not state.active_count:
                        state.idle.set()
                self._finished(exchange, outcome)

    async def _guarded(self, exchange: Exchange) -> str:
        """Run the handler and answer its errors; returns the code of the outcome: `EndCode` or an error's."""
        task = asyncio.current_task()
        assert task is not None
        try:
            await self._checked(exchange)
            return EndCode.OK
        except Refusal as refusal:
            return await self._answer(exchange, refusal.fault)
        except MooncacheError as error:
            return await self._answer(exchange, faults.of_error(error))
        except ClientGone:
            exchange.gone = True
            return self._left(exchange)
        except asyncio.CancelledError:
            if exchange.ended_by is not None:
                task.uncancel()
                return await self._answer(exchange, exchange.ended_by)
            if not exchange.gone:
                if not self._state.draining:
                    raise
                task.uncancel()
                return await self._answer(
                    exchange, faults.of_error(Draining("The gateway is shutting down."))
                )
            task.uncancel()
            return self._left(exchange)
        except Exception as error:
            log.error(Event.RPC_DEFECT, error=repr(error), exc_info=error)
            text = f"The request failed unexpectedly ({type(error).__name__}); the gateway's log has the details."
            return await self._answer(exchange, faults.of_error(Internal(text)))

    async def _checked(self, exchange: Exchange) -> None:
        state = self._state
        if exchange.method == "OPTIONS":
            exchange.reply_headers["allow"] = ", ".join((*self._methods, "OPTIONS"))
            await exchange.reply(204, b"")
            return
        if exchange.method not in self._methods:
            exchange.reply_headers["allow"] = ", ".join((*self._methods, "OPTIONS"))
            error = Unsupported(f"Method {exchange.method} is not allowed here; use {self._methods[0]}.")
            raise faults.refuse(error, status=405, code="method_not_allowed")
        if self._access is Access.OPEN:
            await self._handle(state, exchange)
            return
        self._authorize(exchange)
        with state.keyed.running(exchange):
            await self._served(exchange)

    def _authorize(self, exchange: Exchange) -> None:
        """Who calls, and whether the key is for this endpoint. Raises Unauthenticated, Refusal, PermissionDenied."""
        caller = self._state.keyring.identify(exchange.headers.get("authorization", ""))
        exchange.caller = caller
        if caller.admin or caller.scopes & self._scopes:
            return
        if self._access is Access.ADMIN:
            raise PermissionDenied("This needs the cluster token.")
        raise faults.refuse(
            PermissionDenied(
                f"This API key has the scopes {', '.join(sorted(caller.scopes))}; "
                f"this endpoint needs {' or '.join(sorted(self._scopes))}."
            ),
            code="missing_scope",
        )

    async def _served(self, exchange: Exchange) -> None:
        state = self._state
        if self._limited:
            await self._wait_for_limits(exchange)
            self._admit(exchange)
            while not state.fleet.known and state.clock.now_s() < state.waits_until_s:
                await state.clock.sleep(_LOOK_S)
        await self._handle(state, exchange)

    async def _wait_for_limits(self, exchange: Exchange) -> None:
        """Wait until this gateway has heard what the tenant may use here; other gateways serve it, too."""
        state, caller = self._state, exchange.require_caller()
        if caller.admin or not state.limiter.is_shared:
            return
        for holder, limits in caller.holders:
            asked = rates_of(limits)
            if limits.requests_under_way:
                asked[RateLimit.CONCURRENCY] = limits.requests_under_way
            await state.limit_turns.wait(state.limiter, holder, asked, state.clock)

    def _admit(self, exchange: Exchange) -> None:
        state, caller = self._state, exchange.require_caller()
        if state.draining:
            raise Draining("The gateway is shutting down; send the request to another gateway.")
        limit = state.config.gateway.request_count_max
        if state.active_count > limit:
            raise LimitExceeded("The gateway has reached its limit of running requests.")
        self._enter(exchange)
        holders = caller.holders
        for holder, limits in holders[:-1]:  # only looked at: what refuses later must cost none of them
            self._rate(exchange, holder, limits, counts=False)
        for holder, limits in reversed(holders):
            self._rate(exchange, holder, limits)

    def _rate(self, exchange: Exchange, holder: str, limits: RateLimits, *, counts: bool = True) -> None:
        """One more request of a holder, or the refusal for its limits per minute. Raises Refusal."""
        state = self._state
        verdict = state.limiter.ask(holder, limits, state.clock.now_s(), counts=counts)
        for kind, most, left in (
            (RateLimit.REQUESTS, limits.requests_per_minute, verdict.remaining_requests),
            (RateLimit.TOKENS, limits.tokens_per_minute, verdict.remaining_tokens),
        ):
            if most:
                exchange.reply_headers[f"x-ratelimit-limit-{kind}"] = f"{most:.0f}"
                exchange.reply_headers[f"x-ratelimit-remaining-{kind}"] = f"{int(left)}"
        if verdict.limit is not None:
            state.stats.rate_limited.labels(verdict.limit).inc()
            text = state.limiter.refusal(holder, verdict, limits)
            raise faults.refuse(RateLimited(text), retry_after_s=verdict.wait_s)

    def _enter(self, exchange: Exchange) -> None:
        """Count the request for its holders; the cluster token has no limit. Raises LimitExceeded."""
        state, caller = self._state, exchange.require_caller()
        counts, now_s = state.tenant_counts, state.clock.now_s()
        for holder, limits in caller.holders:
            limit, count = limits.requests_under_way, counts.get(holder, 0)
            if limit and not caller.admin and count >= state.limiter.running_max(holder, limit, now_s):
                state.stats.rate_limited.labels(RateLimit.CONCURRENCY).inc()
                state.limiter.refuse(holder, RateLimit.CONCURRENCY)
                raise LimitExceeded(state.limiter.full(holder, limit, now_s))
            counts[holder] = count + 1
            exchange.entered.append(holder)
        exchange.body_budget = state.bodies

    def _leave(self, exchange: Exchange) -> None:
        counts = self._state.tenant_counts
        for holder in exchange.entered:
            counts[holder] -= 1
            if not counts[holder]:
                del counts[holder]

    async def _answer(self, exchange: Exchange, fault: Fault) -> str:
        """Send an error: as an answer, or as the last event of a stream that has begun."""
        self._state.stats.errors.labels(fault.name).inc()
        if exchange.caller is None or not exchange.caller.admin:
            fault = faults.without_load(fault)
        try:
            # What is under way may be a client that takes nothing: its error must not hold the request.
            async with asyncio.timeout(_LAST_WORDS_S):
                if exchange.begun:
                    await exchange.write(fault.event() + faults.DONE)
                    await exchange.end()
                else:
                    await exchange.reply(fault.status, fault.body(), headers=fault.headers())
        except TimeoutError:
            exchange.gone = True
        return fault.name

    def _left(self, exchange: Exchange) -> str:
        self._state.stats.aborted.inc()
        if not exchange.begun:
            exchange.status = CLIENT_GONE_STATUS
        return EndCode.CLIENT_GONE

    def _finished(self, exchange: Exchange, outcome: str) -> None:
        state = self._state
        elapsed_s = state.clock.now_s() - exchange.started_s
        state.stats.requests.labels(self.name, str(exchange.status)).inc()
        observe(state.stats.duration.labels(self.name), elapsed_s)
        level = log.info if self._limited or outcome not in (EndCode.OK, Unauthenticated.name) else log.debug
        level(
            Event.HTTP_FINISHED,
            status=exchange.status,
            code=outcome,
            tenant=exchange.caller.tenant if exchange.caller else "",
            elapsed_ms=round(elapsed_s * 1e3, 3),
            **exchange.notes,
        )
