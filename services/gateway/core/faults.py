"""Errors as HTTP sees them: status, OpenAI's nested body, headers that tell a client whether to come back.

Every refusal begins as an error of the catalogue; an engine's own refusal of a request is passed on in the same shape,
whether the engine wrote it nested (vLLM, OpenAI) or flat (SGLang).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

import msgspec

from mooncache import errors
from mooncache.errors import MooncacheError

MESSAGE_CHARS_MAX: Final = 4096
DONE: Final = b"data: [DONE]\n\n"

_INVALID, _SERVER = "invalid_request_error", "server_error"
# class -> status, type, code; what is not here is a 500
_KINDS: Final[dict[type[MooncacheError], tuple[int, str, str]]] = {
    errors.InvalidArgument: (400, _INVALID, "invalid_value"),
    errors.PromptTooLong: (400, _INVALID, "context_length_exceeded"),
    errors.Unauthenticated: (401, _INVALID, "invalid_api_key"),
    errors.PermissionDenied: (403, "permission_error", "permission_denied"),
    errors.NotFound: (404, "NotFoundError", "not_found"),
    errors.InstanceUnknown: (404, "NotFoundError", "instance_unknown"),
    errors.ModelUnknown: (404, "NotFoundError", "model_not_found"),
    errors.TooLarge: (413, _INVALID, "request_too_large"),
    errors.LimitExceeded: (429, "rate_limit_error", "too_many_requests"),
    errors.Overloaded: (429, "rate_limit_error", "overloaded"),
    errors.RateLimited: (429, "rate_limit_error", "rate_limit_exceeded"),
    errors.BudgetSpent: (429, "rate_limit_error", "budget_spent"),
    errors.Unsupported: (501, _INVALID, "unsupported"),
    errors.EngineFailed: (502, _SERVER, "engine_failed"),
    errors.NoInstances: (503, _SERVER, "no_instances"),
    errors.AccountsUnavailable: (503, _SERVER, "accounts_unavailable"),
    errors.ConductorUnavailable: (503, _SERVER, "conductor_unavailable"),
    errors.EngineUnavailable: (503, _SERVER, "engine_unavailable"),
    errors.MasterUnavailable: (503, _SERVER, "master_unavailable"),
    errors.Draining: (503, _SERVER, "shutting_down"),
    errors.EngineTimeout: (504, _SERVER, "engine_timeout"),
    errors.DeadlineExceeded: (504, _SERVER, "timeout"),
}
# Trying again at once would only hang once more, or be refused once more.
_NO_RETRY: Final = (errors.EngineTimeout, errors.DeadlineExceeded)
_RETRY_AFTER_S: Final = 1.0
_RETRY_STEP_S: Final = 0.25
_BUSY: Final = (
    "The cluster has too much to do to take this request now. Come back after the time in Retry-After."
)


class EndCode(StrEnum):
    """How a request or a leg ended, beside the errors of the catalogue."""

    OK = "OK"
    CANCELLED = "CANCELLED"
    CLIENT_GONE = "CLIENT_GONE"
    ENGINE_REFUSED = "ENGINE_REFUSED"
    """The engine does not want this request."""
    REPLACED = "REPLACED"
    """Another plan's leg was sent instead."""
    SUSPECT = "SUSPECT"
    """Its instance became suspect, and another one took the request."""
    UNNEEDED = "UNNEEDED"
    """The answer was complete before the prefill leg ended."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One error answer. `name` is the catalogue's name, for logs and counters. `retry_after_s` None: not said."""

    name: str
    status: int
    message: str
    type: str
    code: str | int | None = None
    param: str | None = None
    retry_after_s: float | None = None
    should_retry: bool = False

    def body(self) -> bytes:
        """{"error": {...}}"""
        inner = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": inner})

    def event(self) -> bytes:
        """The error inside a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> list[tuple[str, str]]:
        """Headers beside the body."""
        found = [("x-should-retry", "true" if self.should_retry else "false")]
        if self.retry_after_s is not None:
            found.append(("retry-after", str(max(1, math.ceil(self.retry_after_s)))))
            found.append(("retry-after-ms", str(max(1, math.ceil(self.retry_after_s * 1e3)))))
        if self.status == 401:
            found.append(("www-authenticate", "Bearer"))
        return found


class Refusal(Exception):  # noqa: N818  (an answer on its way, not a failure)
    """Carries a Fault to the one place that answers."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(fault.message)


