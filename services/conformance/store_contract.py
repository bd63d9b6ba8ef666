"""What a store under test offers: five calls, and hooks by which the kit looks closer and breaks things.

A class is named as `package.module:Class` and called with one dictionary, its configuration. A store needs the calls
of `StoreUnderTest`. Each hook of `StoreHooks` is optional: without it, or when it raises `NotOfferedError`, the
promises that need it are not applicable, with that reason.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

from mooncache.conformance.core.verdicts import NotOfferedError
from mooncache.errors import InvalidArgument

CALL_LIMIT_S: Final = 10.0
"""What a call may take when a store does not say so by `call_limit_s`."""


class StoreUnderTest(Protocol):
    """Every store. Calls come from several threads at once. A call that cannot be carried out raises any exception."""

    def put(self, key: bytes, value: bytes | bytearray | memoryview) -> None:
        """Store a value; it is readable when this returns. Of a key that is there either value may stay."""
        ...

    def get(self, key: bytes) -> bytes | None:
        """The value; None when it is not there."""
        ...

    def get_into(self, key: bytes, destination: memoryview) -> int | None:
        """Read the value to the beginning of writable memory; its bytes, or None when it is not there. Memory that is
        too small is an exception.
        """
        ...

    def exist(self, key: bytes) -> bool:
        """Whether the value is there."""
        ...

    def remove(self, key: bytes) -> bool:
        """Remove the value; False when it was not there."""
        ...

    def close(self) -> None:
        """End this client, and what it started."""
        ...


class PartialWrite(Protocol):
    """A value that is written piece by piece."""

    def write(self, offset: int, data: bytes) -> None:
        """Write a piece."""
        ...

    def commit(self) -> None:
        """From now on it is readable."""
        ...

    def abandon(self) -> None:
        """It will not be written to its end."""
        ...


class StoreHooks(Protocol):
    """What a store may offer on top."""

    call_limit_s: float
    """Seconds that a call may take at most, whatever is broken."""

    def attach_config(self) -> dict[str, Any]:
        """A configuration (JSON values) with which this class, in any process, is another client of the same store."""
        ...

    def capacity_bytes(self) -> int:
        """Bytes of values that it holds at most; more than that evicts or is refused."""
        ...

    def begin(self, key: bytes, size_bytes: int) -> PartialWrite:
        """Begin a value that is written piece by piece and invisible until its commit."""
        ...

    def damage(self, rng: random.Random) -> int:
        """Flip single bits in many places of what is stored, behind the store's back; how many."""
        ...

    def truncate(self, rng: random.Random) -> int:
        """Cut off the ends of what is stored, behind the store's back; how many bytes."""
        ...

    def stop_node(self) -> None:
        """Make one node stop answering, with its connections open (SIGSTOP)."""
        ...

    def resume_node(self) -> None:
        """Let it go on."""
        ...

    def kill_node(self) -> None:
        """End one node at once (SIGKILL)."""
        ...

    def restart_node(self) -> None:
        """Start it again; returns when the store is whole."""
        ...


def hook(store: StoreUnderTest, name: str) -> Callable[..., Any]:
    """A hook of a store.

    Raises:
        NotOfferedError: it has none of this name.
    """
    found = getattr(store, name, None)
    if not callable(found):
        raise NotOfferedError(f"the store has no hook {name}()")
    return cast("Callable[..., Any]", found)


def call_limit_s(store: StoreUnderTest) -> float:
    """What a call of this store may take."""
    return float(getattr(store, "call_limit_s", CALL_LIMIT_S))


def class_named(name: str) -> Callable[[dict[str, Any]], StoreUnderTest]:
    """The class of `package.module:Class`.

    Raises:
        InvalidArgument: there is none, or it lacks a call.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise InvalidArgument(f"{name!r} is no store: it is named as package.module:Class.")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InvalidArgument(f"{name} cannot be imported: {error}.") from None
    calls = ("put", "get", "get_into", "exist", "remove", "close")
    missing = [call for call in calls if not callable(getattr(found, call, None))]
    if missing or not callable(found):
        raise InvalidArgument(f"{name} is no store: it has no {', '.join(missing)}().")
    return cast("Callable[[dict[str, Any]], StoreUnderTest]", found)


def name_of(store: StoreUnderTest) -> str:
    """`package.module:Class` of a store."""
    return f"{type(store).__module__}:{type(store).__qualname__}"
