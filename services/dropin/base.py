"""What every family of calls stands on: the connection, the registered buffers, and how errors become codes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from mooncache.dropin import codes
from mooncache.dropin.memory import RegisteredBuffers
from mooncache.dropin.objects import Objects, Source
from mooncache.dropin.values import ReplicateConfig
from mooncache.errors import Closed, InvalidArgument, MooncacheError
from mooncache.runtime.logs import Event, get_logger

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="StoreBase")

_log = get_logger(__name__)
NAMES_MAX: Final = 1 << 20
_KEY_LISTS: Final = ("keys", "base_keys")


def failed(call: str, error: MooncacheError) -> int:
    """Log why a call failed, of which its caller sees a number only; that number."""
    code = codes.code_of_error(error)
    _log.warning(Event.DROPIN_FAILED, call=call, code=code, error=type(error).__name__, reason=str(error))
    return code


def one(call: Callable[Concatenate[S, P], int]) -> Callable[Concatenate[S, P], int]:
    """The call answers a number: of an error, its code."""

    @functools.wraps(call)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return call(self, *args, **kwargs)
        except MooncacheError as error:
            return failed(call.__name__, error)

    return guarded


def each(call: Callable[Concatenate[S, P], list[int]]) -> Callable[Concatenate[S, P], list[int]]:
    """The call answers a number for each key: of an error that ends it as a whole, its code for all of them."""

    @functools.wraps(call)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> list[int]:
        try:
            return call(self, *args, **kwargs)
        except MooncacheError as error:
            keys: Any = args[0] if args else next(kwargs[name] for name in _KEY_LISTS if name in kwargs)
            return [failed(call.__name__, error)] * len(keys)

    return guarded


def other(default: T) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """The call answers something else, and `default` when it failed."""

    def decorate(call: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        @functools.wraps(call)
        def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return call(self, *args, **kwargs)
            except MooncacheError as error:
                failed(call.__name__, error)
                return default

        return guarded

    return decorate


def refuse(call: str, reason: str) -> None:
    """Log why a call of the original is not served here."""
    _log.warning(Event.DROPIN_REFUSED, call=call, reason=reason)


class StoreBase:
    """The connection that `setup` makes and `close` ends."""

    def __init__(self) -> None:
        self._connected: Objects | None = None
        self._registry = RegisteredBuffers()
        self._names: dict[str, None] = {}  # the newest last; what remove_by_regex can match
        self._names_lock = threading.Lock()

    @property
    def _objects(self) -> Objects:
        if self._connected is None:
            raise Closed("The store is not set up. Call setup() first.")
        return self._connected

    def _put(
        self,
        call: str,
        keys: Sequence[str],
        sources: Sequence[Source],
        config: ReplicateConfig | None,
        *,
        replace: bool = False,
    ) -> list[int]:
        """Store objects; for each 0 or a negative code."""
        objects = self._objects
        if len(keys) != len(sources):
            raise InvalidArgument(f"{len(keys)} keys and {len(sources)} values do not belong together.")
        chosen = ReplicateConfig() if config is None else config
        if reason := chosen.refusal():
            raise InvalidArgument(f"{call}: {reason}.")
        answer = (objects.upsert if replace else objects.put)(keys, sources, chosen)
        with self._names_lock:
            for key, code in zip(keys, answer, strict=True):
                if not code:
                    self._names.pop(key, None)
                    self._names[key] = None
            while len(self._names) > NAMES_MAX:
                del self._names[next(iter(self._names))]
        return answer


def first_failure(answer: Sequence[int]) -> int:
    """The number of a call that stores several objects as one."""
    return next((code for code in answer if code), codes.OK)