def of_error(error: MooncacheError, *, param: str | None = None, retry_after_s: float | None = None) -> Fault:
    """The answer for an error of the catalogue. Errors that mean "later" name a time even when none is given."""
    kind = next((_KINDS[base] for base in type(error).__mro__ if base in _KINDS), None)
    status, type_, code = kind or (500, _SERVER, error.name.lower())
    later = error.retryable and not isinstance(error, _NO_RETRY)
    if retry_after_s is None and (status == 429 or (later and status in (502, 503))):
        retry_after_s = _RETRY_AFTER_S
    message = error.message[:MESSAGE_CHARS_MAX]
    tells = status >= 500 and status != 501 and kind is not None and not isinstance(error, errors.Draining)
    if tells and error.hint and error.hint not in message:  # the hint of Draining is about store nodes
        message = f"{message} {error.hint}"
    return Fault(error.name, status, message, type_, code, param, retry_after_s, later)


def without_load(fault: Fault) -> Fault:
    """The answer for a caller who is not an operator.

    Predicted times, lengths of queues and what lacks room are the load of other tenants. What stays is when to come
    back, rounded up to a quarter of a second: without it clients would come back at once, or much too late.
    """
    if fault.name != errors.Overloaded.name:
        return fault
    later_s = fault.retry_after_s
    if later_s is not None:
        later_s = max(1, math.ceil(later_s / _RETRY_STEP_S)) * _RETRY_STEP_S
    return replace(fault, message=_BUSY, retry_after_s=later_s)


def refuse(
    error: MooncacheError,
    *,
    status: int | None = None,
    code: str | None = None,
    param: str | None = None,
    retry_after_s: float | None = None,
) -> Refusal:
    """`raise refuse(...)`: an error with what only the caller knows about it."""
    fault = of_error(error, param=param, retry_after_s=retry_after_s)
    if status is not None:
        fault = replace(fault, status=status)
    if code is not None:
        fault = replace(fault, code=code)
    return Refusal(fault)


def unknown_model(model: str) -> Refusal:
    """404 in the words that clients know."""
    return refuse(errors.ModelUnknown(f"The model `{model[:256]}` does not exist."), param="model")


def bad_request(message: str, param: str | None = None) -> Refusal:
    """400 with the field's name."""
    return refuse(errors.InvalidArgument(message), param=param)


def of_engine(status: int, body: bytes) -> Fault:
    """An engine's own refusal (its status and body), normalised to the nested form."""
    message, type_, param, code = "", "", None, None
    found = _error_object(body)
    if found is not None:
        message = str(found.get("message") or found.get("detail") or "")
        type_ = found["type"] if isinstance(found.get("type"), str) else ""
        param = found["param"] if isinstance(found.get("param"), str) else None
        code = found["code"] if isinstance(found.get("code"), (str, int)) else None
    kind = _INVALID if status < 500 else _SERVER
    text = (message or body[:512].decode("utf-8", "replace") or f"The engine answered {status}.")[
        :MESSAGE_CHARS_MAX
    ]
    name = EndCode.ENGINE_REFUSED if status < 500 else errors.EngineFailed.name
    return Fault(name, status, text, type_ or kind, code if code is not None else status, param)


def engine_event_fault(event: dict[str, object]) -> Fault | None:
    """The error that an event of an engine's stream carries, None when it carries none."""
    found = event.get("error")
    if found is None and event.get("object") == "error":
        found = event
    if found is None:
        return None
    inner = found if isinstance(found, dict) else {"message": str(found)}
    code = inner.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    fault = of_engine(status, msgspec.json.encode({"error": inner}))
    return replace(fault, name=errors.EngineFailed.name)


def _error_object(body: bytes) -> dict[str, Any] | None:
    """The object that holds message, type, param and code, wherever the engine put it."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    inner = found.get("error", found)
    if isinstance(inner, str):
        return {"message": inner}
    return inner if isinstance(inner, dict) else None
